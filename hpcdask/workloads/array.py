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

All of them are plain dask.array, in chunks that the Dask blog or dask itself chooses: the ``stock``
form. The sum also has a ``tuned`` form, with the same answer and as many random numbers: one Dask
task makes a chunk of full rows and reduces it, tile by tile while it is in the cache of a CPU.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, cast

import dask.array as da
import numpy as np
from numpy.typing import NDArray

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
    sum_of_chunks,
)

#: The patterns, which are all but the sum.
NAMES = ("mean", "std", "transpose", "matmul", "fft", "stencil")
LOC, STEP = 10.0, 1.0
ITEM_NBYTES = 8
#: Chunks of the blog for the sum, and the largest ones of its tuned form.
STOCK_SUM_CHUNK = 10_000
MAX_SUM_CHUNK_NBYTES: dict[Device, int] = {"cuda": 64_000_000_000, "cpu": 128_000_000}
#: Below this the checks, which rest on large numbers, say nothing.
LEAST_SIDE = 16
#: Chunks of the blog on GPUs; what ``da.random`` chooses without them.
STOCK_CHUNKS: dict[Device, int | str] = {"cuda": 10_000, "cpu": "auto"}
# On an H200, 5e8 float64 normals take 2.6 ms with XORWOW and 3.3 ms with Philox, and setting up a
# generator, which every chunk has of its own, 0.6 and 0.2 ms. Any name of cupy.random will do.
BIT_GENERATOR = "XORWOW"
# The CPU fills and reduces a tile while it is in the cache.
CPU_TILE_NBYTES = 1 << 20
# A GPU sums a chunk slab by slab, in the same memory, and is told what to do next while it works.
SLAB_NBYTES = 4_000_000_000


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
    return sum_of_chunks(_sum_of_chunk, n_chunks=len(rows), width=2, dtype="float64", **how)


def _sum_of_chunk(
    *, rows: tuple[int, ...], n: int, seed: int, device: Device, block_id: tuple[int, int]
) -> NDArray[np.float64]:
    height = rows[block_id[0]]
    seeds = np.random.SeedSequence(seed, spawn_key=block_id[:1])
    total_of = _sum_on_gpu if device == "cuda" else _sum_on_cpu
    return np.array([[total_of(height, n, seeds), -(-height // 2) * -(-n // 2)]])


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


def build(name: str, n: int, device: Device = "cuda", seed: int = 0) -> da.Array:
    """Build one of ``NAMES`` for an array of side n, at least ``LEAST_SIDE``, as a float64 array.

    Its shape is (n // 2 + 1,) for ``"fft"``, else (). ``"cuda"`` needs a GPU on the client as well,
    which builds CuPy arrays and receives one.
    """
    _validate(name, n)
    check_whole("seed", seed)
    check_device(device)
    if device == "cuda":
        # CuPy's Generator has no `normal`, so this is what one can write.
        rng: Any = da.random.RandomState(seed, RandomState=client_cupy().random.RandomState)
    else:
        rng = da.random.default_rng(seed)
    x = rng.normal(LOC, 1.0, size=(n, n), chunks=STOCK_CHUNKS[device])
    patterns: dict[str, Callable[[], Any]] = {
        "mean": lambda: x.mean(),
        "std": lambda: x.std(),
        "transpose": lambda: (x + x.T).std(),
        "matmul": lambda: (x @ x.T).mean(),
        "fft": lambda: (abs(da.fft.rfft(x.rechunk({1: -1}))) ** 2).mean(axis=0),
        "stencil": lambda: x.map_overlap(_average, depth=1, boundary="periodic").std(),
    }
    return cast("da.Array", patterns[name]())


def _average(x: Any) -> Any:
    """Average inner elements with their four neighbours."""
    y = x.copy()
    y[1:-1, 1:-1] = (x[1:-1, 1:-1] + x[:-2, 1:-1] + x[2:, 1:-1] + x[1:-1, :-2] + x[1:-1, 2:]) / 5
    return y


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


if __name__ == "__main__":
    run_bench("array")
