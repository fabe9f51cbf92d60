"""Computations on a square array of random numbers, in plain dask.array: copy what you need.

The sum first appeared in the Dask blog in January 2019
(https://blog.dask.org/2019/01/03/dask-array-gpus-first-steps), on 2 TB of float64.

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
"""

from typing import Any

import dask.array as da

NAMES = ("sum", "mean", "std", "transpose", "matmul", "fft", "stencil")


def normals(n: int, chunks: int | str, seed: int | None = None, library: Any = None) -> da.Array:
    """Return n x n float64 numbers of mean 10 and deviation 1, by NumPy, or CuPy as `library`."""
    if library is None:
        rng: Any = da.random.default_rng(seed)
    else:  # CuPy's Generator has no `normal`
        rng = da.random.RandomState(seed, RandomState=library.random.RandomState)
    x: da.Array = rng.normal(10.0, 1.0, size=(n, n), chunks=chunks)
    return x


def compute(name: str, x: da.Array) -> Any:
    """Return the result of a computation, as a lazy array."""
    match name:
        case "sum":
            return (x + 1)[::2, ::2].sum()
        case "mean":
            return x.mean()
        case "std":
            return x.std()
        case "transpose":
            return (x + x.T).std()
        case "matmul":
            return (x @ x.T).mean()
        case "fft":
            return (abs(da.fft.rfft(x.rechunk({1: -1}))) ** 2).mean(axis=0)
    return x.map_overlap(average, depth=1, boundary="periodic").std()


def average(x: Any) -> Any:
    """Average inner elements with their four neighbours."""
    y = x.copy()
    y[1:-1, 1:-1] = (x[1:-1, 1:-1] + x[:-2, 1:-1] + x[2:, 1:-1] + x[1:-1, :-2] + x[1:-1, 2:]) / 5
    return y
