"""Singular value decompositions of matrices cut into row chunks, and a matrix to check them with.

`plain_svd.approximate` is the plain form, and `svd_rows` the tuned one: the randomised range finder
of Halko, Martinsson and Tropp, SIAM Review 53 (2011), 217-288: with random orthonormal columns Ω,
k + oversample of them, Y = AΩ, Q an orthonormal basis of Y, B = QᵀA, and the SVD of the small B.

As in the CholeskyQR family (Yamamoto, Nakatsukasa, Yanagisawa, Fukaya, ETNA 44 (2015), 306-326) Q
comes from the Gram matrix G = YᵀY: Q = YT with TᵀGT = 1, and B = TᵀZᵀ with Z = AᵀY. Both sums,
G and Z, come from one reading of A and one Dask task per chunk. So A may be a stream; the error is
eps (σ₁/σₖ)²: in float64, singular values down to 1e-6 σ₁ are resolved.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import dask.array as da
import numpy as np
from numpy.typing import DTypeLike, NDArray

from hpcdask.workloads import (
    SLABS_PER_SLOT,
    Check,
    Device,
    WorkloadError,
    array_module,
    check_dask,
    check_device,
    check_unmasked,
    packing,
    to_host,
)

ASPECT = 500  # rows per column of the reference matrix
ALIGNED_COLUMNS = 32
#: Of each check: what is computed in float32 passes too.
TOLERANCE = 1e-3
STOCK_CHUNKS = (20_000, 5_000)
MAX_CHUNK_NBYTES: dict[Device, int] = {"cuda": 4_000_000_000, "cpu": 128_000_000}
#: A GPU multiplies 4 GB in the time of ten Dask tasks: little data is in few chunks.
CHUNKS_PER_SLOT: dict[Device, int] = {"cuda": 1, "cpu": SLABS_PER_SLOT}
# Of the floats that a tile of rows becomes: bounds the scratch memory, and keeps a CPU in its cache
TILE_NBYTES: dict[Device, int] = {"cuda": 1 << 30, "cpu": 1 << 22}
MIN_TILE_ROWS = 64  # each tile updates n x l sums, which takes as long as reading about l rows
ROUNDING = 1e-3  # sum of a unit vector that is 0 but for rounding
SPLIT_EVERY = 8  # of partial sums, (n + l) x l float64: 3.2 MB at the reference size
# Chunks of packed rows do not fit those of a result; NumPy's meta also where chunks are on GPUs
FREE_FORM: dict[str, Any] = {"align_arrays": False, "dtype": np.float64, "meta": np.empty((0, 0))}

Floats = NDArray[np.floating[Any]]
Prepare = Callable[[Any], Any]


# --- a matrix of known singular values -----------------------------------------------------------


def shape_for(nbytes: int) -> tuple[int, int]:
    """Return the shape of a uint8 matrix within ``nbytes`` bytes, some 500 times taller than wide.

    Wide rows are a multiple of 32, so that each begins where a GPU likes to read.
    """
    n = math.isqrt(max(nbytes, 0) // ASPECT)
    if n < 1:
        raise WorkloadError(f"size {nbytes} B is too small: the least is {ASPECT} B, one column")
    n = n // ALIGNED_COLUMNS * ALIGNED_COLUMNS or n
    return nbytes // n // ASPECT * ASPECT, n


def planted(
    shape: tuple[int, int],
    rank: int,
    *,
    chunks: tuple[tuple[int, ...], tuple[int, ...]],
    device: Device = "cuda",
    library: Any = np,
    packed: bool = False,
) -> tuple[da.Array, Floats]:
    """Make a uint8 matrix of known singular values, chunk by chunk on the workers; return both.

    Its ``rank`` x ``rank`` rectangles are constant, with values from a small matrix C, so the
    singular values are those of diag(√rows) C diag(√columns). ``packed``: 0 to 3, four in a byte.
    ``library`` is that of the graph's meta: CuPy takes a GPU on the client.
    """
    if not 1 <= rank <= min(*shape, 64):
        raise WorkloadError(
            f"k={rank} is out of range: the test matrix of {shape[0]} x {shape[1]} "
            f"has 1 to {min(*shape, 64)} non-zero singular values"
        )
    meta = library.empty((0, 0), np.uint8)
    how = {"shape": shape, "rank": rank, "device": device, "packed": packed}
    cut = (chunks[0], (-(-shape[1] // 4),)) if packed else chunks
    x = da.map_blocks(_block, chunks=cut, dtype=np.uint8, meta=meta, **how)
    rows, columns = (np.diff(_group_bounds(size, rank)) for size in shape)
    small = np.sqrt(rows)[:, None] * _core(rank, packed) * np.sqrt(columns)
    return x, np.linalg.svd(small, compute_uv=False)


def _core(rank: int, packed: bool) -> NDArray[np.uint8]:
    """Return a matrix of full rank, condition below twenty, distinct singular values."""
    if packed:
        return (3 * np.eye(rank) + np.triu(np.ones((rank, rank)), 1)).astype(np.uint8)
    # a falling diagonal over small mixed values
    i, j = np.indices((rank, rank))
    core = (3 * i + 5 * j) % 7
    core[np.diag_indices(rank)] = 250 - 200 * np.arange(rank) // rank
    return core.astype(np.uint8)


def _group_bounds(size: int, rank: int) -> NDArray[np.int64]:
    return np.arange(rank + 1, dtype=np.int64) * size // rank


def _block(
    *, shape: tuple[int, int], rank: int, device: Device, packed: bool, block_info: Any
) -> Any:
    xp = array_module(device)
    (top, bottom), (start, stop) = block_info[None]["array-location"]
    if packed:
        start, stop = 0, shape[1]
    rows = np.searchsorted(_group_bounds(shape[0], rank), np.arange(top, bottom), "right") - 1
    columns = np.searchsorted(_group_bounds(shape[1], rank), np.arange(start, stop), "right") - 1
    lines = _core(rank, packed)[:, columns]
    return xp.asarray(packing.pack(lines) if packed else lines)[xp.asarray(rows)]


def check(
    s: Any, v: Any, u_gram: Any, rows: Any, u_rows: Any, expected: Any, tolerance: float = TOLERANCE
) -> list[Check]:
    """Compare an SVD with its known singular values, by some rows of the matrix and of u.

    Shapes: s and expected (k,), v (k, n), u_gram = uᵀu (k, k), rows (p, n), u_rows (p, k).
    """
    one, exact = np.eye(s.size), rows.astype(np.float64)
    residual = np.linalg.norm(exact - u_rows * s @ v) / np.linalg.norm(exact)
    values = {
        "singular values, relative error": np.abs(s / expected - 1).max(),
        "u, orthogonality": np.abs(u_gram - one).max(),
        "v, orthogonality": np.abs(v @ v.T - one).max(),
        "sampled rows, relative residual": residual,
    }
    return [Check(name, float(value), 0.0, tolerance) for name, value in values.items()]


# --- the tuned form -------------------------------------------------------------------------------


def svd_rows(
    x: da.Array,
    k: int,
    *,
    oversample: int = 10,
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
        Shape (m, n), real, chunks ``(rows, n)`` of CuPy (``device="cuda"``) or NumPy arrays.
    k, oversample
        Number of singular triplets, at most ``min(m, n)``, and additional columns of the range
        finder, for values that decrease slowly. Beyond half of the columns, all are used. Where
        values hardly decrease, as those of random numbers, all stay some percent too low: take
        ``dask.array.linalg.svd``.
    prepare
        Turns a tile of rows of ``x`` into floats of the same shape, row by row, whenever it is
        read. It has to be picklable, and must not write into the tile.
    packed_columns
        ``x`` is uint8, (m, ceil(n / 4)): so many columns of `hpcdask.workloads.packing.pack`.
    dtype
        In which chunks are multiplied; sums are float64. float32 resolves only σₖ > 0.02 σ₁, less
        with more than 60 columns of the range finder. On a GPU, tensor cores then multiply bytes
        and packed values as float16, which holds them exactly.
    seed, device
        Of the range finder; what the chunks of ``x`` are on.

    Returns
    -------
    u, s, v : dask.array.Array
        Shapes (m, k), (k,), (k, n), float64, NumPy; zero past the resolved rank. No row of ``v``
        has a negative sum; where all sums are 0, as of centred data, its largest entry is positive.
        One Dask task per chunk and pass; ``u`` reads ``x`` another time.

    Raises
    ------
    WorkloadError
        Wrong arguments, before anything is computed; NaN, infinity, masks or overflow, later.
    """
    check_device(device)
    n, work, wanted = _check(x, packed_columns, k), np.dtype(dtype), k + oversample
    if work.name not in ("float32", "float64"):
        raise WorkloadError(f"dtype {work} is not accepted: float32 or float64")
    rows = Rows(n, work.name, device, prepare, packed_columns is not None)
    # A nearly square random matrix is badly conditioned, and one pass has that squared
    side = min(len(x), n)
    width = min(n, wanted if 2 * wanted <= side else max(wanted, 2 * side))
    how: dict[str, Any] = {"rows": rows, "width": width, "seed": seed}
    # All indices are in the result, or dask would not fuse this with what makes x
    sizes: dict[str, Any] = {"i": 1, "n": n + width}
    new = {"new_axes": {"l": width}, "adjust_chunks": sizes}
    products = da.blockwise(_products, "inl", x, "in", **new, **how, **FREE_FORM)
    sums = products.sum(axis=0, split_every=SPLIT_EVERY)
    shape = {"adjust_chunks": {"a": 2 * n + 1, "b": k}}
    found = da.blockwise(_solve, "ab", sums, "ab", k=k, **shape, **how, **FREE_FORM)
    u = da.blockwise(_left, "ik", x, "in", found, "nk", rows=rows, **FREE_FORM)
    return u, found[-1], found[n:-1].T


def _check(x: da.Array, packed_columns: int | None, k: int) -> int:
    """Return the columns of a matrix that `svd_rows` can decompose; else raise WorkloadError."""
    check_dask(x)
    if x.ndim != 2:
        raise WorkloadError(f"x has {x.ndim} dimensions; an SVD wants a matrix")
    if x.dtype.kind not in "buif":
        raise WorkloadError(f"x is {x.dtype}; integers, booleans and real floats are accepted")
    m, n = map(int, x.shape)
    if x.numblocks[1] != 1:
        raise WorkloadError("chunks of x have to be of full width: x = x.rechunk({1: -1})")
    if packed_columns is not None:
        n, n_bytes = packed_columns, packing.n_bytes(packed_columns)
        if x.dtype != np.uint8 or x.shape[1] != n_bytes:
            raise WorkloadError(
                f"{n} packed columns are {n_bytes} columns of uint8; x is {x.shape[1]} of {x.dtype}"
            )
    if not 1 <= k <= min(m, n):
        raise WorkloadError(
            f"k={k} is out of range: a {m} x {n} matrix has {min(m, n)} singular values"
        )
    return n


# --- the chunks -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rows:
    """Conversion of chunks of ``n`` columns to floats, multiplied in the type ``work``."""

    n: int
    work: str
    device: Device
    prepare: Prepare | None
    packed: bool

    def dtype(self, block: Any) -> str:
        """Return the type in which tiles are multiplied: tensor cores take bytes as float16."""
        exact = block.dtype == np.uint8 and self.prepare is None  # float16 holds integers to 2048
        on_tensor_cores = exact and self.device == "cuda" and self.work == "float32"
        return "float16" if on_tensor_cores else self.work

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
        if tile.shape != shape or tile.dtype.kind not in "buif":
            found = f"{tile.dtype} of shape {tile.shape}"
            raise WorkloadError(f"prepare returned {found}: it has to be real, of shape {shape}")
        return tile


def _products(block: Any, *, rows: Rows, width: int, seed: int) -> NDArray[np.float64]:
    """Return Z = AᵀY of a chunk A, and G = YᵀY below it, as (1, n + width, width)."""
    _check_chunk(block, rows.device)
    xp = array_module(rows.device)
    right = xp.asarray(_omega(rows.n, width, seed), rows.work)
    l = right.shape[1]  # noqa: E741
    zt, gram = xp.zeros((l, rows.n)), xp.zeros((l, l))
    part, dtype = xp.empty((l, rows.n), rows.work), rows.dtype(block)
    with np.errstate(invalid="ignore", over="ignore"):  # what is not finite gets an error below
        for tile in rows.tiles(block, dtype):
            if dtype == "float16":
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


@functools.lru_cache(maxsize=4)
def _omega(n: int, width: int, seed: int) -> NDArray[np.float64]:
    # Drawn on the host: the same on every worker, and nothing to send with the graph
    return np.linalg.qr(np.random.default_rng(seed).standard_normal((n, width)))[0]


def _left(blocks: list[Any], found: list[Any], *, rows: Rows) -> Floats:
    (block,), xp = blocks, array_module(rows.device)
    _check_chunk(block, rows.device)
    right = xp.asarray(found[0][: rows.n])
    # In float64: what undoes the scale of Ω has opposite signs, which cancel
    parts = [tile @ right for tile in rows.tiles(block, "float64")]
    return to_host(xp.concatenate(parts)) if parts else np.empty((0, right.shape[1]))


# --- the small matrices, on the host of one worker ------------------------------------------------


def _solve(sums: Any, *, k: int, rows: Rows, width: int, seed: int) -> NDArray[np.float64]:
    """Decompose the small matrix B: return what makes u of A (n, k), vᵀ (n, k) and s (1, k).

    No row of v has a negative sum, as of dask's own; of centred data, where sums are rounding, the
    largest entry is positive. Zeros are past the rank.
    """
    n, sums = rows.n, to_host(sums)
    whiten = _whiten(sums[n:], rows.work)
    turn, s, v = np.linalg.svd((sums[:n] @ whiten).T, full_matrices=False)
    right = _omega(n, width, seed).astype(rows.work) @ (whiten @ turn)
    sums_of_v, largest = v.sum(axis=1), v[np.arange(len(v)), abs(v).argmax(axis=1)]
    sign = np.where(np.where(abs(sums_of_v) < ROUNDING, largest, sums_of_v) < 0, -1.0, 1.0)
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
