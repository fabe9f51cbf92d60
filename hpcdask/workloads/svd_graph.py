"""The graph of an SVD: sums over the chunks, added in trees, and what ends each pass over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import dask.array as da
import numpy as np
from dask._task_spec import List, TaskRef
from dask.core import flatten

from hpcdask.workloads.graphs import Graph
from hpcdask.workloads.small_svd import orthonormal, precondition, solve
from hpcdask.workloads.tall import Rows, combine, end, left, only, products

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
