"""Measure the exchange when a file is there, and print which pairs are slow."""

import json
import time
from pathlib import Path

from dask.distributed import Client

from hpcdask.bench.cluster import inspect
from hpcdask.bench.exchange import run_exchange


def main() -> None:
    with Client() as client:
        cluster = inspect(client)

        def measure() -> dict:
            return run_exchange(cluster, 4_000_000, 32_000_000, alone=True)

        names = measure()["result"]["names"]  # all workers are connected from here on
        workers = client.scheduler_info(n_workers=-1)["workers"]
        pids = dict(client.run(_who).values())
        ports = {one["name"]: int(address.rpartition(":")[2]) for address, one in workers.items()}
        print("workers", json.dumps([[n, ports[n], pids[n]] for n in names]), flush=True)
        deadline = time.monotonic() + 300
        while not Path("slowed").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        print("slow", json.dumps(measure()["result"]["slow"]), flush=True)


def _who(dask_worker) -> tuple[str, int]:
    import os

    return dask_worker.name, os.getpid()


if __name__ == "__main__":
    main()
