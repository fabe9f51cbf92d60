"""Singular value decompositions of a tall matrix, in plain dask.array: copy what you need.

`approximate` finds the largest singular values of a matrix too large to decompose, as the Dask blog
does in May 2020 (https://blog.dask.org/2020/05/13/large-svds); `exact` finds all of a narrow one.
"""

from typing import Any, cast

import dask.array as da
import numpy as np

Triplets = tuple[da.Array, da.Array, da.Array]


def approximate(x: da.Array, k: int, seed: int | None = None, library: Any = np) -> Triplets:
    """Return the k largest singular triplets of a matrix in chunks of NumPy, or of CuPy.

    The random range finder needs some 20 rows and columns more than the result has, and lies on the
    devices that the chunks are on.
    """
    numbers = da.random.RandomState(seed, RandomState=library.random.RandomState)
    return cast("Triplets", da.linalg.svd_compressed(x, k, seed=numbers))


def exact(x: da.Array) -> Triplets:
    """Return all singular triplets of a matrix in chunks of rows, by a tall-and-skinny QR."""
    return cast("Triplets", da.linalg.svd(x))


def random_matrix(n_rows: int, n_columns: int, rows: int, library: Any = np) -> da.Array:
    """Return uniform float64 numbers in chunks of so many rows."""
    rs = da.random.RandomState(0, RandomState=library.random.RandomState)
    return cast("da.Array", rs.random_sample((n_rows, n_columns), chunks=(rows, -1)))
