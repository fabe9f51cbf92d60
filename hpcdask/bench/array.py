"""Measure computations on a square array of random numbers, and check them.

What is timed is what a user waits for: from the call that computes a graph, already built, to the
result in the client, optimisation, scheduling and transfer included. Each repeat has a graph of
its own with other random numbers, so that nothing is remembered from the one before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import dask.array as da

from hpcdask.bench.cluster import Cluster
from hpcdask.bench.limits import Work
from hpcdask.bench.records import Case, announce, decimal_bytes, record
from hpcdask.bench.timing import measure
from hpcdask.workloads import Device, Form, WorkloadError, patterns, to_host
from hpcdask.workloads import array as array_workload

__all__ = ["OPERATIONS", "PUBLISHED_NBYTES", "published", "run_array"]

SUM = "sum"
#: The tuned forms of the others make a chunk, reduce it and drop it.
KEPT = ("matmul", "stencil")
OPERATIONS = (SUM, *patterns.NAMES)

#: https://blog.dask.org/2019/01/03/dask-array-gpus-first-steps
PUBLISHED_NBYTES = 2 * 10**12
PUBLISHED_S: dict[Device, dict[str, float]] = {
    "cpu": {"one CPU core": 9540.0},
    "cuda": {"one GPU": 97.0, "8 GPUs": 19.0},
}
# Of the memory of all devices, for operations that keep the array; of each, where all get all of
# it. The stock form of these has a copy that is transposed.
USABLE_FRACTION = 0.5
ON_EACH = ("matmul",)


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
    operation: str = SUM,
    form: Form = "tuned",
    repeats: int = 3,
    chunk_nbytes: int | None = None,
    timeline: bool = False,
) -> dict[str, Any]:
    """Measure the array workload: the reference ``"sum"``, or one of `patterns.NAMES`.

    ``nbytes`` of float64 are streamed, so they need not fit in memory; ``chunk_nbytes`` bounds a
    chunk of the tuned form.
    """
    if operation != SUM:
        return _run_pattern(cluster, nbytes, operation, form, repeats, chunk_nbytes, timeline)
    device, n = cluster.device, array_workload.side(nbytes)
    if form == "tuned":
        rows = array_workload.chunk_rows(
            n, device=device, n_slots=cluster.n_slots, max_nbytes=chunk_nbytes
        )
        case = Case("array", form, (n, n), "float64", len(rows), (max(rows), n))

        def build(index: int) -> Sequence[Any]:
            return [array_workload.tuned(rows, n, device=device, seed=index)]

        def build_warmup(index: int) -> Sequence[Any]:
            few = rows[: 2 * cluster.n_slots]
            return [array_workload.tuned(few, n, device=device, seed=repeats + index)]
    else:
        edge = min(n, array_workload.STOCK_CHUNK)
        case = Case("array", form, (n, n), "float64", math.ceil(n / edge) ** 2, (edge, edge))
        few_side = min(n, edge * (1 + int((2 * cluster.n_slots) ** 0.5)))

        def build(index: int) -> Sequence[Any]:
            return [array_workload.stock(n, device=device)]

        def build_warmup(index: int) -> Sequence[Any]:
            return [array_workload.stock(few_side, device=device)]

    build_warmup(0)  # input errors come before the first line of output
    announce(case, cluster)
    measure(cluster.client, build_warmup, 0, n_warmup=1)
    timed = measure(cluster.client, build, repeats, timeline=timeline)
    (result,) = timed.results
    if form == "tuned":
        total, count = float(result[0]), int(result[1])
    else:
        total, count = float(result), (n // 2) ** 2
    return record(
        case,
        cluster,
        timed,
        {"operation": SUM, "sum": total, "count": count},
        array_workload.check(total, count, case.shape),
        # each number is written, and a quarter of them is read
        work=Work(random=float(n**2), memory=(1 + 1 / 4) * case.nbytes),
        published=published(device),
    )


def _run_pattern(
    cluster: Cluster,
    nbytes: int,
    operation: str,
    form: Form,
    repeats: int,
    chunk_nbytes: int | None,
    timeline: bool,
) -> dict[str, Any]:
    device, n = cluster.device, math.isqrt(nbytes // array_workload.ITEM_NBYTES)
    n_workers = sum(cluster.devices.values())
    on_each = operation in ON_EACH
    parts = n_workers * (2 if form == "stock" else 1) if on_each else 1
    usable = int(USABLE_FRACTION * cluster.memory_nbytes) // parts
    if operation in KEPT and nbytes > usable:
        where = "every worker" if on_each else "the workers"
        raise WorkloadError(
            f"{operation} keeps its array of {decimal_bytes(nbytes)} on {where}; {cluster} "
            f"have room for {decimal_bytes(usable)}: --size {usable // 10**6}MB is the most. "
            f"{', '.join(name for name in OPERATIONS if name not in KEPT)} take any size"
        )

    def build(index: int) -> Sequence[Any]:
        return [
            patterns.build(
                operation, n, device, form, cluster.n_slots, index, max_nbytes=chunk_nbytes
            )
        ]

    build(0)  # input errors come before the first line of output
    if form == "stock":
        sizes = da.core.normalize_chunks(patterns.STOCK_CHUNKS[device], (n, n), dtype="float64")
    elif operation == "transpose":
        sizes = (patterns.grid(n, device, cluster.n_slots, chunk_nbytes),) * 2
    else:
        sizes = (patterns.slabs(n, device, cluster.n_slots, chunk_nbytes), (n,))
    n_chunks = len(sizes[0]) * len(sizes[1])
    case = Case(
        "array", form, (n, n), "float64", n_chunks, (max(sizes[0]), max(sizes[1])), operation
    )
    announce(case, cluster)
    timed = measure(cluster.client, build, repeats, n_warmup=1, timeline=timeline)
    (result,) = timed.results
    result = to_host(result)
    return record(
        case,
        cluster,
        timed,
        {"operation": operation},
        patterns.check(operation, result, n),
        work=Work(**patterns.work(operation, n, n_workers)),
    )
