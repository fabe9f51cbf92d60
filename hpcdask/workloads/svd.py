"""Singular value decompositions of matrices cut into row chunks.

The reference is ten singular triplets of 200 GB of uint8, from the Dask blog of May 2020
(https://blog.dask.org/2020/05/13/large-svds), with ``dask.array.linalg.svd_compressed``: that is
`stock`, and `svd_rows` is the tuned form. `svd_exact` is that of ``dask.array.linalg.svd``.

Notes
-----
The method of `svd_rows` is the randomised range finder of Halko, Martinsson and Tropp, SIAM Review
53 (2011), 217-288: with a random Ω of k + oversample columns, Y = AΩ, Q an orthonormal basis of Y,
B = QᵀA, and the SVD of the small B. `svd_exact` is the same with Ω = 1.

As in the CholeskyQR family (Yamamoto, Nakatsukasa, Yanagisawa, Fukaya, ETNA 44 (2015), 306-326) Q
comes from the Gram matrix G = YᵀY: Q = YT with TᵀGT = 1, and B = TᵀZᵀ with Z = AᵀY. Both sums,
G and Z, come from one reading of A and one Dask task per chunk.

- One pass (streaming): the error is eps (σ₁/σₖ)². In float64, singular values down to 1e-6 σ₁ are
  resolved.
- Two passes: the second has the basis ΩT instead of Ω, which repairs what rounding left of the
  orthogonality of Q (CholeskyQR2). Where G is ill-conditioned, the second pass takes Householder
  QRs of the chunks of Y instead, and the QR of their stacked triangles (Demmel, Grigori, Hoemmen,
  Langou, SIAM J. Sci. Comput. 34 (2012), A206-A239). Which of the two it is, the first pass tells,
  on the workers. Either way the error is eps σ₁.

T comes from the eigenvectors of G scaled to unit diagonal rather than from a Cholesky factor,
because they tell how well G is conditioned, and of one pass leave what can be resolved.

Z is also what a power iteration needs next: Ω ← orth(Z), one more pass for each.
"""

from __future__ import annotations

import math
from typing import Any, Literal, cast

import dask.array as da
import numpy as np
from numpy.typing import DTypeLike

from hpcdask.workloads import (
    SLABS_PER_SLOT,
    Device,
    WorkloadError,
    check_dask,
    check_device,
    check_sizes,
    check_whole,
    client_cupy,
    run_bench,
    slab_rows,
)
from hpcdask.workloads.svd_graph import decompose
from hpcdask.workloads.tall import Prepare, Rows

ASPECT = 500  # rows per column of the reference matrix
ALIGNED_COLUMNS = 32
EXACT_COLUMNS = 20
STOCK_CHUNKS = (20_000, 5_000)
MAX_CHUNK_NBYTES: dict[Device, int] = {"cuda": 4_000_000_000, "cpu": 128_000_000}
#: A GPU multiplies 4 GB of bytes in the time of ten Dask tasks: little data is in few chunks.
CHUNKS_PER_SLOT: dict[Device, int] = {"cuda": 1, "cpu": SLABS_PER_SLOT}


def shape_for(nbytes: int) -> tuple[int, int]:
    """Return the shape of a uint8 matrix within ``nbytes`` bytes, some 500 times taller than wide.

    Wide rows are a multiple of 32, so that each begins where a GPU likes to read.
    """
    n = math.isqrt(max(nbytes, 0) // ASPECT)
    if n < 1:
        raise WorkloadError(f"size {nbytes} B is too small: the least is {ASPECT} B, one column")
    n = n // ALIGNED_COLUMNS * ALIGNED_COLUMNS or n
    return nbytes // n // ASPECT * ASPECT, n


def exact_shape_for(nbytes: int) -> tuple[int, int]:
    """Return the shape of a tall float64 matrix of 20 columns within ``nbytes`` bytes."""
    m = nbytes // (8 * EXACT_COLUMNS)
    if m < EXACT_COLUMNS:
        raise WorkloadError(
            f"size {nbytes} B is too small: the least is {8 * EXACT_COLUMNS**2} B, "
            f"{EXACT_COLUMNS} x {EXACT_COLUMNS} float64"
        )
    return m, EXACT_COLUMNS


def chunk_rows(
    shape: tuple[int, int],
    *,
    device: Device,
    n_slots: int,
    itemsize: int = 1,
    max_nbytes: int | None = None,
) -> tuple[int, ...]:
    """Choose row chunks of full width (by default at most 4 GB on GPUs, 128 MB on CPUs)."""
    limit = MAX_CHUNK_NBYTES[device] if max_nbytes is None else max_nbytes
    return slab_rows(
        shape[0],
        shape[1] * itemsize,
        n_slots=n_slots,
        max_nbytes=limit,
        per_slot=CHUNKS_PER_SLOT[device],
    )


def svd_rows(
    x: da.Array,
    k: int,
    *,
    oversample: int = 10,
    n_power_iter: int = 0,
    passes: Literal[1, 2] = 1,
    prepare: Prepare | None = None,
    packed_columns: int | None = None,
    dtype: DTypeLike = np.float64,
    seed: int = 0,
    device: Device = "cuda",
) -> tuple[da.Array, da.Array, da.Array]:
    """Truncated SVD of a matrix cut into row chunks of full width.

    Parameters
    ----------
    x
        Shape (m, n), real, chunks ``(rows, n)`` of CuPy (``device="cuda"``) or NumPy arrays. Each
        pass reads it once: persist it unless it is cheap to make again. Tall is fast; wide works.
    k, oversample
        Number of singular triplets, at most ``min(m, n)``, and additional columns of the range
        finder, for values that decrease slowly. Beyond half of the columns, all are used.
    n_power_iter
        Additional passes, for values such as 1/i. Where they hardly decrease, as those of random
        numbers, all stay some percent too low: take `svd_exact`.
    passes
        1 reads ``x`` once for ``s`` and ``v``, so it may be a stream that would not fit in memory,
        and resolves values down to 1e-6 σ₁; 2 resolves them down to eps σ₁.
    prepare
        Turns a tile of rows of ``x`` into floats of the same shape, row by row, whenever it is
        read. It has to be picklable, and must not write into the tile.
    packed_columns
        ``x`` is uint8, (m, ceil(n / 4)): so many columns of `hpcdask.workloads.packing.pack`.
    dtype
        In which chunks are multiplied; sums are float64. float32 resolves only σₖ > 0.02 σ₁, less
        with more than 60 columns of the range finder, and is no faster on GPUs made for HPC.
    seed, device
        Of the range finder; what the chunks of ``x`` are on.

    Returns
    -------
    u, s, v : dask.array.Array
        Shapes (m, k), (k,), (k, n), float64, NumPy. No row of ``v`` has a negative sum. With one
        pass, they are zero past the resolved rank. One Dask task per chunk and pass; ``u`` reads
        ``x`` another time.

    Raises
    ------
    WorkloadError
        Wrong arguments, before anything is computed; NaN, infinity, masks or overflow, later.
    """
    check_device(device)
    n = _check_matrix(x) if packed_columns is None else _check_packed(x, packed_columns)
    m, work = x.shape[0], np.dtype(dtype)
    _check_numbers((m, n), (k, oversample, n_power_iter, seed), passes, work)
    rows = Rows(n, work.name, device, prepare, packed_columns is not None)
    width = _width(k + oversample, m, n)
    drawn = seed if width < n else None  # all columns need no random directions
    return decompose(x, rows, k, width, drawn, n_power_iter=n_power_iter, passes=passes)


def _check_numbers(
    shape: tuple[int, int], whole: tuple[int, ...], passes: int, work: np.dtype[Any]
) -> None:
    for name, value in zip(("k", "oversample", "n_power_iter", "seed"), whole, strict=True):
        check_whole(name, value)
    k, side = whole[0], min(shape)
    if not 1 <= k <= side:
        raise WorkloadError(
            f"k={k} is out of range: a {shape[0]} x {shape[1]} matrix has {side} singular values, "
            f"so k is 1 to {side}"
        )
    if passes not in (1, 2):
        raise WorkloadError(f"passes={passes} is not accepted: 1 or 2")
    if work not in (np.dtype(np.float32), np.dtype(np.float64)):
        raise WorkloadError(f"dtype {work} is not accepted: float32 or float64")


def _width(wanted: int, m: int, n: int) -> int:
    """Random directions: not about as many as rows or columns.

    A random matrix that is nearly square is badly conditioned, and one pass has that squared.
    """
    side = min(m, n)
    return min(n, wanted if 2 * wanted <= side else max(wanted, 2 * side))


def svd_exact(x: da.Array, *, device: Device = "cuda") -> tuple[da.Array, da.Array, da.Array]:
    """All singular triplets of a tall matrix cut into rows, or a wide one cut into columns.

    Parameters
    ----------
    x
        Shape (m, n), real; chunks of full width if it is tall, of full height if it is wide. It
        is read twice for ``s`` and the short side's vectors, and once more for the long side's.
    device
        What the chunks of ``x`` are on.

    Returns
    -------
    u, s, v : dask.array.Array
        Shapes (m, r), (r,), (r, n) with r = min(m, n), float64, NumPy, in the conventions and signs
        of ``dask.array.linalg.svd``. The error of ``s`` is of the order of eps σ₁, and ``u`` and
        ``v`` are orthonormal to eps, for any condition number and rank.

    Raises
    ------
    WorkloadError
        Not a matrix, not real, unknown chunk sizes, a short side that is split, before anything
        is computed; NaN or infinite values, in the first pass.
    """
    check_device(device)
    check_dask(x)
    if x.ndim == 2 and x.shape[0] < x.shape[1]:
        _check_matrix(x, axis=0)
        v, s, u = _exact(x.T, device, sign_of_left=True)
        return u.T, s, v.T
    _check_matrix(x)
    return _exact(x, device, sign_of_left=False)


def _exact(
    x: da.Array, device: Device, *, sign_of_left: bool
) -> tuple[da.Array, da.Array, da.Array]:
    n = x.shape[1]
    rows = Rows(n, "float64", device)
    return decompose(x, rows, n, n, None, passes=2, sign_of_left=sign_of_left)


def _check_matrix(x: da.Array, axis: int = 1) -> int:
    check_dask(x)
    if x.ndim != 2:
        raise WorkloadError(f"x has {x.ndim} dimensions; an SVD wants a matrix")
    check_sizes(x)
    if x.dtype.kind not in "buif":
        raise WorkloadError(f"x is {x.dtype}; integers, booleans and real floats are accepted")
    if min(x.shape) < 1:
        raise WorkloadError(f"a matrix of {x.shape[0]} x {x.shape[1]} has no singular values")
    if len(x.chunks[axis]) != 1:
        sides = ("rows", "columns", "height", "width")
        raise WorkloadError(
            f"the {sides[axis]} of x are split into {len(x.chunks[axis])} chunks; "
            f"they have to be of full {sides[axis + 2]}: x = x.rechunk({{{axis}: -1}})"
        )
    return cast("int", x.shape[1])


def _check_packed(x: da.Array, n: int) -> int:
    _check_matrix(x)
    check_whole("packed_columns", n)
    if x.dtype != np.uint8 or n < 1 or x.shape[1] != -(-n // 4):
        raise WorkloadError(
            f"{n} packed columns are {-(-n // 4)} columns of uint8; x is {x.shape[1]} of {x.dtype}"
        )
    return n


def stock(x: da.Array, k: int, *, device: Device = "cuda") -> tuple[da.Array, da.Array, da.Array]:
    """Return ``dask.array.linalg.svd_compressed(x, k)``, as in the blog.

    ``"cuda"`` needs a GPU on the client as well, and returns CuPy arrays.
    """
    check_device(device)
    check_dask(x)
    check_whole("k", k)
    if not 1 <= k <= min(x.shape):
        raise WorkloadError(f"k={k} is out of range: 1 to {min(x.shape)}")
    seed = None
    if device == "cuda":
        seed = da.random.RandomState(RandomState=client_cupy().random.RandomState)
    return cast("tuple[da.Array, da.Array, da.Array]", da.linalg.svd_compressed(x, k, seed=seed))


if __name__ == "__main__":
    run_bench("svd")
