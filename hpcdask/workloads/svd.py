"""The reference truncated SVD of a tall matrix: ten singular triplets of 200 GB of uint8.

It first appeared in the Dask blog in May 2020 (https://blog.dask.org/2020/05/13/large-svds), with
``dask.array.linalg.svd_compressed``; ``stock`` is that program. :func:`svd_rows` is the tuned
form.

Notes
-----
The method is the randomised range finder of Halko, Martinsson and Tropp, SIAM Review 53 (2011),
217-288: with a random Ω of k + oversample columns, Y = AΩ, Q an orthonormal basis of Y, B = QᵀA,
and the SVD of the small B. As in the CholeskyQR family (Yamamoto, Nakatsukasa, Yanagisawa,
Fukaya, ETNA 44 (2015), 306-326) Q comes from the Gram matrix G = YᵀY: Q = YT with TᵀGT = 1. Here
B is not computed from Q in a second pass but as B = TᵀZᵀ with Z = AᵀY, which is the same by
linearity, so both sums, G and Z, come from one reading of A and one Dask task per chunk. The price
is an error of eps (σ₁/σₖ)², where a second pass (the "2" of CholeskyQR2) has eps σ₁/σₖ: in float64,
singular values down to 1e-6 σ₁ are resolved, and with one power iteration those below 1e-8 σ₁.
T comes from the eigenvectors of G scaled to unit diagonal rather than from a Cholesky factor,
because A may have a rank below the number of columns of Ω, where Cholesky breaks down.

Z is also what a power iteration needs next: Ω ← orth(Z), one more pass for each.
"""

from __future__ import annotations

import functools
import math
from typing import Any, cast

import dask.array as da
import numpy as np
from numpy.typing import DTypeLike, NDArray

from hpcdask.workloads import (
    Device,
    WorkloadError,
    array_module,
    client_cupy,
    slab_rows,
    to_host,
)

__all__ = ["chunk_rows", "shape_for", "stock", "svd_rows"]

ASPECT = 500  # rows per column of the reference matrix
STOCK_CHUNKS = (20_000, 5_000)
MAX_CHUNK_NBYTES: dict[Device, int] = {"cuda": 4_000_000_000, "cpu": 128_000_000}
# Integers are cast to floats tile by tile: this bounds the scratch memory, and keeps the CPU in
# its cache.
TILE_NBYTES: dict[Device, int] = {"cuda": 1 << 28, "cpu": 1 << 22}
# Each tile updates n x l sums, which takes as long as reading about l rows.
MIN_TILE_ROWS = 64
# Partial sums are (n + l) x l float64, 3.2 MB at the reference size.
SPLIT_EVERY = 8

Floats = NDArray[np.floating[Any]]


def shape_for(nbytes: int) -> tuple[int, int]:
    """Return the shape of a uint8 matrix within ``nbytes`` bytes, 500 times taller than wide.

    Raises
    ------
    WorkloadError
        Less than one column.
    """
    n = math.isqrt(max(nbytes, 0) // ASPECT)
    if n < 1:
        raise WorkloadError(f"size {nbytes} B is too small: the least is {ASPECT} B, one column")
    return ASPECT * n, n


def chunk_rows(
    shape: tuple[int, int], *, device: Device, n_slots: int, max_nbytes: int | None = None
) -> tuple[int, ...]:
    """Choose row chunks of full width for a uint8 matrix (at most 4 GB on GPUs, 128 MB on CPUs)."""
    limit = MAX_CHUNK_NBYTES[device] if max_nbytes is None else max_nbytes
    return slab_rows(shape[0], shape[1], n_slots=n_slots, max_nbytes=limit)


def svd_rows(
    x: da.Array,
    k: int,
    *,
    oversample: int = 10,
    n_power_iter: int = 0,
    dtype: DTypeLike = np.float64,
    seed: int = 0,
    device: Device = "cuda",
) -> tuple[da.Array, da.Array, da.Array]:
    """Truncated SVD of a matrix cut into row chunks of full width.

    Parameters
    ----------
    x
        Shape (m, n), real, chunks ``(rows, n)`` of CuPy arrays (``device="cuda"``) or NumPy
        arrays. Each pass reads it once: persist it unless it is cheap to make again. Tall is
        fast; wide works.
    k
        Number of singular triplets, at most ``min(m, n)``.
    oversample
        Additional columns of the range finder.
    n_power_iter
        Additional passes, for spectra that decay slowly or span more than six orders of
        magnitude.
    dtype
        float64 or float32, in which chunks are multiplied; sums over tiles and chunks are always
        float64. float64 is no slower on GPUs made for HPC. float32 resolves only σₖ > 1e-2 σ₁.
    seed
        Of the range finder.
    device
        What the chunks of ``x`` are on.

    Returns
    -------
    u, s, v : dask.array.Array
        Shapes (m, k), (k,), (k, n), float64, NumPy, as from ``numpy.linalg.svd``: ``u * s @ v``
        is the best approximation found. They are zero past the rank of ``x`` as far as it is
        resolved, which is to 1e-6 σ₁ without power iterations. For ``s`` and ``v`` there is one
        Dask task per chunk, and one more for ``u``, which reads ``x`` a second time.

    Raises
    ------
    WorkloadError
        Not a matrix, not real, unknown chunk sizes, columns that are split, or ``k`` out of
        range; before anything is computed.
    """
    work = np.dtype(dtype)
    _validate(x, k, oversample, n_power_iter, work)
    m, n = x.shape
    width = min(k + oversample, m, n)
    common = {"width": width, "work": work.name, "seed": seed, "device": device}
    sums = _sums(x, None, common)
    basis = None
    for _ in range(n_power_iter):
        basis = da.map_blocks(
            _orthonormal,
            sums,
            n=n,
            chunks=((n,), (width,)),
            dtype=np.float64,
            meta=np.empty((0, 0)),
        )
        sums = _sums(x, basis, common)
    triplets = da.blockwise(
        _solve,
        "kc",
        sums,
        "nl",
        *(() if basis is None else (basis, "nl")),
        new_axes={"k": k, "c": 1 + 2 * n},
        align_arrays=False,
        concatenate=False,
        k=k,
        n=n,
        work=work.name,
        seed=seed,
        dtype=np.float64,
        meta=np.empty((0, 0)),
    )
    s, v, loadings = triplets[:, 0], triplets[:, 1 : 1 + n], triplets[:, 1 + n :]
    u = da.blockwise(
        _left,
        "ik",
        x,
        "in",
        loadings,
        "kn",
        align_arrays=False,
        concatenate=False,
        work=work.name,
        device=device,
        dtype=np.float64,
        meta=np.empty((0, 0)),
    )
    return u, s, v


def _validate(x: da.Array, k: int, oversample: int, n_power_iter: int, work: Any) -> None:
    if x.ndim != 2:
        raise WorkloadError(f"x has {x.ndim} dimensions; an SVD wants a matrix")
    if any(math.isnan(size) for sizes in x.chunks for size in sizes):
        raise WorkloadError("x has chunks of unknown size; call x.compute_chunk_sizes() first")
    if x.dtype.kind not in "buif":
        raise WorkloadError(f"x is {x.dtype}; integers, booleans and real floats are accepted")
    if not 1 <= k <= min(x.shape):
        raise WorkloadError(
            f"k={k} is out of range: a {x.shape[0]} x {x.shape[1]} matrix has "
            f"{min(x.shape)} singular values, so k is 1 to {min(x.shape)}"
        )
    if len(x.chunks[1]) != 1:
        raise WorkloadError(
            f"the columns of x are split into {len(x.chunks[1])} chunks; "
            "svd_rows needs rows of full width: x = x.rechunk({1: -1})"
        )
    if oversample < 0 or n_power_iter < 0:
        raise WorkloadError("oversample and n_power_iter cannot be negative")
    if work not in (np.dtype(np.float32), np.dtype(np.float64)):
        raise WorkloadError(f"dtype {work} is not accepted: float32 or float64")


def _sums(x: da.Array, basis: da.Array | None, common: dict[str, Any]) -> da.Array:
    """Z = AᵀAΩ over G = (AΩ)ᵀAΩ, summed over the chunks: (n + width, width), on the device."""
    n, width = x.shape[1], common["width"]
    partial = da.blockwise(
        _products,
        "inl",
        x,
        "in",
        *(() if basis is None else (basis, "nl")),
        new_axes={"l": width} if basis is None else {},
        adjust_chunks={"i": lambda _: 1, "n": lambda _: n + width},
        align_arrays=False,
        dtype=np.float64,
        meta=np.empty((0, 0, 0)),
        **common,
    )
    return cast("da.Array", partial.sum(axis=0, split_every=SPLIT_EVERY))


def _products(
    block: Any, basis: Any = None, *, width: int, work: str, seed: int, device: Device
) -> Any:
    xp = array_module(device)
    n = block.shape[1]
    omega = _omega(n, width, seed, work, device) if basis is None else xp.asarray(basis, work)
    zt, gram = xp.zeros((width, n)), xp.zeros((width, width))
    for tile in _tiles(block, work, device):
        y = tile @ omega
        zt += y.T @ tile  # on a CPU, tile.T @ y takes up to twice as long
        y = y.astype(np.float64, copy=False)
        gram += y.T @ y
    return xp.concatenate([zt.T, gram])[None]


def _tiles(block: Any, work: str, device: Device) -> Any:
    step = max(MIN_TILE_ROWS, TILE_NBYTES[device] // (block.shape[1] * np.dtype(work).itemsize))
    for start in range(0, block.shape[0], step):
        yield block[start : start + step].astype(work, copy=False)


@functools.lru_cache(maxsize=4)
def _omega(n: int, width: int, seed: int, work: str, device: Device) -> Any:
    # Drawn on the host from the seed: the same on every worker, and nothing to send with the
    # graph.
    omega = np.random.default_rng(seed).standard_normal((n, width))
    return array_module(device).asarray(omega, work)


def _orthonormal(sums: Any, *, n: int) -> Floats:
    return cast("Floats", np.linalg.qr(to_host(sums)[:n])[0])


def _solve(sums: Any, basis: Any = None, *, k: int, n: int, work: str, seed: int) -> Floats:
    """Rows of [s | v | (ΩW)ᵀ], with u = AΩW; small matrices, so on the host."""
    z_gram = to_host(_only(sums))
    z, gram = z_gram[:n], z_gram[n:]
    width = gram.shape[0]
    if basis is None:
        omega = _omega(n, width, seed, work, "cpu")
    else:
        omega = _only(basis).astype(work)
    norms = np.sqrt(np.diag(gram))
    # What lies below is rounding of the products, not part of the range of A: a column that Ω has
    # outside the rows' space of A, or a direction in which the columns of Y depend on each other.
    noise = 64 * width * np.finfo(work).eps
    scale = np.divide(1, norms, where=norms > noise * norms.max(), out=np.zeros_like(norms))
    values, vectors = np.linalg.eigh(gram * scale * scale[:, None])
    keep = values > max(noise * values[-1], np.finfo(np.float64).tiny)
    whiten = vectors[:, keep] / np.sqrt(values[keep]) * scale[:, None]
    left, s, v = np.linalg.svd((z @ whiten).T, full_matrices=False)
    rank = min(k, s.size)
    out = np.zeros((k, 1 + 2 * n))
    out[:rank, 0] = s[:rank]
    out[:rank, 1 : 1 + n] = v[:rank]
    out[:rank, 1 + n :] = (omega @ (whiten @ left[:, :rank])).T
    return out


def _only(nested: Any) -> Any:
    # blockwise hands over summed indices as nested lists, here of the single block along them.
    while isinstance(nested, list):
        (nested,) = nested
    return nested


def _left(blocks: Any, loadings: Any, *, work: str, device: Device) -> Floats:
    xp = array_module(device)
    block, weights = _only(blocks), xp.asarray(_only(loadings).T)
    # The loadings undo the scale of Ω with opposite signs: in float32 they would cancel.
    parts = [tile @ weights for tile in _tiles(block, "float64", device)]
    return to_host(xp.concatenate(parts))


def stock(x: da.Array, k: int, *, device: Device = "cuda") -> tuple[da.Array, da.Array, da.Array]:
    """Return ``dask.array.linalg.svd_compressed(x, k)``, as in the blog.

    Parameters
    ----------
    x
        Shape (m, n), chunks 20,000 x 5,000 in the blog.
    k
        Number of singular triplets.
    device
        ``"cuda"`` needs a GPU on the client as well, and returns CuPy arrays.

    Raises
    ------
    WorkloadError
        ``"cuda"`` on a client without GPU or CuPy, or ``k`` out of range.
    """
    if not 1 <= k <= min(x.shape):
        raise WorkloadError(f"k={k} is out of range: 1 to {min(x.shape)}")
    seed = None
    if device == "cuda":
        seed = da.random.RandomState(RandomState=client_cupy().random.RandomState)
    return cast("tuple[da.Array, da.Array, da.Array]", da.linalg.svd_compressed(x, k, seed=seed))
