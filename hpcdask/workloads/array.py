"""The reference array computation: ``(normal(10, 1) + 1)[::2, ::2].sum()`` of a square array.

It first appeared in the Dask blog in January 2019
(https://blog.dask.org/2019/01/03/dask-array-gpus-first-steps), on 2 TB of float64. Every random
number is materialised in the memory of a device; the answer is known: the mean of
the selected elements is 11.

``stock`` is the blog's program, ``tuned`` the same arithmetic laid out for the hardware.
"""

from __future__ import annotations

import functools
import math
from typing import Any, cast

import dask.array as da
import numpy as np

from hpcdask.workloads import (
    Check,
    Device,
    WorkloadError,
    array_module,
    check_device,
    check_whole,
    client_cupy,
    run_bench,
    slab_rows,
)

__all__ = ["LOC", "SCALE", "STEP", "check", "chunk_rows", "side", "stock", "tuned"]

LOC, SCALE, STEP = 10.0, 1.0, 1.0
STOCK_CHUNK = 10_000
ITEM_NBYTES = 8
MAX_CHUNK_NBYTES: dict[Device, int] = {"cuda": 64_000_000_000, "cpu": 128_000_000}
# A GPU makes a chunk slab by slab, in the same memory, and is told what to do next while it works.
SLAB_NBYTES = 4_000_000_000
# On an H200, 5e8 float64 normals take 2.6 ms with XORWOW and 3.3 ms with Philox, and setting up a
# generator, which every chunk has of its own, 0.6 and 0.2 ms. Any name of cupy.random will do.
BIT_GENERATOR = "XORWOW"
# 64 partial sums of 16 bytes are one message per worker: two levels carry 4,096 chunks.
SPLIT_EVERY = 64
# The CPU fills, adds and sums a tile while it is in the cache.
CPU_TILE_NBYTES = 1 << 20


def side(nbytes: int) -> int:
    """Return the side of the largest square float64 array of even side within ``nbytes`` bytes."""
    n = math.isqrt(max(nbytes, 0) // ITEM_NBYTES) // 2 * 2
    if n < 2:
        raise WorkloadError(f"size {nbytes} B is too small: the least is 32 B (2 x 2 float64)")
    return n


def chunk_rows(
    n: int, *, device: Device, n_slots: int, max_nbytes: int | None = None
) -> tuple[int, ...]:
    """Choose row chunks of full width and even height for an ``n`` x ``n`` float64 array.

    A chunk has at most 64 GB on GPUs and 128 MB on CPUs by default.
    """
    limit = MAX_CHUNK_NBYTES[device] if max_nbytes is None else max_nbytes
    return slab_rows(n, n * ITEM_NBYTES, n_slots=n_slots, max_nbytes=limit, multiple=2)


def tuned(
    rows: tuple[int, ...], n_columns: int, *, device: Device = "cuda", seed: int = 0
) -> da.Array:
    """Sum and count ``(normal(10, 1) + 1)[::2, ::2]``, one Dask task per chunk and a tree.

    The result has shape (2,), float64, NumPy; building it needs no GPU and no CuPy. Chunks have
    full width, and all but the last an even number of rows, so that ``[::2]`` picks the same rows
    as on the whole.

    Chunk ``i`` draws from ``SeedSequence(seed, spawn_key=(i,))``: the same numbers on any cluster.
    cuRAND takes 32 bits of it, so 500 chunks contain a repeated stream with probability 3e-5. The
    CPU uses SFC64, NumPy's fastest generator.
    """
    check_device(device)
    check_whole("seed", seed)
    if not rows or min(rows) < 1 or n_columns < 1:
        raise WorkloadError(f"an array of {sum(rows)} x {n_columns} has no elements")
    if any(r % 2 for r in rows[:-1]):
        raise WorkloadError("every chunk but the last needs an even number of rows for [::2]")
    partial = da.map_blocks(
        _chunk_total,
        rows=rows,
        n_columns=n_columns,
        device=device,
        seed=seed,
        chunks=((1,) * len(rows), (2,)),
        dtype=np.float64,
        meta=np.empty((0, 0)),
    )
    return cast("da.Array", partial.sum(axis=0, split_every=SPLIT_EVERY))


def _chunk_total(
    *, rows: tuple[int, ...], n_columns: int, device: Device, seed: int, block_id: tuple[int, int]
) -> np.ndarray[Any, np.dtype[np.float64]]:
    seeds = np.random.SeedSequence(seed, spawn_key=(block_id[0],))
    shape = rows[block_id[0]], n_columns
    total, count = _total_cuda(shape, seeds) if device == "cuda" else _total_cpu(shape, seeds)
    return np.array([[total, count]])


def _total_cuda(shape: tuple[int, int], seeds: np.random.SeedSequence) -> tuple[float, int]:
    cupy = array_module("cuda")
    # The state is private to the chunk: generators are not safe to share between worker threads.
    rng = cupy.random.Generator(getattr(cupy.random, BIT_GENERATOR)(seeds))
    n_rows, n_columns = shape
    step = max(2, SLAB_NBYTES // (n_columns * ITEM_NBYTES) // 2 * 2)
    totals, count = [], 0
    for start in range(0, n_rows, step):
        z = rng.standard_normal((min(step, n_rows - start), n_columns), dtype=np.float64)
        # The arithmetic is elementwise, so the slice may go first: one pass over a quarter of the
        # elements. Its result is contiguous, as CuPy's fast reduction wants it; on a strided view
        # that takes a hundred times longer.
        y = _shift_kernel()(LOC, SCALE, STEP, z[::2, ::2])
        totals.append(y.sum())
        count += y.size
        del y, z
    return float(cupy.stack(totals).sum()), count


@functools.cache
def _shift_kernel() -> Any:
    return array_module("cuda").ElementwiseKernel(
        "float64 loc, float64 scale, float64 step, float64 z",
        "float64 y",
        "y = (loc + scale * z) + step",
        "hpcdask_shift",
    )


def _total_cpu(shape: tuple[int, int], seeds: np.random.SeedSequence) -> tuple[float, int]:
    rng = np.random.Generator(np.random.SFC64(seeds))
    x = np.empty(shape)
    tile_rows = max(2, CPU_TILE_NBYTES // (shape[1] * ITEM_NBYTES) // 2 * 2)
    total, count = 0.0, 0
    for start in range(0, shape[0], tile_rows):
        tile = x[start : start + tile_rows]
        rng.standard_normal(out=tile)
        tile *= SCALE
        tile += LOC
        tile += STEP
        selected = tile[::2, ::2]
        total += float(selected.sum())
        count += selected.size
    return total, count


def stock(n: int, *, device: Device = "cuda") -> da.Array:
    """Build the blog's program, unchanged: chunks of 10,000 x 10,000 and dask's own optimisation.

    ``"cuda"`` needs a GPU on the client as well, which builds CuPy arrays and receives one.
    """
    check_device(device)
    library = client_cupy() if device == "cuda" else np
    rs = da.random.RandomState(RandomState=library.random.RandomState)
    x = rs.normal(LOC, SCALE, size=(n, n), chunks=(STOCK_CHUNK, STOCK_CHUNK))
    return cast("da.Array", (x + STEP)[::2, ::2].sum())


def check(total: float, count: int, shape: tuple[int, int]) -> list[Check]:
    """Compare a result with what is known: the count, and the mean, 11, in six standard errors."""
    expected = math.ceil(shape[0] / 2) * math.ceil(shape[1] / 2)
    return [
        Check("count", count, expected, 0),
        Check("mean", float(total) / expected, LOC + STEP, 6 * SCALE / math.sqrt(expected)),
    ]


if __name__ == "__main__":
    run_bench("array")
