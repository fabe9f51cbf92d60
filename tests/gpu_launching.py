"""What the tests on real GPUs share: runs under mpirun, and what the machine has."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from typing import Any

import pytest

from hpcdask.comm import fabric
from hpcdask.gpu.devices import Gpu
from launching import Launcher

#: Exchanges blocks between the workers, checks them, and goes on with "stay" among its words.
EXCHANGE = """
import json, os, sys, time
import dask.array as da, numpy as np
from distributed import Client

def block(block_id=None):
    import cupy
    i, j = block_id
    return cupy.full((1000, 1000), 10.0 * i + j)

def transports(dask_worker):
    return list(dask_worker.peer_transports.values())

client = Client()
x = da.map_blocks(block, chunks=((1000,) * 4, (1000,) * 4), dtype=float, meta=np.empty((0, 0)))
y = (x + x.T).map_blocks(lambda b: b.get(), meta=np.empty((0, 0))).compute()
expected = np.kron([[11.0 * (i + j) for j in range(4)] for i in range(4)], np.ones((1000, 1000)))
workers = client.scheduler_info()["workers"]
print("exchanged", json.dumps({
    "right": bool((y == expected).all()),
    "transports": sorted({one for found in client.run(transports).values() for one in found}),
    "addresses": sorted({address.partition(":")[0] for address in workers}),
    "hosts": sorted(one["host"] for one in workers.values()),
    "devices": sorted(client.run(os.getenv, "CUDA_VISIBLE_DEVICES").values()),
}), flush=True)
while "stay" in sys.argv:
    client.submit(abs, time.time()).result()
    time.sleep(0.1)
"""


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


def run_python(
    *words: str, timeout: float = 150, check: bool = True, **kwargs: Any
) -> subprocess.CompletedProcess[str]:
    """Run Python with these words to its end, which is a good one unless `check` is False."""
    done = subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        timeout=timeout,
        stdin=subprocess.DEVNULL,
        check=False,
        **kwargs,
    )
    assert done.returncode == 0 or not check, done.stderr
    return done


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
