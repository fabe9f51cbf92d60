"""The array computations that users run, on a square array of ``normal(10, 1)`` float64.

========= ========================================= ===========================
name      what one writes                           known answer
========= ========================================= ===========================
sum       ``(x + 1)[::2, ::2].sum()``               11 (n/2)²
mean      ``x.mean()``                              10
std       ``x.std()``                               1
transpose ``(x + x.T).std()``                       √(2 + 2/n)
matmul    ``(x @ x.T).mean()``                      100 n + 1
fft       ``(abs(rfft(x)) ** 2).mean(axis=0)``      100 n² + n, then n, n, n, …
stencil   five-point average, periodic, ``.std()``  1/√5
========= ========================================= ===========================

The sum first appeared in the Dask blog in January 2019
(https://blog.dask.org/2019/01/03/dask-array-gpus-first-steps), on 2 TB of float64. Every random
number is materialised in the memory of a device.

The ``stock`` form is that program in dask.array, in chunks that the Dask blog or dask itself
chooses. The ``tuned`` form has the same answer and draws as many random numbers, each into the
memory of a device, but lays the work out for the hardware:

- One Dask task makes a chunk and reduces it, tile by tile while it is in the cache of a CPU; only
  what other chunks need stays on the workers between Dask tasks.
- Chunks have full rows, so ``fft`` along them needs no rechunk and ``stencil`` only two rows of
  each neighbour. Users transform the last axis, the default of ``da.fft``; their chunks are
  square, so the stock form has to rechunk first.
- ``transpose`` makes a chunk and its mirror image in one Dask task, so no chunk has to move. (How
  fast chunks that lie elsewhere move is what :mod:`hpcdask.workloads.exchange` measures.)
- ``x + x.T`` and ``x @ x.T`` are symmetric: only one of two mirrored chunks is computed.

For ``matmul`` and ``stencil`` the workers hold x. A worker that multiplies fetches most of it, so
for ``matmul`` x should fit each of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, cast

import dask.array as da
import numpy as np

from hpcdask.workloads import (
    Check,
    Device,
    Form,
    WorkloadError,
    check_device,
    check_whole,
    client_cupy,
    run_bench,
    slab_rows,
)
from hpcdask.workloads import array_blocks as blocks
from hpcdask.workloads.array_blocks import ITEM_NBYTES, LOC, STEP
from hpcdask.workloads.graphs import Graph, cut, sum_of_chunks

#: Of patterns; the sum, which streams any size and is the reference, has functions of its own.
NAMES = ("mean", "std", "transpose", "matmul", "fft", "stencil")
#: Chunks of the blog for the sum, and what is the most of the tuned one's.
STOCK_SUM_CHUNK = 10_000
MAX_SUM_CHUNK_NBYTES: dict[Device, int] = {"cuda": 64_000_000_000, "cpu": 128_000_000}
#: Below this the checks, which rest on large numbers, say nothing.
LEAST_SIDE = 16
#: Chunks of the blog on GPUs; what ``da.random`` chooses without them.
STOCK_CHUNKS: dict[Device, int | str] = {"cuda": 10_000, "cpu": "auto"}
#: Of a chunk. Beside it on the device are at most its neighbour or mirror image and the result.
MAX_CHUNK_NBYTES: dict[Device, int] = {"cuda": 2_000_000_000, "cpu": 128_000_000}
#: Blocks of x for each slot of ``transpose``: a pair has two of them, the diagonal one.
BLOCKS_PER_SLOT = 8


# --- the sum --------------------------------------------------------------------------------------


def side(nbytes: int) -> int:
    """Return the side of the largest square float64 array of even side within ``nbytes`` bytes."""
    n = math.isqrt(max(nbytes, 0) // ITEM_NBYTES) // 2 * 2
    if n < 2:
        raise WorkloadError(f"size {nbytes} B is too small: the least is 32 B (2 x 2 float64)")
    return n


def chunk_rows(
    n: int, *, device: Device, n_slots: int, max_nbytes: int | None = None
) -> tuple[int, ...]:
    """Choose row chunks of full width and even height for the sum of an ``n`` x ``n`` array."""
    limit = MAX_SUM_CHUNK_NBYTES[device] if max_nbytes is None else max_nbytes
    return slab_rows(n, n * ITEM_NBYTES, n_slots=n_slots, max_nbytes=limit, multiple=2)


def tuned_sum(
    rows: tuple[int, ...], n_columns: int, *, device: Device = "cuda", seed: int = 0
) -> da.Array:
    """Sum and count ``(normal(10, 1) + 1)[::2, ::2]``, as float64 of shape (2,).

    Chunks have an even number of rows but for the last, so that ``[::2]`` picks the same rows as on
    the whole. cuRAND takes 32 bits of their seeds: 500 contain a repeated stream with probability
    3e-5.
    """
    check_device(device)
    check_whole("seed", seed)
    if not rows or min(rows) < 1 or n_columns < 1:
        raise WorkloadError(f"an array of {sum(rows)} x {n_columns} has no elements")
    if any(r % 2 for r in rows[:-1]):
        raise WorkloadError("every chunk but the last needs an even number of rows for [::2]")
    how = {"rows": rows, "n": n_columns, "seed": seed, "device": device}
    return sum_of_chunks(blocks.selected, n_chunks=len(rows), width=2, dtype="float64", **how)


def stock_sum(n: int, *, device: Device = "cuda") -> da.Array:
    """Build the blog's program, unchanged: chunks of 10,000 x 10,000 and dask's own optimisation.

    ``"cuda"`` needs a GPU on the client as well, which builds CuPy arrays and receives one.
    """
    check_device(device)
    library = client_cupy() if device == "cuda" else np
    rs = da.random.RandomState(RandomState=library.random.RandomState)
    x = rs.normal(LOC, 1.0, size=(n, n), chunks=(STOCK_SUM_CHUNK, STOCK_SUM_CHUNK))
    return cast("da.Array", (x + STEP)[::2, ::2].sum())


def check_sum(total: float, count: int, shape: tuple[int, int]) -> list[Check]:
    """Compare a result with what is known: the count, and the mean, 11, in six standard errors."""
    expected = math.ceil(shape[0] / 2) * math.ceil(shape[1] / 2)
    return [
        Check("count", count, expected, 0),
        Check("mean", float(total) / expected, LOC + STEP, 6 / math.sqrt(expected)),
    ]


# --- the patterns ---------------------------------------------------------------------------------


def build(
    name: str,
    n: int,
    device: Device = "cuda",
    form: Form = "tuned",
    n_slots: int = 1,
    seed: int = 0,
    *,
    max_nbytes: int | None = None,
) -> da.Array:
    """Build one of ``NAMES`` for an array of side n, at least ``LEAST_SIDE``, as a float64 array.

    Its shape is (n // 2 + 1,) for ``"fft"``, else (). ``max_nbytes`` bounds a tuned chunk. Chunk
    ``i`` draws from ``SeedSequence(seed, spawn_key=(i,))``, a block of ``transpose`` from ``(i,
    j)``.
    """
    _validate(name, n)
    check_whole("seed", seed)
    check_device(device)
    if form == "stock":
        return _stock(name, _stock_normals(n, device, seed))
    if form != "tuned":
        raise WorkloadError(f"unknown form {form!r}: tuned or stock")
    if name == "transpose":
        return _transpose(grid(n, device, n_slots, max_nbytes), device, seed)
    rows = slabs(n, device, n_slots, max_nbytes)
    common = {"n": n, "seed": seed, "device": device}
    graph = Graph(name, rows, tuple(common.values()))

    def each(function: Callable[..., Any]) -> list[Any]:
        return [graph.task(function, r, i, **common) for i, r in enumerate(rows)]

    if name == "mean":
        return graph.array(each(blocks.total), blocks.add, blocks.mean)
    if name == "std":
        return graph.array(each(blocks.moments), blocks.merge, blocks.std)
    if name == "fft":
        return graph.array(each(blocks.spectrum), blocks.add, blocks.means, n // 2 + 1)
    x = each(blocks.slab)
    if name == "matmul":
        pairs = itertools.combinations_with_replacement(range(len(x)), 2)
        parts = [graph.task(blocks.product, x[i], x[j], mirrored=i != j) for i, j in pairs]
        return graph.array(parts, blocks.add, blocks.mean)
    # One Dask task of two rows for each slab, so that a neighbour need not fetch the whole slab.
    edges = [graph.task(blocks.edges, slab) for slab in x]
    around = zip(x, [edges[-1], *edges], [*edges[1:], edges[0]], strict=False)
    parts = [graph.task(blocks.five_points, *three, device=device) for three in around]
    return graph.array(parts, blocks.merge, blocks.std)


def slabs(n: int, device: Device, n_slots: int, max_nbytes: int | None = None) -> tuple[int, ...]:
    """Choose row chunks of full width for all tuned forms but ``transpose``."""
    limit = MAX_CHUNK_NBYTES[device] if max_nbytes is None else max_nbytes
    if limit < n * ITEM_NBYTES:
        raise WorkloadError(
            f"a chunk of {limit} B has no room for a row of {n} float64: chunks of "
            f"{n * ITEM_NBYTES} B are the least, or an array of side {limit // ITEM_NBYTES}"
        )
    return slab_rows(n, n * ITEM_NBYTES, n_slots=n_slots, max_nbytes=limit)


def grid(n: int, device: Device, n_slots: int, max_nbytes: int | None = None) -> tuple[int, ...]:
    """Choose the rows of square chunks for ``transpose``, which are their columns too."""
    limit = MAX_CHUNK_NBYTES[device] if max_nbytes is None else max_nbytes
    if limit < ITEM_NBYTES:
        raise WorkloadError(f"a chunk of {limit} B has no room: {ITEM_NBYTES} B are the least")
    edge = math.isqrt(limit // ITEM_NBYTES)
    parts = min(n, max(math.ceil(math.sqrt(BLOCKS_PER_SLOT * n_slots)), math.ceil(n / edge)))
    return cut(n, parts)


def check(name: str, result: Any, n: int) -> list[Check]:
    """Compare a result, as NumPy, with what is known of it, within six standard errors."""
    _validate(name, n)
    if name == "fft":
        # A row sums to N(10 n, n), and its other frequencies have exponential power of mean n.
        zero, rest = float(result[0]), float(np.mean(result[1:]))
        error = math.sqrt(4 * LOC**2 * n**2 + 2 * n)
        return [
            Check("power at frequency 0", zero, LOC**2 * n**2 + n, 6 * error),
            Check("power at other frequencies", rest, n, 6 * math.sqrt(2)),
        ]
    expected, error = {
        "mean": (LOC, 1 / n),
        "std": (1.0, math.sqrt(1 / 2) / n),
        # Off the diagonal the variance is 2, on it 4, and of the n² elements half are distinct.
        "transpose": (math.sqrt(2 + 2 / n), math.sqrt(2) / n),
        # Sum of the squares of n column sums, each N(10 n, n), over n².
        "matmul": (LOC**2 * n + 1, math.sqrt(4 * LOC**2 + 2 / n)),
        # Squared correlations with the neighbours add up to 2.44.
        "stencil": (math.sqrt(1 / 5), math.sqrt(1 / 5 * 2.44 / 2) / n),
    }[name]
    return [Check(name, float(result), expected, 6 * error)]


def work(name: str, n: int, n_workers: int = 1) -> dict[str, float]:
    """Return the least that hardware has to do, in the units of `hpcdask.bench.limits.Work`.

    Of ``matmul``, one of W workers computes 1/W of a triangle in products of whole rows, which
    needs n/√W rows at least, and holds n/W of them.
    """
    _validate(name, n)
    least = {"memory": 2.0 * ITEM_NBYTES * n**2, "random": float(n**2)}
    if name == "matmul":
        least["matrix_float64"] = float(n**2 * (n + 1))
        least["link"] = ITEM_NBYTES * n**2 * (math.sqrt(n_workers) - 1)
    return least


def _validate(name: str, n: int) -> None:
    if name not in NAMES:
        raise WorkloadError(f"unknown pattern {name!r}: {', '.join(NAMES)}")
    if n < LEAST_SIDE:
        raise WorkloadError(
            f"a side of {n} is too small: the least is {LEAST_SIDE}, "
            f"{ITEM_NBYTES * LEAST_SIDE**2} B of float64"
        )


def _transpose(rows: tuple[int, ...], device: Device, seed: int) -> da.Array:
    graph = Graph("transpose", rows, (seed, device))
    # Pairs first and the smaller ones, on the diagonal, last: all slots end together.
    cells = [*itertools.combinations(range(len(rows)), 2), *((i, i) for i in range(len(rows)))]
    parts = [
        graph.task(blocks.mirrored, cell, (rows[cell[0]], rows[cell[1]]), seed=seed, device=device)
        for cell in cells
    ]
    return graph.array(parts, blocks.merge, blocks.std)


def _stock_normals(n: int, device: Device, seed: int) -> da.Array:
    if device == "cuda":
        # CuPy's Generator has no `normal`, so this is what one can write.
        rng: Any = da.random.RandomState(seed, RandomState=client_cupy().random.RandomState)
    else:
        rng = da.random.default_rng(seed)
    return cast("da.Array", rng.normal(LOC, 1.0, size=(n, n), chunks=STOCK_CHUNKS[device]))


def _stock(name: str, x: da.Array) -> da.Array:
    forms: dict[str, Callable[[], Any]] = {
        "mean": lambda: x.mean(),
        "std": lambda: x.std(),
        "transpose": lambda: (x + x.T).std(),
        "matmul": lambda: (x @ x.T).mean(),
        "fft": lambda: (abs(da.fft.rfft(x.rechunk({1: -1}))) ** 2).mean(axis=0),
        "stencil": lambda: x.map_overlap(blocks.average, depth=1, boundary="periodic").std(),
    }
    return cast("da.Array", forms[name]())


if __name__ == "__main__":
    run_bench("array")
