"""An all-reduce over NCCL between the workers of a cluster, as a gang."""

from __future__ import annotations

import statistics
from typing import Any

from hpcdask.bench.cluster import Cluster, workers_of
from hpcdask.client.gang import RankContext, gang
from hpcdask.errors import GangError
from hpcdask.gpu import nccl
from hpcdask.logs import some
from hpcdask.workloads import Check

#: Seconds for all of it. NCCL can hang, and the gang then restarts the workers.
DEADLINE_S = 120.0
#: All-reduces in each repeat.
CALLS = 10


def measure(cluster: Cluster, nbytes: int, repeats: int) -> tuple[dict[str, Any], list[Check]]:
    """Bus bandwidth of arrays of so many bytes, or under ``missing`` why there is none.

    Without GPUs the result is empty.
    """
    if cluster.device != "cuda":
        return {}, []
    client = cluster.client
    why = client.run(nccl.missing)
    if without := [address for address, text in why.items() if text]:
        names = some(workers_of(client)[address]["name"] for address in without)
        told = f"worker {names}: {why[without[0]]}"
        return {"missing": f"NCCL is not installed ({told}). pip install nvidia-nccl-cu13"}, []
    try:
        # as a gang, so that NCCL takes the cluster's network
        (key,) = gang(_host, client=client, size=1, timeout=DEADLINE_S)
        shared = {"unique_id": key, "nbytes": nbytes, "repeats": repeats}
        told = gang(_all_reduce, client=client, timeout=DEADLINE_S, shared=shared)
    except GangError as error:
        return {"missing": f"it failed: {error}"}, []
    slowest = [max(seconds) for seconds in zip(*(one[0] for one in told), strict=True)]
    rate = nccl.bus_bandwidth(nbytes, statistics.median(slowest), len(told))
    wrong = sum(not right for _, right, _ in told)
    result = {"bytes": nbytes, "seconds": slowest, "GB/s": rate / 1e9, "nccl": told[0][2]}
    return result, [Check("workers whose all-reduce was wrong", wrong, 0, 0)]


def _host(context: RankContext) -> bytes:
    return nccl.unique_id()


def _all_reduce(
    context: RankContext, unique_id: bytes, nbytes: int, repeats: int
) -> tuple[list[float], bool, str]:
    """Seconds of one all-reduce in each repeat, whether all were right, and NCCL's version."""
    communicator = nccl.join(context.rank, context.world_size, unique_id)
    try:
        runs = [nccl.all_reduce(communicator, nbytes, CALLS) for _ in range(repeats)]
    finally:
        communicator.destroy()
    return [seconds for seconds, _ in runs], all(right for _, right in runs), nccl.version()
