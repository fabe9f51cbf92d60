"""The graph of an SVD: sums over the chunks, added in trees, and what ends each pass over them.

The small matrices at the ends are decomposed on the host of one worker. Sums, `Basis` and `Part`
are those of `hpcdask.workloads.tall`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, cast

import dask.array as da
import numpy as np
from dask.core import flatten

from hpcdask.upstream.dask import List, TaskRef
from hpcdask.workloads import WorkloadError, to_host
from hpcdask.workloads.graphs import Graph
from hpcdask.workloads.tall import Basis, Floats, Rows, basis_of, combine, end, left, only, products

# Partial sums are (n + l) x l float64, 3.2 MB at the reference size. So many are added in one Dask
# task if they are small, or smaller than a chunk; else two, so that few have to be kept.
SPLIT_EVERY = 8
SMALL_NBYTES = 1 << 24
# Blocks are tuples, of which dask needs to know no more than that they are not CuPy arrays
FREE_FORM: dict[str, Any] = {"align_arrays": False, "dtype": np.float64, "meta": np.empty((0, 0))}


def decompose(
    x: da.Array,
    rows: Rows,
    k: int,
    width: int,
    seed: int | None,
    *,
    n_power_iter: int = 0,
    passes: int = 1,
    sign_of_left: bool = False,
) -> tuple[da.Array, da.Array, da.Array]:
    """Return u, s and v of x; without a seed, the first basis is the identity."""
    how = {"rows": rows, "width": width, "seed": seed}
    basis: tuple[da.Array, ...] = ()
    branches = _branches(x, rows.n, width)
    sums = _sums(x, basis, how, "0")
    for number in range(n_power_iter + passes - 1):
        if number < n_power_iter:
            basis = (_ended(orthonormal, sums, (), 2, branches, rows=rows, m=x.shape[0]),)
        else:
            basis = (_ended(precondition, sums, basis, 2, branches, **how),)
        sums = _sums(x, basis, how, str(number + 1))
    solution = _ended(solve, sums, basis, 1, branches, k=k, sign_of_left=sign_of_left, **how)
    s = _part(solution, "k", 0, {"k": k})
    v = _part(solution, "kv", 1, {"k": k, "v": rows.n})
    u = da.blockwise(
        left, "in", x, "in", _starts(x, "left"), "i", solution, "n",
        adjust_chunks={"n": lambda _: k}, rows=rows, **FREE_FORM,
    )  # fmt: skip
    return u, s, v


def _sums(x: da.Array, basis: tuple[da.Array, ...], how: dict[str, Any], reader: str) -> da.Array:
    """Sums of `tall.products` over each chunk.

    All indices are in the result, or dask would not fuse this with what makes x and the starts.
    """
    pairs = (basis[0], "nl") if basis else ()
    return cast(
        "da.Array",
        da.blockwise(
            products, "inl", x, "in", _starts(x, reader), "i", *pairs,
            new_axes={} if basis else {"l": how["width"]},
            adjust_chunks={"i": lambda _: 1},
            **FREE_FORM, **how,
        ),
    )  # fmt: skip


def _ended(
    function: Callable[..., Any],
    sums: da.Array,
    basis: tuple[da.Array, ...],
    ndim: int,
    branches: int,
    **how: Any,
) -> da.Array:
    """Add the sums of all chunks and hand them to a function, as one block.

    The tree's last Dask task is the function's: each level takes some milliseconds.
    """
    graph = Graph(function.__name__, sums.name, [b.name for b in basis], how)
    parts: list[Any] = [TaskRef(key) for key in flatten(sums.__dask_keys__())]
    while len(parts) > branches:
        parts = [
            graph.task(combine, List(*parts[i : i + branches]))
            for i in range(0, len(parts), branches)
        ]
    bases = [TaskRef((b.name, 0, 0)) for b in basis]
    return graph.block(end, function, List(*parts), *bases, ndim=ndim, after=[sums, *basis], **how)


def _branches(x: da.Array, n: int, width: int) -> int:
    """How many sums are added in one Dask task."""
    chunk_nbytes = max(x.chunks[0]) * x.shape[1] * x.dtype.itemsize
    sums_nbytes = SPLIT_EVERY * (n + width) * width * np.dtype(np.float64).itemsize
    return SPLIT_EVERY if sums_nbytes <= max(chunk_nbytes, SMALL_NBYTES) else 2


def _starts(x: da.Array, reader: str) -> da.Array:
    """First row of each chunk, for one reader: shared by two, it would be Dask tasks of its own."""
    starts = tuple(int(start) for start in np.cumsum([0, *x.chunks[0][:-1]]))
    how = {"starts": starts, "name": f"start-{reader}-{x.name}", "meta": np.empty(0, np.int64)}
    return cast("da.Array", da.map_blocks(_start, chunks=((1,) * len(starts),), **how))


def _start(*, starts: tuple[int, ...], block_id: tuple[int]) -> Any:
    return np.array([starts[block_id[0]]])


def _part(solution: da.Array, index: str, part: int, sizes: dict[str, int]) -> da.Array:
    found = da.blockwise(_item, index, solution, "n", part=part, new_axes=sizes, **FREE_FORM)
    return cast("da.Array", found)


def _item(solution: Any, *, part: int) -> Any:
    return only(solution)[part]


# --- the small matrices ---------------------------------------------------------------------------


class Solution(NamedTuple):
    """Singular values (k,), right vectors (k, n), and what makes left vectors of a chunk.

    ``right`` (n, k) makes them of the rows of A. From QR, it makes Yᵢ of them, and the chunk's own
    matrix in ``of_chunks``, by its first row, makes left vectors of Qᵢ.
    """

    s: Floats
    v: Floats
    right: Any
    of_chunks: dict[int, Floats]


def orthonormal(sums: Any, *, rows: Rows, m: int) -> Basis:
    """Return the basis of the next power iteration."""
    z, gram, y_sums, _ = only(sums)
    _refuse_underflow(gram, y_sums, rows.work)
    q, r = np.linalg.qr(to_host(gram if z is None else z))
    if len(r) > m:  # what is past the rank of A is rounding, and must not be taken for its range
        q = q @ np.linalg.svd(r)[0][:, :m]
    return q, False


def _refuse_underflow(gram: Any, y_sums: Any, work: str) -> None:
    """Refuse sums of squares of which the smallest float has taken a part."""
    kind = np.finfo(work)
    # Of float32 the squares are float64, and Y itself is at the limit
    least = float(kind.tiny) / float(kind.eps)
    least **= 1 if work == "float64" else 2
    squares = to_host(gram).diagonal()
    if squares.max() < least and (squares.any() or to_host(y_sums).any()):
        raise WorkloadError(f"x is not zero, but its products underflow in {work}: scale x")


def precondition(
    sums: Any, basis: Any = None, *, rows: Rows, width: int, seed: int | None
) -> Basis:
    """Return a basis with which the columns of Y are orthonormal but for rounding.

    Where the Gram matrix is too ill-conditioned for that, the basis stays, for QR.
    """
    matrix = _host_basis(basis, rows, width, seed)
    whiten, complete = _whiten(to_host(only(sums)[1]), rows.work)
    if not complete:
        return matrix, True
    return (whiten if matrix is None else matrix @ whiten), False


def _host_basis(basis: Any, rows: Rows, width: int, seed: int | None) -> Any:
    matrix, _ = basis_of(basis, replace(rows, device="cpu"), width, seed)
    return None if matrix is None else matrix.astype(rows.work, copy=False)


def _whiten(gram: Floats, work: str) -> tuple[Floats, bool]:
    """Return T with TᵀGT = 1 on what is above rounding, and whether that is all."""
    norms = np.sqrt(np.diag(gram))
    # What lies below is rounding of the products, not part of the range of A: a column that Ω has
    # outside the rows' space of A, or a direction in which the columns of Y depend on each other.
    noise = 64 * len(gram) * np.finfo(work).eps
    scale = np.divide(1, norms, where=norms > noise * norms.max(), out=np.zeros_like(norms))
    values, vectors = np.linalg.eigh(gram * scale * scale[:, None])
    keep = values > max(noise * values[-1], np.finfo(np.float64).tiny)
    return vectors[:, keep] / np.sqrt(values[keep]) * scale[:, None], bool(keep.all())


def solve(
    sums: Any,
    basis: Any = None,
    *,
    k: int,
    rows: Rows,
    width: int,
    seed: int | None,
    sign_of_left: bool,
) -> Solution:
    """Decompose the small matrix B, on the host, and choose the signs.

    The sums of the left vectors, or else those of the right ones, are not negative.
    """
    z, gram, y_sums, parts = only(sums)
    matrix = _host_basis(basis, rows, width, seed)
    if parts:
        q, r = np.linalg.qr(np.concatenate([part.r for part in parts]))
        ends = np.cumsum([len(part.r) for part in parts])[:-1]
        of_chunks = dict(zip((part.first for part in parts), np.split(q, ends), strict=True))
        small = r if matrix is None else sum(of_chunks[p.first].T @ p.c for p in parts)
        sums_of_q = sum(part.q_sums @ of_chunks[part.first] for part in parts)
    else:
        _refuse_underflow(gram, y_sums, rows.work)
        whiten, _ = _whiten(to_host(gram), rows.work)
        of_chunks, small = {}, (to_host(gram if z is None else z) @ whiten).T
        sums_of_q = to_host(y_sums) @ whiten
    turn, s, v = np.linalg.svd(small, full_matrices=False)
    turn, s, v = turn[:, :k], s[:k], v[:k]
    sign = np.where((sums_of_q @ turn if sign_of_left else v.sum(axis=1)) < 0, -1.0, 1.0)
    turn, v = turn * sign, v * sign[:, None]
    if parts:
        return Solution(s, v, matrix, {first: w @ turn for first, w in of_chunks.items()})
    right = whiten @ turn if matrix is None else matrix @ (whiten @ turn)
    return Solution(_fill(s, k), _fill(v, k), _fill(right.T, k).T, {})


def _fill(part: Floats, k: int) -> Floats:
    """Add zeros for what is past the rank."""
    out = np.zeros((k, *part.shape[1:]))
    out[: len(part)] = part
    return out
