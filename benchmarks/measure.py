"""One measurement on one kind of cluster; prints one JSON line. `peers.py` starts it."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any


def noop(_: int) -> None:
    """An empty Dask task."""


def has_context() -> bool:
    """Whether the worker holds a CUDA context."""
    from distributed.diagnostics.nvml import has_cuda_context

    return bool(has_cuda_context().has_context)


def make_client(kind: str, workers: int) -> Any:
    """A client of the cluster that this program has around it, or makes."""
    if kind == "runner":
        from distributed import Client

        return Client()
    if kind == "dask-mpi":
        from dask_mpi import initialize
        from distributed import Client

        initialize(nthreads=1)
        return Client()
    if kind == "local-cuda":
        from dask_cuda import LocalCUDACluster
        from distributed import Client

        return Client(LocalCUDACluster())
    from distributed import Client, LocalCluster

    return Client(LocalCluster(n_workers=workers, threads_per_worker=1))


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cluster", choices=["runner", "dask-mpi", "local-cuda", "local"])
    parser.add_argument("--case", choices=["startup", "tasks", "array", "svd"])
    parser.add_argument("--workers", type=int)
    parser.add_argument("--size", default="2TB")
    parser.add_argument("--form", default="tuned")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    client = make_client(options.cluster, options.workers)
    client.wait_for_workers(options.workers, timeout=120)
    result: dict[str, Any] = {"ready_s": time.time() - float(os.environ["LAUNCHED"])}
    if options.case == "startup" and options.cluster in ("runner", "local-cuda"):
        if os.environ.get("NEEDS_CONTEXT"):
            result["contexts"] = all(client.run(has_context).values())
    elif options.case == "tasks":
        from distributed import wait

        count, result["seconds"] = 10_000, []
        wait(client.map(noop, range(1000), pure=False))
        for _ in range(options.repeats):
            start = time.perf_counter()
            wait(client.map(noop, range(count), pure=False))
            result["seconds"].append(time.perf_counter() - start)
    elif options.case in ("array", "svd"):
        from dask.utils import parse_bytes

        from hpcdask import bench

        cluster = bench.inspect(client, "auto")
        nbytes = parse_bytes(options.size)
        if options.case == "array":
            record = bench.run_array(cluster, nbytes, form=options.form, repeats=options.repeats)
        else:
            record = bench.run_svd(cluster, nbytes, 10, form=options.form, repeats=options.repeats)
        result |= {
            "seconds": record["seconds"],
            "record": record,
            "correct": all(check["ok"] for check in record["checks"]),
        }
    print(json.dumps(result), flush=True)
    client.close()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
