"""Measure singular value decompositions, and check them."""

from __future__ import annotations

import math
from typing import Any, cast

import dask.array as da
import distributed
import numpy as np

from hpcdask.bench.cluster import Cluster
from hpcdask.bench.limits import Work
from hpcdask.bench.records import Case, decimal_bytes
from hpcdask.bench.workload import Timed, Workload, compute, run
from hpcdask.errors import UsageError
from hpcdask.workloads import Check, Device, Form, client_cupy, packing, planted, to_host
from hpcdask.workloads import svd as svd_workload

# Room for scratch arrays and the results beside a persisted input. Workers without a GPU hold
# Python too, and Dask pauses them at 0.8 of their memory.
USABLE_FRACTION: dict[Device, float] = {"cuda": 0.8, "cpu": 0.3}
#: https://blog.dask.org/2020/05/13/large-svds
PUBLISHED = [{"what": "sixteen V100, Dask blog 2020", "seconds": 15.0, "bytes": 200 * 10**9}]
# Of the blog's matrix of 10_000_000 x 20 float64.
EXACT_COLUMNS = 20
EXACT_CHUNKS = (625_000, -1)
# Relative to the largest singular value, for float64.
EXACT_TOLERANCE = 1e-10


def check_form(form: Form, *, packed: bool, stream: bool) -> None:
    """Raise UsageError for options of `run_svd` that the stock form does not have."""
    if packed and form == "stock":
        raise UsageError("--packed is for the tuned form: dask.array has no arithmetic for it")
    if stream and form == "stock":
        raise UsageError("--stream is for the tuned form: the stock one holds the matrix")


def run_svd(
    cluster: Cluster,
    nbytes: int,
    k: int = 10,
    *,
    form: Form = "tuned",
    packed: bool = False,
    stream: bool = False,
    repeats: int = 3,
    chunk_nbytes: int | None = None,
    timeline: bool = False,
) -> dict[str, Any]:
    """Measure singular values and right vectors of a planted uint8 matrix of rank ``k``.

    ``packed``: values 0 to 3, four in a byte; ``stream``: made whenever it is read.
    """
    check_form(form, packed=packed, stream=stream)
    device, shape = cluster.device, svd_workload.shape_for(nbytes)
    if not stream:
        _check_room(math.prod(shape), 4 if packed else 1, cluster, "--stream")
    chunks = _chunks(shape, form, cluster, chunk_nbytes)
    largest = max(chunks[0]), max(chunks[1])
    traits = {"2 bits": packed, "streamed": stream}
    variant = " ".join(name for name, it_is in traits.items() if it_is)
    case = Case("svd", form, shape, "uint8", len(chunks[0]) * len(chunks[1]), largest, variant)
    x, expected = planted.matrix(
        shape,
        k,
        chunks=chunks,
        device=device,
        cupy_meta=form == "stock" and device == "cuda",
        packed=packed,
    )

    def decompose(x: Any, index: int) -> tuple[Any, Any, Any]:
        if form == "tuned":
            how: dict[str, Any] = {"packed_columns": shape[1] if packed else None, "seed": index}
            return svd_workload.svd_rows(x, k, dtype="float32", device=device, **how)
        return svd_workload.stock(x, k, device=device)

    def finish(x: Any, timed: Timed) -> tuple[dict[str, Any], list[Check]]:
        s, v = (to_host(result) for result in timed.results)
        triplets = decompose(x, repeats + 1)
        checks = _check_svd(cluster.client, x, shape[1], triplets, (s, v), expected)
        return {"k": k, "singular_values": s.tolist()}, checks

    workload = Workload(
        case,
        lambda x, index: decompose(x, index)[1:],
        finish,
        input=x,
        held=not stream,
        # A is read once, and multiplied by k columns from the right and from the left
        work=Work(memory=float(x.nbytes), matrix_float32=4.0 * math.prod(shape) * k),
        published=PUBLISHED,
    )
    return run(workload, cluster, repeats, timeline)


def _chunks(
    shape: tuple[int, int], form: Form, cluster: Cluster, max_nbytes: int | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if form == "stock":
        stock = da.core.normalize_chunks(svd_workload.STOCK_CHUNKS, shape)
        return cast("tuple[tuple[int, ...], tuple[int, ...]]", stock)
    how: dict[str, Any] = {"n_slots": cluster.n_slots, "max_nbytes": max_nbytes}
    return svd_workload.chunk_rows(shape, device=cluster.device, **how), (shape[1],)


def _check_room(nbytes: int, per_byte: int, cluster: Cluster, instead: str = "") -> None:
    usable = int(USABLE_FRACTION[cluster.device] * cluster.memory_nbytes) * per_byte
    if nbytes > usable:
        options = [f"--size {usable // 10**6}MB is the most"]
        if instead:
            packed = f"--packed, up to {4 * usable // 10**6}MB"
            streamed = f"{instead}, any size: the matrix is made whenever it is read"
            options += [streamed] if per_byte > 1 else [packed, streamed]
        raise UsageError(
            f"an input of {decimal_bytes(nbytes)} does not fit {cluster}: {'; or '.join(options)}"
        )


def _check_svd(
    client: distributed.Client,
    x: Any,
    n: int,
    triplets: tuple[Any, Any, Any],
    timed: tuple[Any, Any],
    expected: Any,
) -> list[Check]:
    # u is not part of what is timed, so it comes from a decomposition of its own, with its s and
    # v. 64 rows from the start, the middle and the end leave the workers, not the whole of u.
    u, s, v = triplets
    starts = sorted({0, x.shape[0] // 2, max(0, x.shape[0] - 64)})
    parts = [part for a in starts for part in (x[a : a + 64], u[a : a + 64])]
    fetched = compute(client, [s, v, u.T @ u, *parts])
    s, v, gram, *blocks = (to_host(a) for a in fetched)
    rows, u_rows = np.concatenate(blocks[0::2]), np.concatenate(blocks[1::2])
    if x.shape[1] != n:
        rows = packing.unpack(rows, n)
    checks = planted.check(s, v, gram, rows, u_rows, expected)
    timed_checks = planted.check(*timed, gram, rows, u_rows, expected)
    return [timed_checks[0], checks[1], timed_checks[2], checks[3]]


def run_svd_exact(
    cluster: Cluster, nbytes: int, *, repeats: int = 3, timeline: bool = False
) -> dict[str, Any]:
    """Measure ``dask.array.linalg.svd`` of a random float64 matrix of 20 columns.

    It is checked with the Gram matrix, which workers compute with dask's own products.
    """
    shape = nbytes // (8 * EXACT_COLUMNS), EXACT_COLUMNS
    if shape[0] < EXACT_COLUMNS:
        raise UsageError(
            f"size {nbytes} B is too small: the least is {8 * EXACT_COLUMNS**2} B, "
            f"{EXACT_COLUMNS} x {EXACT_COLUMNS} float64"
        )
    _check_room(nbytes, 1, cluster)
    library = client_cupy() if cluster.device == "cuda" else np
    rs = da.random.RandomState(0, RandomState=library.random.RandomState)
    x = rs.random_sample(shape, chunks=EXACT_CHUNKS)
    rows = x.chunks[0]
    case = Case("svd", "stock", shape, "float64", len(rows), (max(rows), shape[1]), "exact")

    def finish(x: Any, timed: Timed) -> tuple[dict[str, Any], list[Check]]:
        s, v = (to_host(result) for result in timed.results)
        checks = _check_exact(cluster.client, x, da.linalg.svd(x)[0], s, v)
        return {"singular_values": s.tolist()}, checks

    work = Work(memory=float(x.nbytes), matrix_float64=2.0 * shape[0] * shape[1] ** 2)
    how: dict[str, Any] = {"input": x, "held": True, "work": work}
    workload = Workload(case, lambda x, _: da.linalg.svd(x)[1:], finish, **how)
    return run(workload, cluster, repeats, timeline)


def _check_exact(client: distributed.Client, x: Any, u: Any, s: Any, v: Any) -> list[Check]:
    gram, u_gram = (to_host(a) for a in compute(client, [x.T @ x, u.T @ u]))
    one = np.eye(len(s))
    # The eigenvectors of the Gram matrix: (x v)ᵀ(x v) = s²
    residual = v @ gram @ v.T - np.diag(s**2)
    values = {
        "x v = u s, relative residual": np.abs(residual).max() / s[0] ** 2,
        "u, orthogonality": np.abs(u_gram - one).max(),
        "v, orthogonality": np.abs(v @ v.T - one).max(),
    }
    return [Check(name, float(value), 0.0, EXACT_TOLERANCE) for name, value in values.items()]
