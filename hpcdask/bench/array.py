"""Measure computations on a square array of random numbers, and check them."""

from __future__ import annotations

import math
from typing import Any

import dask.array as da

from hpcdask.bench.cluster import Cluster
from hpcdask.bench.limits import Work
from hpcdask.bench.records import Case, decimal_bytes
from hpcdask.bench.workload import Timed, Workload, run
from hpcdask.workloads import Check, Device, Form, WorkloadError, to_host
from hpcdask.workloads import array as array_workload
from hpcdask.workloads.array import ITEM_NBYTES

#: Of the patterns, those that do not keep the array, and those of which each worker may get all.
STREAMED = ("mean", "std")
ON_EACH = ("matmul",)
#: https://blog.dask.org/2019/01/03/dask-array-gpus-first-steps
PUBLISHED_NBYTES = 2 * 10**12
PUBLISHED_S: dict[Device, dict[str, float]] = {
    "cpu": {"one CPU core": 9540.0},
    "cuda": {"one GPU": 97.0, "8 GPUs": 19.0},
}
#: Of the memory of all devices.
USABLE_FRACTION = 0.5


def published(device: Device, hardware: str | None = None) -> list[dict[str, Any]]:
    """Return the times of the blog, or that of one kind of hardware if it has one."""
    kind = " (V100)" if device == "cuda" else ""
    return [
        {"what": f"{name}{kind}, Dask blog 2019", "seconds": seconds, "bytes": PUBLISHED_NBYTES}
        for name, seconds in PUBLISHED_S[device].items()
        if hardware in (None, name)
    ]


def run_array(
    cluster: Cluster,
    nbytes: int,
    *,
    form: Form = "tuned",
    repeats: int = 3,
    chunk_nbytes: int | None = None,
    timeline: bool = False,
) -> dict[str, Any]:
    """Measure the sum of ``nbytes`` of float64, which are streamed.

    ``chunk_nbytes`` bounds a chunk of the tuned form.
    """
    device, n_slots = cluster.device, cluster.n_slots
    n = array_workload.side(nbytes)
    if form == "tuned":
        rows = array_workload.chunk_rows(n, device=device, n_slots=n_slots, max_nbytes=chunk_nbytes)
        case = Case("array", form, (n, n), "float64", len(rows), (max(rows), n))
    else:
        edge = min(n, array_workload.STOCK_SUM_CHUNK)
        case = Case("array", form, (n, n), "float64", math.ceil(n / edge) ** 2, (edge, edge))
        few_side = min(n, edge * (1 + int((2 * n_slots) ** 0.5)))

    def build(_: Any, index: int) -> list[Any]:
        if form == "stock":
            return [array_workload.stock_sum(n, device=device)]
        return [array_workload.tuned_sum(rows, n, device=device, seed=index)]

    def warm_up(index: int) -> list[Any]:
        if form == "stock":
            return [array_workload.stock_sum(few_side, device=device)]
        few = rows[: 2 * n_slots]
        return [array_workload.tuned_sum(few, n, device=device, seed=repeats + index)]

    def finish(_: Any, timed: Timed) -> tuple[dict[str, Any], list[Check]]:
        (result,) = timed.results
        total, count = result if form == "tuned" else (result, (n // 2) ** 2)
        found = {"operation": "sum", "sum": float(total), "count": int(count)}
        return found, array_workload.check_sum(float(total), int(count), case.shape)

    # each number is written, and a quarter of them is read
    work = Work(random=float(n**2), memory=(1 + 1 / 4) * case.nbytes)
    how: dict[str, Any] = {"warm_up": warm_up, "work": work, "published": published(device)}
    return run(Workload(case, build, finish, **how), cluster, repeats, timeline)


def run_pattern(
    cluster: Cluster, nbytes: int, *, operation: str, repeats: int = 3, timeline: bool = False
) -> dict[str, Any]:
    """Measure one of `array.NAMES`, in plain dask.array, on ``nbytes`` of float64."""
    device, n_workers = cluster.device, sum(cluster.devices.values())
    _check_room(cluster, nbytes, operation)
    n = math.isqrt(nbytes // ITEM_NBYTES)

    def build(_: Any, index: int) -> list[Any]:
        return [array_workload.build(operation, n, device, index)]

    def finish(_: Any, timed: Timed) -> tuple[dict[str, Any], list[Check]]:
        (result,) = timed.results
        return {"operation": operation}, array_workload.check(operation, to_host(result), n)

    work = Work(**array_workload.work(operation, n, n_workers))
    sizes = da.core.normalize_chunks(array_workload.STOCK_CHUNKS[device], (n, n), dtype="float64")
    n_chunks, largest = len(sizes[0]) * len(sizes[1]), (max(sizes[0]), max(sizes[1]))
    case = Case("array", "stock", (n, n), "float64", n_chunks, largest, operation)
    return run(Workload(case, build, finish, work=work), cluster, repeats, timeline)


def _check_room(cluster: Cluster, nbytes: int, operation: str) -> None:
    on_each = operation in ON_EACH
    # Each worker then has a transposed copy, too
    copies = 2 * sum(cluster.devices.values()) if on_each else 1
    usable = int(USABLE_FRACTION * cluster.memory_nbytes) // copies
    if operation not in STREAMED and nbytes > usable:
        where = "every worker" if on_each else "the workers"
        raise WorkloadError(
            f"{operation} keeps its array of {decimal_bytes(nbytes)} on {where}; {cluster} "
            f"have room for {decimal_bytes(usable)}: --size {usable // 10**6}MB is the most. "
            f"sum, {', '.join(STREAMED)} take any size"
        )
