"""Singular value decompositions of matrices cut into row chunks.

The reference is ten singular triplets of 200 GB of uint8, from the Dask blog of May 2020
(https://blog.dask.org/2020/05/13/large-svds), with ``dask.array.linalg.svd_compressed``: that is
`stock`, and `svd_rows` is the tuned form. All triplets, to rounding, are ``dask.array.linalg.svd``.

Notes
-----
The method of `svd_rows` is the randomised range finder of Halko, Martinsson and Tropp, SIAM Review
53 (2011), 217-288: with random orthonormal columns Ω, k + oversample of them, Y = AΩ, Q an
orthonormal basis of Y, B = QᵀA, and the SVD of the small B.

As in the CholeskyQR family (Yamamoto, Nakatsukasa, Yanagisawa, Fukaya, ETNA 44 (2015), 306-326) Q
comes from the Gram matrix G = YᵀY: Q = YT with TᵀGT = 1, and B = TᵀZᵀ with Z = AᵀY. Both sums,
G and Z, come from one reading of A and one Dask task per chunk. So A may be a stream; the error is
eps (σ₁/σₖ)²: in float64, singular values down to 1e-6 σ₁ are resolved.

T comes from the eigenvectors of G scaled to unit diagonal rather than from a Cholesky factor,
because they tell how well G is conditioned, and leave what can be resolved. Z is also what a power
iteration needs next: Ω ← orth(Z), one more pass for each.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import dask.array as da
import numpy as np
from numpy.typing import DTypeLike, NDArray

from hpcdask.workloads import (
    SLABS_PER_SLOT,
    Device,
    WorkloadError,
    array_module,
    check_dask,
    check_device,
    check_sizes,
    check_unmasked,
    check_whole,
    client_cupy,
    packing,
    run_bench,
    slab_rows,
    to_host,
)

ASPECT = 500  # rows per column of the reference matrix
ALIGNED_COLUMNS = 32
STOCK_CHUNKS = (20_000, 5_000)
MAX_CHUNK_NBYTES: dict[Device, int] = {"cuda": 4_000_000_000, "cpu": 128_000_000}
#: A GPU multiplies 4 GB of bytes in the time of ten Dask tasks: little data is in few chunks.
CHUNKS_PER_SLOT: dict[Device, int] = {"cuda": 1, "cpu": SLABS_PER_SLOT}
# Of the floats that a tile of rows becomes: bounds the scratch memory, and keeps a CPU in its cache
TILE_NBYTES: dict[Device, int] = {"cuda": 1 << 30, "cpu": 1 << 22}
MIN_TILE_ROWS = 64  # each tile updates n x l sums, which takes as long as reading about l rows
SPLIT_EVERY = 8  # of partial sums, (n + l) x l float64: 3.2 MB at the reference size
# Chunks of packed rows do not fit those of a basis; NumPy's meta also where chunks are on GPUs
FREE_FORM: dict[str, Any] = {"align_arrays": False, "dtype": np.float64, "meta": np.empty((0, 0))}

Floats = NDArray[np.floating[Any]]
Prepare = Callable[[Any], Any]


def shape_for(nbytes: int) -> tuple[int, int]:
    """Return the shape of a uint8 matrix within ``nbytes`` bytes, some 500 times taller than wide.

    Wide rows are a multiple of 32, so that each begins where a GPU likes to read.
    """
    n = math.isqrt(max(nbytes, 0) // ASPECT)
    if n < 1:
        raise WorkloadError(f"size {nbytes} B is too small: the least is {ASPECT} B, one column")
    n = n // ALIGNED_COLUMNS * ALIGNED_COLUMNS or n
    return nbytes // n // ASPECT * ASPECT, n


def chunk_rows(
    shape: tuple[int, int], *, device: Device, n_slots: int, max_nbytes: int | None = None
) -> tuple[int, ...]:
    """Choose row chunks of full width (by default at most 4 GB on GPUs, 128 MB on CPUs)."""
    return slab_rows(
        *shape,
        n_slots=n_slots,
        max_nbytes=MAX_CHUNK_NBYTES[device] if max_nbytes is None else max_nbytes,
        per_slot=CHUNKS_PER_SLOT[device],
    )


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


def svd_rows(
    x: da.Array,
    k: int,
    *,
    oversample: int = 10,
    n_power_iter: int = 0,
    prepare: Prepare | None = None,
    packed_columns: int | None = None,
    dtype: DTypeLike = np.float64,
    seed: int = 0,
    device: Device = "cuda",
) -> tuple[da.Array, da.Array, da.Array]:
    """Compute a truncated SVD of a matrix cut into row chunks of full width.

    Parameters
    ----------
    x
        Shape (m, n), real, chunks ``(rows, n)`` of CuPy (``device="cuda"``) or NumPy arrays. Each
        power iteration reads it once more: persist it then, unless it is cheap to make again.
    k, oversample
        Number of singular triplets, at most ``min(m, n)``, and additional columns of the range
        finder, for values that decrease slowly. Beyond half of the columns, all are used.
    n_power_iter
        Additional passes, for values such as 1/i. Where they hardly decrease, as those of random
        numbers, all stay some percent too low: take ``dask.array.linalg.svd``.
    prepare
        Turns a tile of rows of ``x`` into floats of the same shape, row by row, whenever it is
        read. It has to be picklable, and must not write into the tile.
    packed_columns
        ``x`` is uint8, (m, ceil(n / 4)): so many columns of `hpcdask.workloads.packing.pack`.
    dtype
        In which chunks are multiplied; sums are float64. float32 resolves only σₖ > 0.02 σ₁, less
        with more than 60 columns of the range finder. On an H200 it takes two thirds of the time,
        and of packed values, which tensor cores multiply as float16, a third.
    seed, device
        Of the range finder; what the chunks of ``x`` are on.

    Returns
    -------
    u, s, v : dask.array.Array
        Shapes (m, k), (k,), (k, n), float64, NumPy; zero past the resolved rank. No row of ``v``
        has a negative sum. One Dask task per chunk and pass; ``u`` reads ``x`` another time.

    Raises
    ------
    WorkloadError
        Wrong arguments, before anything is computed; NaN, infinity, masks or overflow, later.
    """
    check_device(device)
    n, m, work = _check_matrix(x, packed_columns), x.shape[0], np.dtype(dtype)
    _check_numbers(m, n, work, k=k, oversample=oversample, n_power_iter=n_power_iter, seed=seed)
    rows = Rows(n, work.name, device, prepare, packed_columns is not None)
    how: dict[str, Any] = {"rows": rows, "width": _width(k + oversample, m, n), "seed": seed}
    basis: tuple[Any, ...] = ()
    for _ in range(n_power_iter):
        basis = _small(_orthonormal, (n, how["width"]), _sums(x, basis, how), n=n, m=m), "nl"
    found = _small(_solve, (2 * n + 1, k), _sums(x, basis, how), *basis[:1], k=k, **how)
    u = da.blockwise(_left, "ik", x, "in", found, "nk", rows=rows, **FREE_FORM)
    return u, found[-1], found[n:-1].T


def _sums(x: da.Array, basis: tuple[Any, ...], how: dict[str, Any]) -> da.Array:
    """Add up what `_products` makes of each chunk, in a tree: Z above G, as one block."""
    n, width = how["rows"].n, how["width"]
    # All indices are in the result, or dask would not fuse this with what makes x
    sizes = {"new_axes": {} if basis else {"l": width}, "adjust_chunks": {"i": 1, "n": n + width}}
    products = da.blockwise(_products, "inl", x, "in", *basis, **sizes, **how, **FREE_FORM)
    return cast("da.Array", products.sum(axis=0, split_every=SPLIT_EVERY))


def _small(
    function: Callable[..., Any], shape: tuple[int, int], *blocks: da.Array, **how: Any
) -> da.Array:
    """Return what a function makes of arrays of one block, as one block of this shape."""
    pairs = [part for block in blocks for part in (block, "ab")]
    how |= FREE_FORM | {"adjust_chunks": {"a": shape[0], "b": shape[1]}}
    return cast("da.Array", da.blockwise(function, "ab", *pairs, **how))


def _width(wanted: int, m: int, n: int) -> int:
    """Return the number of random directions: not about as many as rows or columns.

    A random matrix that is nearly square is badly conditioned, and one pass has that squared.
    """
    side = min(m, n)
    return min(n, wanted if 2 * wanted <= side else max(wanted, 2 * side))


def _check_numbers(m: int, n: int, work: np.dtype[Any], **numbers: int) -> None:
    if work.name not in ("float32", "float64"):
        raise WorkloadError(f"dtype {work} is not accepted: float32 or float64")
    for name, value in numbers.items():
        check_whole(name, value)
    if not 1 <= numbers["k"] <= min(m, n):
        raise WorkloadError(
            f"k={numbers['k']} is out of range: a {m} x {n} matrix has {min(m, n)} singular values"
        )


def _check_matrix(x: da.Array, packed_columns: int | None) -> int:
    check_dask(x)
    if x.ndim != 2:
        raise WorkloadError(f"x has {x.ndim} dimensions; an SVD wants a matrix")
    check_sizes(x)
    if x.dtype.kind not in "buif":
        raise WorkloadError(f"x is {x.dtype}; integers, booleans and real floats are accepted")
    if min(x.shape) < 1:
        raise WorkloadError(f"a matrix of {x.shape[0]} x {x.shape[1]} has no singular values")
    if x.numblocks[1] != 1:
        raise WorkloadError(
            f"the columns of x are split into {x.numblocks[1]} chunks; they have to be of full "
            "width: x = x.rechunk({1: -1})"
        )
    if packed_columns is None:
        return cast("int", x.shape[1])
    check_whole("packed_columns", packed_columns)
    n_bytes = packing.n_bytes(packed_columns)
    if x.dtype != np.uint8 or packed_columns < 1 or x.shape[1] != n_bytes:
        raise WorkloadError(
            f"{packed_columns} packed columns are {n_bytes} columns of uint8; x is {x.shape[1]} of "
            f"{x.dtype}"
        )
    return packed_columns


# --- the chunks -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rows:
    """Conversion of the chunks of ``n`` columns on a device to floats.

    They are multiplied in the float type ``work``; ``prepare`` is applied to each tile of rows;
    ``packed`` chunks are 2-bit values, four in a byte.
    """

    n: int
    work: str
    device: Device
    prepare: Prepare | None
    packed: bool

    @property
    def as_float16(self) -> bool:
        """Return whether tensor cores multiply tiles: float16 holds packed values exactly."""
        on_gpu = self.device == "cuda" and self.prepare is None
        return on_gpu and self.packed and self.work == "float32"

    def tiles(self, block: Any, dtype: str) -> Iterator[Any]:
        """Yield some rows after the other as floats; each is gone when the next is asked for."""
        xp = array_module(self.device)
        step = max(MIN_TILE_ROWS, TILE_NBYTES[self.device] // (self.n * np.dtype(dtype).itemsize))
        # Made once: workers give freed memory back, and fresh pages cost more than the products.
        as_it_is = block.dtype == dtype and not self.packed and self.prepare is None
        words = self.device == "cuda" and block.dtype == np.uint8 and self.n % 4 == 0
        words = words and block.data.ptr % 4 == 0
        room = xp.empty((0 if as_it_is else min(step, block.shape[0]), self.n), dtype)
        for start in range(0, block.shape[0], step):
            tile = block[start : start + step]
            floats = room[: tile.shape[0]]
            if self.prepare is not None:
                if self.packed:
                    tile = packing.unpack(tile, self.n)
                floats[...] = self._prepared(tile)
            elif self.packed:
                packing.unpack(tile, self.n, out=floats)
            elif words:
                packing.spread(xp.ascontiguousarray(tile).view(np.uint32), 8, floats)
            elif not as_it_is:
                floats[...] = tile
            yield tile if as_it_is else floats

    def _prepared(self, tile: Any) -> Any:
        shape = tile.shape
        if isinstance(tile, np.ndarray):  # else it could rewrite the chunk; CuPy cannot say so
            tile.flags.writeable = False
        tile = cast("Prepare", self.prepare)(tile)
        dtype = getattr(tile, "dtype", None)
        if dtype is None or tile.shape != shape or dtype.kind not in "buif":
            found = type(tile).__name__ if dtype is None else f"{dtype} of shape {tile.shape}"
            raise WorkloadError(f"prepare returned {found}: it has to be real, of shape {shape}")
        check_unmasked(tile)
        return tile


def _products(
    block: Any, basis: Any = None, *, rows: Rows, width: int, seed: int
) -> NDArray[np.float64]:
    """Return Z = AᵀY of a chunk A, and G = YᵀY below it, as (1, n + width, width)."""
    _check_chunk(block, rows.device)
    xp = array_module(rows.device)
    right = _basis(basis, rows, width, seed)
    l = right.shape[1]  # noqa: E741
    zt, gram = xp.zeros((l, rows.n)), xp.zeros((l, l))
    part = xp.empty((l, rows.n), rows.work)
    with np.errstate(invalid="ignore", over="ignore"):  # what is not finite gets an error below
        for tile in rows.tiles(block, "float16" if rows.as_float16 else rows.work):
            if rows.as_float16:
                y = packing.multiply_float16(tile, right)
                zt += packing.multiply_float16(tile, y, transposed=True).T
            else:
                y = tile @ right
                xp.matmul(y.T, tile, out=part)  # on a CPU, tile.T @ y takes twice as long
                zt += part
            y = y.astype(np.float64, copy=False)
            gram += y.T @ y
    sums: NDArray[np.float64] = xp.concatenate([zt.T, gram])[None]
    if not bool(xp.isfinite(sums).all()):
        raise WorkloadError(
            f"x has values that are not finite, or its products overflow in {rows.work}: "
            "da.isfinite(x).all().compute() tells which; replace them, or scale x"
        )
    return sums


def _check_chunk(block: Any, device: Device) -> None:
    check_unmasked(block)
    library = array_module(device)
    if not isinstance(block, library.ndarray):
        raise WorkloadError(
            f'a chunk is {type(block).__name__}, and device="{device}" is for arrays of '
            f"{library.__name__}: another device, or x = x.map_blocks({library.__name__}.asarray)"
        )


def _basis(basis: Any, rows: Rows, width: int, seed: int) -> Any:
    """Return the basis of a power iteration on the device, or else the random one."""
    if basis is None:
        return _omega(rows.n, width, seed, rows.work, rows.device)
    return array_module(rows.device).asarray(basis, rows.work)


@functools.lru_cache(maxsize=4)
def _omega(n: int, width: int, seed: int, work: str, device: Device) -> Any:
    # Drawn on the host: the same on every worker, and nothing to send with the graph
    omega = np.linalg.qr(np.random.default_rng(seed).standard_normal((n, width)))[0]
    return array_module(device).asarray(omega, work)


def _left(blocks: list[Any], found: list[Any], *, rows: Rows) -> Floats:
    """Return left singular vectors of a chunk."""
    (block,), xp = blocks, array_module(rows.device)
    _check_chunk(block, rows.device)
    right = xp.asarray(found[0][: rows.n])
    # In float64: what undoes the scale of Ω has opposite signs, which cancel
    parts = [tile @ right for tile in rows.tiles(block, "float64")]
    return to_host(xp.concatenate(parts)) if parts else np.empty((0, right.shape[1]))


# --- the small matrices, on the host of one worker ------------------------------------------------


def _orthonormal(sums: Any, *, n: int, m: int) -> Floats:
    """Return the basis of the next power iteration."""
    z = to_host(sums)[:n]
    # What is past the rank of A is rounding, and must not be taken for its range
    return cast("Floats", np.linalg.svd(z, full_matrices=False)[0][:, :m])


def _solve(
    sums: Any, basis: Any = None, *, k: int, rows: Rows, width: int, seed: int
) -> NDArray[np.float64]:
    """Decompose the small matrix B: return what makes u of A (n, k), vᵀ (n, k) and s (1, k).

    The signs are those of which no row of v has a negative sum. Zeros are past the rank.
    """
    n, sums = rows.n, to_host(sums)
    whiten = _whiten(sums[n:], rows.work)
    turn, s, v = np.linalg.svd((sums[:n] @ whiten).T, full_matrices=False)
    right = _basis(basis, replace(rows, device="cpu"), width, seed) @ (whiten @ turn)
    sign = np.where(v.sum(axis=1) < 0, -1.0, 1.0)
    out = np.zeros((2 * n + 1, k))
    rank = min(k, len(s))
    out[:, :rank] = np.concatenate([right * sign, v.T * sign, s[None]])[:, :rank]
    return out


def _whiten(gram: Floats, work: str) -> Floats:
    """Return T with TᵀGT = 1 on what is above rounding."""
    norms = np.sqrt(np.diag(gram))
    # What lies below is rounding of the products, not part of the range of A: a column that Ω has
    # outside the rows' space of A, or a direction in which the columns of Y depend on each other.
    noise = 64 * len(gram) * np.finfo(work).eps
    scale = np.divide(1, norms, where=norms > noise * norms.max(), out=np.zeros_like(norms))
    values, vectors = np.linalg.eigh(gram * scale * scale[:, None])
    keep = values > max(noise * values[-1], np.finfo(np.float64).tiny)
    return cast("Floats", vectors[:, keep] / np.sqrt(values[keep]) * scale[:, None])


if __name__ == "__main__":
    run_bench("svd")
