"""Measure the bundled workloads on a cluster, and check what they computed.

What is timed is what a user waits for: from the call that computes a graph, already built, to the
result in the client, optimisation, scheduling and transfer included. Each repeat has a graph of
its own with other random numbers, so that nothing is remembered from the one before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import dask.array as da
import distributed
import numpy as np

from hpcdask.bench.cluster import Cluster
from hpcdask.bench.records import Case, announce, decimal_bytes, record
from hpcdask.bench.timing import measure, progress
from hpcdask.errors import UsageError
from hpcdask.workloads import Check, Form, planted, to_host
from hpcdask.workloads import array as array_workload
from hpcdask.workloads import svd as svd_workload

__all__ = ["run_array", "run_svd"]

# Room for scratch arrays and the results beside a persisted input.
USABLE_FRACTION = 0.8


def run_array(
    cluster: Cluster,
    nbytes: int,
    *,
    form: Form = "tuned",
    repeats: int = 3,
    chunk_nbytes: int | None = None,
) -> dict[str, Any]:
    """Measure the array workload.

    Parameters
    ----------
    cluster
        From :func:`hpcdask.bench.cluster.inspect`.
    nbytes
        Size of the float64 array in bytes; it is streamed, so it need not fit in memory.
    form
        ``"tuned"`` or ``"stock"``.
    repeats
        Timed runs, after one on a few chunks.
    chunk_nbytes
        Bound of a chunk of the tuned form in bytes.

    Returns
    -------
    dict
        The record that the command prints as JSON.

    Raises
    ------
    WorkloadError
        A size that is too small, or a client without GPU for the stock form on CuPy.
    """
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
    measure(cluster.client, build_warmup, 1)
    seconds, (result,), n_tasks = measure(cluster.client, build, repeats)
    if form == "tuned":
        total, count = float(result[0]), int(result[1])
    else:
        total, count = float(result), (n // 2) ** 2
    checks = array_workload.check(total, count, case.shape)
    return record(case, cluster, seconds, n_tasks, {"sum": total, "count": count}, checks)


def run_svd(
    cluster: Cluster,
    nbytes: int,
    k: int = 10,
    *,
    form: Form = "tuned",
    repeats: int = 3,
    chunk_nbytes: int | None = None,
) -> dict[str, Any]:
    """Measure singular values and right vectors of a planted uint8 matrix held by the workers.

    Parameters
    ----------
    cluster
        From :func:`hpcdask.bench.cluster.inspect`.
    nbytes
        Size of the matrix in bytes; it has to fit the memory of the devices.
    k
        Number of singular triplets, which is also the rank of the matrix.
    form, repeats, chunk_nbytes
        As for :func:`run_array`; the run before the timed ones is a whole one.

    Returns
    -------
    dict
        The record that the command prints as JSON.

    Raises
    ------
    UsageError
        The matrix does not fit.
    WorkloadError
        A size that is too small, ``k`` out of range, or a client without GPU for the stock form
        on CuPy.
    """
    device, shape = cluster.device, svd_workload.shape_for(nbytes)
    usable = int(USABLE_FRACTION * cluster.memory_nbytes)
    if math.prod(shape) > usable:
        raise UsageError(
            f"an input of {decimal_bytes(math.prod(shape))} does not fit {cluster}: "
            f"--size {usable // 10**6}MB is the most"
        )
    if form == "tuned":
        rows = svd_workload.chunk_rows(
            shape, device=device, n_slots=cluster.n_slots, max_nbytes=chunk_nbytes
        )
        chunks: tuple[tuple[int, ...], tuple[int, ...]] = (rows, (shape[1],))
    else:
        chunks = da.core.normalize_chunks(svd_workload.STOCK_CHUNKS, shape)
    largest = max(chunks[0]), max(chunks[1])
    case = Case("svd", form, shape, "uint8", len(chunks[0]) * len(chunks[1]), largest)
    x, expected = planted.matrix(
        shape, k, chunks=chunks, device=device, cupy_meta=form == "stock" and device == "cuda"
    )

    def decompose(index: int) -> tuple[Any, Any, Any]:
        if form == "tuned":
            return svd_workload.svd_rows(x, k, seed=index, device=device)
        return svd_workload.stock(x, k, device=device)

    decompose(0)
    announce(case, cluster)
    x = x.persist()
    with progress(cluster.client, "input", case.n_chunks):
        distributed.wait(x)
    seconds, results, n_tasks = measure(
        cluster.client, lambda index: decompose(index)[1:], repeats, n_warmup=1
    )
    s, v = (to_host(result) for result in results)
    checks = _check_svd(cluster.client, x, decompose(repeats + 1), (s, v), expected)
    result = {"k": k, "singular_values": s.tolist()}
    return record(case, cluster, seconds, n_tasks, result, checks)


def _check_svd(
    client: distributed.Client,
    x: Any,
    triplets: tuple[Any, Any, Any],
    timed: tuple[Any, Any],
    expected: Any,
) -> list[Check]:
    # u is not part of what is timed, so it comes from a decomposition of its own, with its s and
    # v. 64 rows from the start, the middle and the end leave the workers, not the whole of u.
    u, s, v = triplets
    starts = sorted({0, x.shape[0] // 2, max(0, x.shape[0] - 64)})
    parts = [part for a in starts for part in (x[a : a + 64], u[a : a + 64])]
    fetched = client.gather(client.compute([s, v, u.T @ u, *parts]))
    s, v, gram, *blocks = (to_host(a) for a in fetched)
    rows, u_rows = np.concatenate(blocks[0::2]), np.concatenate(blocks[1::2])
    checks = planted.check(s, v, gram, rows, u_rows, expected)
    timed_checks = planted.check(*timed, gram, rows, u_rows, expected)
    return [timed_checks[0], checks[1], timed_checks[2], checks[3]]
