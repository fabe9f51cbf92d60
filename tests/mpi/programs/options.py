"""Shows what of the worker's options arrived at the workers."""

import os
import sys

from common import addresses, show
from distributed import Client


def in_worker(dask_worker) -> dict:
    return {
        "lifetime": dask_worker.lifetime,
        "threads": dask_worker.state.nthreads,
        "memory": dask_worker.memory_manager.memory_limit,
        "preloaded": getattr(sys, "preloaded_for_test", None),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
    }


def in_nanny(dask_worker) -> str | None:
    return getattr(sys, "preloaded_for_test", None)


client = Client()
info = client.sync(client.scheduler.identity, n_workers=-1)["workers"]
show(
    "found",
    {
        "names": sorted(worker["name"] for worker in info.values()),
        "resources": [worker["resources"] for worker in info.values()],
        "workers": list(client.run(in_worker).values()),
        "nannies": list(client.run(in_nanny, nanny=True).values()),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
        "sockets": addresses(client),
    },
)
