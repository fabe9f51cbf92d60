"""A uint8 matrix of known singular values, and the check of an SVD of it."""

from __future__ import annotations

from typing import Any

import dask.array as da
import numpy as np
from numpy.typing import NDArray

from hpcdask.workloads import Check, Device, WorkloadError, array_module, client_cupy

__all__ = ["check", "matrix"]

# Of each check; what is computed in float32 passes too.
TOLERANCE = 1e-3

Floats = NDArray[np.floating[Any]]


def matrix(
    shape: tuple[int, int],
    rank: int,
    *,
    chunks: tuple[tuple[int, ...], tuple[int, ...]],
    device: Device = "cuda",
    cupy_meta: bool = False,
) -> tuple[da.Array, Floats]:
    """Make a uint8 matrix of known singular values, chunk by chunk on the workers.

    The matrix is constant on ``rank`` x ``rank`` rectangles, with values from a small matrix C.
    Its singular values are those of diag(√rows) C diag(√columns), with the sizes of the groups
    of rows and columns, and exactly ``rank`` of them are not zero.

    Parameters
    ----------
    shape
        (m, n).
    rank
        Number of non-zero singular values, 1 to ``min(m, n, 64)``.
    chunks
        Row and column chunks, in full.
    device
        Where the chunks are made.
    cupy_meta
        Say in the graph that chunks are CuPy arrays, as ``svd.stock`` needs; takes a GPU on the
        client.

    Returns
    -------
    x : dask.array.Array
        Shape (m, n), uint8.
    s : numpy.ndarray
        Shape (rank,), float64, descending.

    Raises
    ------
    WorkloadError
        ``rank`` out of range.
    """
    if not 1 <= rank <= min(*shape, 64):
        raise WorkloadError(
            f"k={rank} is out of range: the test matrix of {shape[0]} x {shape[1]} "
            f"has 1 to {min(*shape, 64)} non-zero singular values"
        )
    library = client_cupy() if cupy_meta else np
    x = da.map_blocks(
        _block,
        shape=shape,
        rank=rank,
        device=device,
        chunks=chunks,
        dtype=np.uint8,
        meta=library.empty((0, 0), np.uint8),
    )
    rows, columns = (np.diff(_group_bounds(size, rank)) for size in shape)
    small = np.sqrt(rows)[:, None] * _core(rank) * np.sqrt(columns)
    return x, np.linalg.svd(small, compute_uv=False)


def _core(rank: int) -> NDArray[np.uint8]:
    # A falling diagonal over small mixed values: full rank, condition below ten, distinct
    # singular values.
    i, j = np.indices((rank, rank))
    core = (3 * i + 5 * j) % 7
    core[np.diag_indices(rank)] = 250 - 200 * np.arange(rank) // rank
    return core.astype(np.uint8)


def _group_bounds(size: int, rank: int) -> NDArray[np.int64]:
    return np.arange(rank + 1, dtype=np.int64) * size // rank


def _block(*, shape: tuple[int, int], rank: int, device: Device, block_info: Any) -> Any:
    xp = array_module(device)
    (top, bottom), (start, stop) = block_info[None]["array-location"]
    groups = np.searchsorted(_group_bounds(shape[1], rank), np.arange(start, stop), "right") - 1
    lines = xp.asarray(_core(rank)[:, groups])
    bounds = np.clip(_group_bounds(shape[0], rank), top, bottom) - top
    out = xp.empty((bottom - top, stop - start), np.uint8)
    for group in range(rank):
        out[bounds[group] : bounds[group + 1]] = lines[group]
    return out


def check(
    s: Floats,
    v: Floats,
    u_gram: Floats,
    rows: Floats,
    u_rows: Floats,
    expected: Floats,
) -> list[Check]:
    """Compare an SVD of the matrix with what is known of it.

    Parameters
    ----------
    s, v
        Singular values, shape (k,), and right singular vectors, shape (k, n).
    u_gram
        uᵀu, shape (k, k).
    rows, u_rows
        Some rows of the matrix, shape (p, n), and the same rows of u, shape (p, k).
    expected
        The k singular values, shape (k,).

    Returns
    -------
    list of Check
        Largest relative error of a singular value, largest deviation of uᵀu and vvᵀ from the
        identity, and relative residual of the rows.
    """
    one = np.eye(s.size)
    exact = rows.astype(np.float64)
    residual = np.linalg.norm(exact - u_rows * s @ v) / np.linalg.norm(exact)
    values = {
        "singular values, relative error": np.abs(s / expected - 1).max(),
        "u, orthogonality": np.abs(u_gram - one).max(),
        "v, orthogonality": np.abs(v @ v.T - one).max(),
        "sampled rows, relative residual": residual,
    }
    return [Check(name, float(value), 0.0, TOLERANCE) for name, value in values.items()]
