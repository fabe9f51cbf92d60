"""Run a program on a peer: its plain `Client()` connects to the cluster that is made here.

python benchmarks/on_peer.py local-cuda 2 benchmarks/programs/transpose_sum.py --runs 4
python benchmarks/on_peer.py local 2 -m hpcdask.bench array --form stock

`PEER_KEYWORDS` in the environment are keywords of LocalCUDACluster, as JSON.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any

import dask
from distributed import LocalCluster, default_client

PROGRAMS = Path(__file__).parent / "programs"


def make_cluster(kind: str, workers: int) -> Any:
    """Make a peer's cluster on this machine. dask-mpi has no object: `Client()` finds it."""
    if kind == "dask-mpi":
        from dask_mpi import initialize

        initialize(nthreads=1)
        return None
    if kind == "local-cuda":
        from dask_cuda import LocalCUDACluster

        keywords = json.loads(os.environ.get("PEER_KEYWORDS", "{}"))
        return LocalCUDACluster(n_workers=workers, **keywords)
    threads = {"processes": False, "dashboard_address": ":0"} if kind == "threads" else {}
    return LocalCluster(n_workers=workers, threads_per_worker=1, **threads)


def run(program: str, *arguments: str) -> None:
    """Run a file, or the module after ``-m``, as the program of this process."""
    try:
        if program == "-m":
            sys.argv = [*arguments]
            runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = [program, *arguments], str(Path(program).parent)
            runpy.run_path(program, run_name="__main__")
    finally:
        with contextlib.suppress(ValueError):  # it has none
            default_client().close()


def warm_up(programs: list[str]) -> None:
    """Run programs once at the sizes for CPUs, so that none is the first of all.

    What the disk keeps is there afterwards for hpcdask and for its peers: CuPy's kernels, and
    packages in the page cache. A program that fails is told of later.
    """
    for name in ("hpcdask.runner", "dask_cuda", "rmm", "ucxx"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for program in programs:
        file, *own = shlex.split(program)
        with contextlib.suppress(Exception, SystemExit):
            run(str(PROGRAMS / file), *own, "--device", "cuda", "--sizes", "cpu", "--runs", "1")


def main() -> None:
    """Make the cluster, run the program in it, close the cluster."""
    kind, workers, *program = sys.argv[1:]
    cluster = make_cluster(kind, int(workers))
    address = {"scheduler-address": cluster.scheduler_address} if cluster else {}
    with cluster or contextlib.nullcontext(), dask.config.set(address):
        if kind == "threads":
            warm_up(program)
        else:
            run(*program)


if __name__ == "__main__":
    main()
