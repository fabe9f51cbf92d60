"""What the Dask tasks of :mod:`hpcdask.workloads.array` do, with NumPy or CuPy.

Partial results are small NumPy vectors. Those of means are a count and sums; those of standard
deviations are a count, a mean and a sum of squares about it, which merge without cancellation
(Chan, Golub, LeVeque, The American Statistician 37 (1983), 242-247).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcdask.workloads import Device, array_module, to_host

LOC, STEP = 10.0, 1.0
ITEM_NBYTES = 8
# On an H200, 5e8 float64 normals take 2.6 ms with XORWOW and 3.3 ms with Philox, and setting up a
# generator, which every chunk has of its own, 0.6 and 0.2 ms. Any name of cupy.random will do.
BIT_GENERATOR = "XORWOW"
# The CPU fills and reduces a tile while it is in the cache.
CPU_TILE_NBYTES = 1 << 20
# A GPU sums a chunk slab by slab, in the same memory, and is told what to do next while it works.
SLAB_NBYTES = 4_000_000_000
# Columns are read across rows of the mirror image: 64 x 256 took 2 ns per element, rows of full
# width 7 ns.
MIRROR_TILE = 64, 256

Floats = NDArray[np.float64]


# --- random numbers -------------------------------------------------------------------------------


def slab(rows: int, number: int, *, n: int, seed: int, device: Device) -> Any:
    """Make a chunk of full rows."""
    return _normals((rows, n), (number,), seed, device)


def _normals(shape: tuple[int, int], chunk: tuple[int, ...], seed: int, device: Device) -> Any:
    if device == "cuda":
        z = _standard_normals(shape, chunk, seed)
        z += LOC
        return z
    x = np.empty(shape)
    for _ in _fill(x, chunk, seed):
        pass
    return x


def generator(chunk: tuple[int, ...], seed: int) -> Any:
    """Return CuPy's generator of a chunk, whose own it is: threads cannot share one."""
    cupy = array_module("cuda")
    seeds = np.random.SeedSequence(seed, spawn_key=chunk)
    return cupy.random.Generator(getattr(cupy.random, BIT_GENERATOR)(seeds))


def _standard_normals(shape: tuple[int, int], chunk: tuple[int, ...], seed: int) -> Any:
    return generator(chunk, seed).standard_normal(shape, dtype=np.float64)


def _fill(x: Floats, chunk: tuple[int, ...], seed: int) -> Iterator[Floats]:
    """Fill an array with random numbers, and yield it by tiles of an even number of rows.

    SFC64 is NumPy's fastest generator.
    """
    rng = np.random.Generator(np.random.SFC64(np.random.SeedSequence(seed, spawn_key=chunk)))
    step = max(2, CPU_TILE_NBYTES // (x.shape[1] * ITEM_NBYTES) // 2 * 2)
    for start in range(0, x.shape[0], step):
        tile = x[start : start + step]
        rng.standard_normal(out=tile)
        tile += LOC
        yield tile


# --- sums -----------------------------------------------------------------------------------------


def selected(
    *, rows: tuple[int, ...], n: int, seed: int, device: Device, block_id: tuple[int, int]
) -> Floats:
    """Sum and count of ``(x + 1)[::2, ::2]`` of a chunk, as (1, 2)."""
    height = rows[block_id[0]]
    if device == "cpu":
        tiles = (tile[::2, ::2] for tile in _fill(np.empty((height, n)), block_id[:1], seed))
        return add(*(np.array([[(y + STEP).sum(), y.size]]) for y in tiles))
    rng, step = generator(block_id[:1], seed), max(2, SLAB_NBYTES // (n * ITEM_NBYTES) // 2 * 2)
    totals, count = [], 0
    for start in range(0, height, step):
        z = rng.standard_normal((min(step, height - start), n), dtype=np.float64)
        # The arithmetic is elementwise, so the slice may go first: one pass over a quarter of the
        # elements. Its result is contiguous, as CuPy's fast reduction wants it; on a strided view
        # that takes a hundred times longer.
        y = _shift_kernel()(LOC, STEP, z[::2, ::2])
        totals.append(y.sum())
        count += y.size
        del y, z
    return np.array([[float(array_module(device).stack(totals).sum()), count]])


# --- means ----------------------------------------------------------------------------------------


def total(rows: int, number: int, *, n: int, seed: int, device: Device) -> Floats:
    """Count and sum of a chunk."""
    if device == "cuda":
        z = _standard_normals((rows, n), (number,), seed)
        return np.array([rows * n, float(_total(z, LOC))])
    tiles = _fill(np.empty((rows, n)), (number,), seed)
    return np.array([rows * n, sum(float(tile.sum()) for tile in tiles)])


def product(a: Any, b: Any, *, mirrored: bool) -> Floats:
    """Count and sum of a block of ``x @ x.T``, and of its mirror image if it has one."""
    block = a @ b.T
    times = 1 + mirrored
    return np.array([times * block.size, times * float(block.sum())])


def spectrum(rows: int, number: int, *, n: int, seed: int, device: Device) -> Floats:
    """Number of rows of a chunk, and the sum of their power spectra."""
    if device == "cuda":
        power = _power(slab(rows, number, n=n, seed=seed, device=device))
    else:
        power = sum(_power(tile) for tile in _fill(np.empty((rows, n)), (number,), seed))
    return np.concatenate([[rows], to_host(power)])


def _power(x: Any) -> Any:
    xp = array_module("cpu" if isinstance(x, np.ndarray) else "cuda")
    parts = xp.fft.rfft(x, axis=1).view(np.float64)  # real and imaginary by turns
    parts *= parts
    # A product with ones is the fastest sum over rows that both libraries have.
    sums = xp.ones(len(parts)) @ parts
    return sums[0::2] + sums[1::2]


def add(*parts: Floats) -> Floats:
    """Merge partial results of means."""
    sums: Floats = np.array(parts).sum(axis=0)
    return sums


def means(*parts: Floats) -> Floats:
    """Turn partial results into means."""
    sums = add(*parts)
    found: Floats = sums[1:] / sums[0]
    return found


def mean(*parts: Floats) -> np.float64:
    """Turn partial results of one sum into its mean."""
    return np.float64(means(*parts)[0])


# --- standard deviations --------------------------------------------------------------------------


def moments(rows: int, number: int, *, n: int, seed: int, device: Device) -> Floats:
    """Moments of a chunk."""
    if device == "cuda":
        return _moments_cuda(_standard_normals((rows, n), (number,), seed), LOC)
    return merge(*(_moments(tile) for tile in _fill(np.empty((rows, n)), (number,), seed)))


def mirrored(cell: tuple[int, int], shape: tuple[int, int], *, seed: int, device: Device) -> Floats:
    """Moments of a block of ``x + x.T`` and, off the diagonal, of its mirror image."""
    a = _normals(shape, cell, seed, device)
    b = a if cell[0] == cell[1] else _normals(shape[::-1], cell[::-1], seed, device)
    if device == "cuda":
        found = _moments_cuda(a + b.T, 0.0)
    else:
        rows, columns = MIRROR_TILE
        found = merge(
            *(
                _moments(a[i : i + rows, j : j + columns] + b[j : j + columns, i : i + rows].T)
                for i in range(0, shape[0], rows)
                for j in range(0, shape[1], columns)
            )
        )
    if a is not b:
        found[[0, 2]] *= 2
    return found


def edges(x: Any) -> Any:
    """First and last row of a chunk, as a copy."""
    return x[[0, -1]]


def five_points(x: Any, before: Any, after: Any, *, device: Device) -> Floats:
    """Moments of the average of each element and its four neighbours, periodic along rows.

    ``before`` and ``after`` are the edges of the chunks above and below.
    """
    if device == "cuda":
        y = array_module(device).empty_like(x)
        _five_points_kernel()(x, before[1], after[0], *x.shape, y)
        return _moments_cuda(y, 0.0)
    step = max(1, CPU_TILE_NBYTES // (x.shape[1] * ITEM_NBYTES))
    parts = []
    for start in range(0, len(x), step):
        tile = x[start : start + step]
        above = x[start - 1] if start else before[1]
        below = x[start + step] if start + step < len(x) else after[0]
        y = tile.copy()
        y[1:] += tile[:-1]
        y[0] += above
        y[:-1] += tile[1:]
        y[-1] += below
        y[:, 1:] += tile[:, :-1]
        y[:, 0] += tile[:, -1]
        y[:, :-1] += tile[:, 1:]
        y[:, -1] += tile[:, 0]
        y /= 5
        parts.append(_moments(y))
    return merge(*parts)


def average(x: Any) -> Any:
    """Average inner elements with their four neighbours: what one gives to ``map_overlap``."""
    y = x.copy()
    y[1:-1, 1:-1] = (x[1:-1, 1:-1] + x[:-2, 1:-1] + x[2:, 1:-1] + x[1:-1, :-2] + x[1:-1, 2:]) / 5
    return y


def _moments(tile: Floats) -> Floats:
    middle = tile.mean()
    deviations = tile - middle
    return np.array([tile.size, middle, np.vdot(deviations, deviations)])


def _moments_cuda(x: Any, loc: float) -> Floats:
    middle = float(_total(x, loc)) / x.size
    return np.array([x.size, middle, float(_squares(x, loc - middle))])


def merge(*parts: Floats) -> Floats:
    """Merge partial results of standard deviations."""
    counts, middles, squares = np.array(parts).T
    count = counts.sum()
    middle = (counts * middles).sum() / count
    return np.array([count, middle, squares.sum() + (counts * (middles - middle) ** 2).sum()])


def std(*parts: Floats) -> np.float64:
    """Turn partial results into a standard deviation."""
    count, _, squares = merge(*parts)
    return np.float64(np.sqrt(squares / count))


# --- CUDA kernels ---------------------------------------------------------------------------------


def _total(x: Any, loc: float) -> Any:
    """Sum of ``loc + x``."""
    return _row_sums("loc + x", "hpcdask_total")(x, loc, axis=1).sum()


def _squares(x: Any, loc: float) -> Any:
    """Sum of the squares of ``loc + x``."""
    return _row_sums("(loc + x) * (loc + x)", "hpcdask_squares")(x, loc, axis=1).sum()


@functools.cache
def _row_sums(term: str, name: str) -> Any:
    # Row by row, because CuPy gives each result of such a kernel one block of threads.
    return array_module("cuda").ReductionKernel(
        "float64 x, float64 loc", "float64 y", term, "a + b", "y = a", "0", name
    )


@functools.cache
def _shift_kernel() -> Any:
    return array_module("cuda").ElementwiseKernel(
        "float64 loc, float64 step, float64 z", "float64 y", "y = (loc + z) + step", "hpcdask_shift"
    )


@functools.cache
def _five_points_kernel() -> Any:
    # One pass: the neighbours of an element are in the cache when their own turn comes.
    return array_module("cuda").ElementwiseKernel(
        "raw float64 x, raw float64 before, raw float64 after, int64 rows, int64 columns",
        "float64 y",
        """
        const long long row = i / columns, column = i - row * columns;
        const double above = row > 0 ? x[i - columns] : before[column];
        const double below = row < rows - 1 ? x[i + columns] : after[column];
        const double left = x[column > 0 ? i - 1 : i + columns - 1];
        const double right = x[column < columns - 1 ? i + 1 : i - columns + 1];
        y = (x[i] + above + below + left + right) / 5;
        """,
        "hpcdask_five_points",
    )
