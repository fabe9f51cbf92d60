"""What the tests on real GPUs share: runs under mpirun, and what the machine has."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys

import pytest

from hpcdask.comm import fabric
from hpcdask.gpu.devices import Gpu
from launching import Launcher


def launch(
    ranks: int, *arguments: str, timeout: float = 90, wrapper: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run under the mpirun on PATH. What hangs is ended, and tells the stacks of its threads.

    Parameters
    ----------
    ranks, arguments, timeout
        How many, what follows ``-m hpcdask.run``, and seconds.
    wrapper
        What a shell does in each rank before.
    """
    if shutil.which("mpirun") is None:
        pytest.fail("no mpirun on PATH")
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    env = {**os.environ, **allowed, "PYTHONFAULTHANDLER": "1"}
    launcher = Launcher("the mpirun on PATH", ["mpirun", "--oversubscribe"], env)
    shell = ["sh", "-c", f'{wrapper}; exec "$@"', "sh"] if wrapper else []
    command = [*shell, sys.executable, "-m", "hpcdask.run", *arguments]
    done = launcher.run(ranks, *command, timeout=timeout)
    return subprocess.CompletedProcess(arguments, done.code, done.out, done.err)


def sharing(workers: int, gpus: list[Gpu]) -> list[str]:
    """Options with which workers share what GPUs there are, each with a pool; else none."""
    if workers <= len(gpus):
        return []
    return ["--oversubscribe", "--rmm-pool-size", f"{0.8 / -(-workers // len(gpus)):g}"]


def nvlink_joins(gpus: list[Gpu]) -> bool:
    mine = {frozenset(pair) for pair in itertools.combinations([gpu.uuid for gpu in gpus], 2)}
    return bool(mine) and mine <= {frozenset(pair) for pair in fabric.look().nvlink}


def slurm_answers() -> bool:
    """Whether the controller of a SLURM does."""
    ping = ["scontrol", "ping"]
    return bool(shutil.which("srun")) and not subprocess.run(ping, capture_output=True).returncode
