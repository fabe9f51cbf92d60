"""Run programs once in this process, at the sizes for CPUs, so that none is the first of all.

What the disk keeps is there afterwards for hpcdask and for its peers: CuPy's kernels, and packages
in the page cache.
"""

from __future__ import annotations

import contextlib
import importlib
import runpy
import shlex
import sys
from pathlib import Path

import dask
from distributed import LocalCluster, default_client

FOLDER = Path(__file__).parent / "programs"


def main() -> None:
    """Run the programs of the command line; one that fails is told of later."""
    device, *programs = sys.argv[1:]
    for name in ("hpcdask.runner", "dask_cuda", "rmm", "ucxx"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    sys.path[0] = str(FOLDER)
    cluster = LocalCluster(
        n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0"
    )
    with cluster, dask.config.set({"scheduler-address": cluster.scheduler_address}):
        for program in programs:
            file, *own = shlex.split(program)
            sys.argv = [str(FOLDER / file), *own, "--device", device]
            sys.argv += ["--sizes", "cpu", "--runs", "1"]
            with contextlib.suppress(Exception, SystemExit):
                runpy.run_path(sys.argv[0], run_name="__main__")
            with contextlib.suppress(ValueError):
                default_client().close()


if __name__ == "__main__":
    main()
