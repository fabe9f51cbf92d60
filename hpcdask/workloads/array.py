"""Checks of the computations of `plain_array`, and a sum laid out for the hardware.

The ``stock`` form is the plain one. The sum also has a ``tuned`` form, with the same answer and as
many random numbers: one Dask task makes a chunk of full rows and reduces it, tile by tile while it
is in the cache of a CPU. Both materialise every random number in the memory of a device.
"""

from __future__ import annotations

import functools
import math
from typing import Any, cast

import dask.array as da
import numpy as np
from numpy.typing import NDArray

from hpcdask.workloads import (
    Check,
    Device,
    WorkloadError,
    array_module,
    client_cupy,
    plain_array,
    sum_of_chunks,
)

LOC, STEP = 10.0, 1.0
ITEM_NBYTES = 8
#: Below this the checks, which rest on large numbers, say nothing.
LEAST_SIDE = 16
#: Chunks of the blog on GPUs; what ``da.random`` chooses without them.
STOCK_CHUNKS: dict[Device, int | str] = {"cuda": 10_000, "cpu": "auto"}
MAX_CHUNK_NBYTES: dict[Device, int] = {"cuda": 64_000_000_000, "cpu": 128_000_000}
# On an H200, 5e8 float64 normals take 2.6 ms with XORWOW and 3.3 ms with Philox, and setting up a
# generator, which every chunk has of its own, 0.6 and 0.2 ms. Any name of cupy.random will do.
BIT_GENERATOR = "XORWOW"
# The CPU fills and reduces a tile while it is in the cache.
CPU_TILE_NBYTES = 1 << 20
# A GPU sums a chunk slab by slab, in the same memory, and is told what to do next while it works.
SLAB_NBYTES = 4_000_000_000


def side(nbytes: int) -> int:
    """Return the side of the largest square float64 array of even side within ``nbytes`` bytes."""
    n = math.isqrt(max(nbytes, 0) // ITEM_NBYTES) // 2 * 2
    if n < LEAST_SIDE:
        raise WorkloadError(
            f"size {nbytes} B is too small: the least is {ITEM_NBYTES * LEAST_SIDE**2} B "
            f"({LEAST_SIDE} x {LEAST_SIDE} float64)"
        )
    return n


# --- plain ----------------------------------------------------------------------------------------


def build(name: str, n: int, device: Device = "cuda", seed: int = 0) -> da.Array:
    """Build one of `plain_array.NAMES` for an array of side n.

    The result has shape (n // 2 + 1,) for ``"fft"``, else (). ``"cuda"`` needs a GPU on the client
    as well, which builds CuPy arrays and receives one.
    """
    library = client_cupy() if device == "cuda" else None
    x = plain_array.normals(n, STOCK_CHUNKS[device], seed, library)
    return cast("da.Array", plain_array.compute(name, x))


def check(name: str, result: Any, n: int) -> list[Check]:
    """Compare a result, as NumPy, with what is known of it, within six standard errors."""
    if name == "fft":
        # A row sums to N(10 n, n), and its other frequencies have exponential power of mean n.
        zero, rest = float(result[0]), float(np.mean(result[1:]))
        error = math.sqrt(4 * LOC**2 * n**2 + 2 * n)
        return [
            Check("power at frequency 0", zero, LOC**2 * n**2 + n, 6 * error),
            Check("power at other frequencies", rest, n, 6 * math.sqrt(2)),
        ]
    count = math.ceil(n / 2) ** 2
    expected, error = {
        "sum": ((LOC + STEP) * count, math.sqrt(count)),
        "mean": (LOC, 1 / n),
        "std": (1.0, math.sqrt(1 / 2) / n),
        # Off the diagonal the variance is 2, on it 4, and of the n² elements half are distinct.
        "transpose": (math.sqrt(2 + 2 / n), math.sqrt(2) / n),
        # Sum of the squares of n column sums, each N(10 n, n), over n².
        "matmul": (LOC**2 * n + 1, math.sqrt(4 * LOC**2 + 2 / n)),
        # Squared correlations with the neighbours add up to 2.44.
        "stencil": (math.sqrt(1 / 5), math.sqrt(1 / 5 * 2.44 / 2) / n),
    }[name]
    return [Check(name, result.item(), expected, 6 * error)]


def work(name: str, n: int) -> dict[str, float]:
    """Return the least that hardware has to do, by the names of `hpcdask.bench.measurement.RATES`.

    Each number is written and read; the sum reads a quarter. ``matmul`` computes a triangle.
    """
    read = 1 / 4 if name == "sum" else 1.0
    least = {"memory": (1 + read) * ITEM_NBYTES * n**2, "random": float(n**2)}
    return least | ({"matrix_float64": float(n**2 * (n + 1))} if name == "matmul" else {})


# --- the tuned sum --------------------------------------------------------------------------------


def tuned_sum(
    rows: tuple[int, ...], n_columns: int, *, device: Device = "cuda", seed: int = 0
) -> da.Array:
    """Sum ``(normal(10, 1) + 1)[::2, ::2]``, as float64 of shape (1,).

    Chunks have an even number of rows but for the last, so that ``[::2]`` picks the same rows as on
    the whole. cuRAND takes 32 bits of their seeds: 500 contain a repeated stream with probability
    3e-5.
    """
    how = {"rows": rows, "n": n_columns, "seed": seed, "device": device}
    return sum_of_chunks(_sum_of_chunk, n_chunks=len(rows), width=1, dtype="float64", **how)


def _sum_of_chunk(
    *, rows: tuple[int, ...], n: int, seed: int, device: Device, block_id: tuple[int, int]
) -> NDArray[np.float64]:
    seeds = np.random.SeedSequence(seed, spawn_key=block_id[:1])
    total_of = _sum_on_gpu if device == "cuda" else _sum_on_cpu
    return np.array([[total_of(rows[block_id[0]], n, seeds)]])


def _sum_on_cpu(height: int, n: int, seeds: np.random.SeedSequence) -> float:
    rng = np.random.Generator(np.random.SFC64(seeds))  # NumPy's fastest
    step = max(2, CPU_TILE_NBYTES // (n * ITEM_NBYTES) // 2 * 2)
    room, total = np.empty((min(step, height), n)), 0.0
    for start in range(0, height, step):
        tile = room[: height - start]
        rng.standard_normal(out=tile)
        tile += LOC
        total += float((tile[::2, ::2] + STEP).sum())
    return total


def _sum_on_gpu(height: int, n: int, seeds: np.random.SeedSequence) -> float:
    cupy = array_module("cuda")
    rng = cupy.random.Generator(getattr(cupy.random, BIT_GENERATOR)(seeds))
    step = max(2, SLAB_NBYTES // (n * ITEM_NBYTES) // 2 * 2)
    totals = []
    for start in range(0, height, step):
        z = rng.standard_normal((min(step, height - start), n), dtype=np.float64)
        # The arithmetic is elementwise, so the slice may go first: one pass over a quarter of the
        # elements. Its result is contiguous, as CuPy's fast reduction wants it; on a strided view
        # that takes a hundred times longer.
        y = _shift_kernel()(LOC, STEP, z[::2, ::2])
        totals.append(y.sum())
        del y, z
    return float(cupy.stack(totals).sum())


@functools.cache
def _shift_kernel() -> Any:
    return array_module("cuda").ElementwiseKernel(
        "float64 loc, float64 step, float64 z", "float64 y", "y = (loc + z) + step", "hpcdask_shift"
    )
