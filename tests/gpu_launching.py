"""What the tests on real GPUs share: programs under mpirun, clusters, and what the machine has."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import hpcdask
from hpcdask.comm import fabric
from hpcdask.gpu.devices import Gpu
from launching import Launcher
from running import Ended, Site, no_launcher

RUN = (sys.executable, "-m", "hpcdask.run")
#: With CI=true as well: torch belongs to none of the extras.
WITH_TORCH = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
#: Exchanges blocks between the workers, checks them, and goes on with "stay" among its words.
EXCHANGE = """
import json, os, sys, time
import dask.array as da, numpy as np
from distributed import Client
from hpcdask.bench.cluster import wait_until_warm

def block(block_id=None):
    import cupy
    i, j = block_id
    return cupy.full((1000, 1000), 10.0 * i + j)

def transports(dask_worker):
    return list(dask_worker.peer_transports.values())

client = Client()
wait_until_warm(client)
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
    ranks: int,
    *options: str,
    program: str = "",
    words: Sequence[str] = (),
    code: int | None = 0,
    timeout: float = 90,
    wrapper: str = "",
    env: dict[str, str] | None = None,
) -> Ended:
    """Run ``python -m hpcdask.run OPTIONS`` under the mpirun on PATH.

    What hangs is ended, and tells the stacks of its threads.

    Parameters
    ----------
    ranks
        How many; 0 without a launcher.
    program, words
        The text of a program, which comes after the options with these words.
    code
        The exit code that it must have; None: any but 0.
    wrapper
        What a shell does in each rank before.
    """
    if ranks and shutil.which("mpirun") is None:
        pytest.fail("no mpirun on PATH")
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    prefix = ["mpirun", "--oversubscribe"] if ranks else no_launcher().prefix
    launcher = Launcher("mpirun", prefix, {**os.environ, **allowed, "PYTHONFAULTHANDLER": "1"})
    runner = [*(["sh", "-c", f'{wrapper}; exec "$@"', "sh"] if wrapper else ()), *RUN]
    asked = {"n": ranks, "program": program, "words": words, "env": env}
    with Site(launcher) as site:
        done = site.start(*options, device="auto", runner=runner, **asked).end(timeout, code)
        site.check_nothing_left(30)
    assert code is not None or done.code
    return done


def run_python(*words: str, timeout: float = 150, **kwargs: Any) -> subprocess.CompletedProcess:
    """Run Python with these words to a good end."""
    done = subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        timeout=timeout,
        stdin=subprocess.DEVNULL,
        check=False,
        **kwargs,
    )
    assert done.returncode == 0, done.stderr
    return done


@contextlib.contextmanager
def job_cluster(folder: Path, workers: int, slurm: bool = False, **keywords: Any) -> Iterator[Any]:
    """Yield a cluster whose jobs have a GPU each, with so many workers there, and its client."""
    usual = {"cores": 1, "memory": "8GiB", "walltime": "01:00:00", "poll_interval": 1}
    usual["shared_temp_directory"] = str(folder / "clusters")
    cluster_class = hpcdask.SLURMCUDACluster if slurm else hpcdask.LocalCUDAJobCluster
    with cluster_class(**{**usual, **keywords}) as cluster, cluster.get_client() as client:
        cluster.scale(workers)
        client.wait_for_workers(workers, timeout=120)
        yield cluster, client


def sharing(workers: int, gpus: list[Gpu]) -> list[str]:
    """Options with which workers share what GPUs there are, each with a pool; else none."""
    if workers <= len(gpus):
        return []
    return ["--oversubscribe", "--rmm-pool-size", f"{0.8 / -(-workers // len(gpus)):g}"]


def workers_on(gpus: list[Gpu]) -> int:
    """How many to start: one per GPU, or two that share the only one, and map each other, too."""
    if len(gpus) > 1 and not nvlink_joins(gpus):
        pytest.skip("needs GPUs that NVLink joins")
    return max(2, len(gpus))


def nvlink_joins(gpus: list[Gpu]) -> bool:
    mine = {frozenset(pair) for pair in itertools.combinations([gpu.uuid for gpu in gpus], 2)}
    return bool(mine) and mine <= {frozenset(pair) for pair in fabric.look().nvlink}


def slurm_answers() -> bool:
    """Return whether the controller of a SLURM does."""
    ping = ["scontrol", "ping"]
    return bool(shutil.which("srun")) and not subprocess.run(ping, capture_output=True).returncode


def used_memory() -> list[int]:
    """Return the MiB in use on each GPU."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return [int(line) for line in subprocess.check_output(query, text=True).splitlines()]


def device_memory_is_back(before: list[int]) -> bool:
    """Return whether as much is in use again as before, but for what the driver keeps."""
    return all(now < then + 64 for now, then in zip(used_memory(), before, strict=True))
