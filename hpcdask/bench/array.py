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
from hpcdask.workloads.array_blocks import ITEM_NBYTES

SUM = "sum"
#: The tuned forms of the others make a chunk, reduce it and drop it.
KEPT = ("matmul", "stencil")
OPERATIONS = (SUM, *array_workload.NAMES)

# Of the memory of all devices, for operations that keep the array; of each, where all get all of
# it. The stock form of these has a copy that is transposed.
USABLE_FRACTION = 0.5
ON_EACH = ("matmul",)


def run_array(
    cluster: Cluster,
    nbytes: int,
    *,
    operation: str = SUM,
    form: Form = "tuned",
    repeats: int = 3,
    chunk_nbytes: int | None = None,
) -> dict[str, Any]:
    """Measure the sum, or one of `array.NAMES`, of ``nbytes`` of float64, which are streamed.

    ``chunk_nbytes`` bounds a chunk of the tuned form.
    """
    n_slots = cluster.n_slots
    if operation == SUM:
        workload = _sum(cluster.device, nbytes, form, n_slots, repeats, chunk_nbytes)
    else:
        _check_room(cluster, nbytes, operation, form)
        workload = _pattern(cluster, nbytes, form, operation, chunk_nbytes)
    return run(workload, cluster, repeats)


def _sum(
    device: Device, nbytes: int, form: Form, n_slots: int, repeats: int, chunk_nbytes: int | None
) -> Workload:
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
        found = {"operation": SUM, "sum": float(total), "count": int(count)}
        return found, array_workload.check_sum(float(total), int(count), case.shape)

    # each number is written, and a quarter of them is read
    work = Work(random=float(n**2), memory=(1 + 1 / 4) * case.nbytes)
    return Workload(case, build, finish, warm_up=warm_up, work=work)


def _pattern(
    cluster: Cluster, nbytes: int, form: Form, operation: str, chunk_nbytes: int | None
) -> Workload:
    device, n_slots, n_workers = cluster.device, cluster.n_slots, sum(cluster.devices.values())
    n = math.isqrt(nbytes // ITEM_NBYTES)

    def build(_: Any, index: int) -> list[Any]:
        how = {"max_nbytes": chunk_nbytes}
        return [array_workload.build(operation, n, device, form, n_slots, index, **how)]

    work = Work(**array_workload.work(operation, n, n_workers))
    if form == "stock":
        sizes = da.core.normalize_chunks(
            array_workload.STOCK_CHUNKS[device], (n, n), dtype="float64"
        )
    elif operation == "transpose":
        sizes = (array_workload.grid(n, device, n_slots, chunk_nbytes),) * 2
    else:
        sizes = (array_workload.slabs(n, device, n_slots, chunk_nbytes), (n,))
    n_chunks, largest = len(sizes[0]) * len(sizes[1]), (max(sizes[0]), max(sizes[1]))

    def finish(_: Any, timed: Timed) -> tuple[dict[str, Any], list[Check]]:
        (result,) = timed.results
        return {"operation": operation}, array_workload.check(operation, to_host(result), n)

    case = Case("array", form, (n, n), "float64", n_chunks, largest, operation)
    return Workload(case, build, finish, work=work)


def _check_room(cluster: Cluster, nbytes: int, operation: str, form: Form) -> None:
    on_each = operation in ON_EACH
    copies = sum(cluster.devices.values()) * (2 if form == "stock" else 1) if on_each else 1
    usable = int(USABLE_FRACTION * cluster.memory_nbytes) // copies
    if operation in KEPT and nbytes > usable:
        where = "every worker" if on_each else "the workers"
        raise WorkloadError(
            f"{operation} keeps its array of {decimal_bytes(nbytes)} on {where}; {cluster} "
            f"have room for {decimal_bytes(usable)}: --size {usable // 10**6}MB is the most. "
            f"{', '.join(name for name in OPERATIONS if name not in KEPT)} take any size"
        )
