"""Run a program on a peer: its plain `Client()` connects to the cluster that is made here.

python benchmarks/on_peer.py local-cuda 2 benchmarks/programs/transpose_sum.py --runs 4
"""

from __future__ import annotations

import contextlib
import runpy
import sys
from pathlib import Path

import dask
from distributed import default_client
from measure import make_cluster


def main() -> None:
    """Make the cluster, run the program in it, close the cluster."""
    kind, workers, program = sys.argv[1:4]
    cluster = make_cluster(kind, int(workers))
    sys.argv = sys.argv[3:]
    sys.path[0] = str(Path(program).parent)
    if cluster is None:  # dask-mpi, which has said already where it is
        cluster, address = contextlib.nullcontext(), {}
    else:
        address = {"scheduler-address": cluster.scheduler_address}
    with cluster, dask.config.set(address):
        try:
            runpy.run_path(program, run_name="__main__")
        finally:
            with contextlib.suppress(ValueError):  # it has none
                default_client().close()


if __name__ == "__main__":
    main()
