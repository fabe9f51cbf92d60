"""A uint8 matrix of known singular values, and the check of an SVD of it."""

from __future__ import annotations

from typing import Any

import dask.array as da
import numpy as np
from numpy.typing import NDArray

from hpcdask.workloads import Check, Device, WorkloadError, array_module, client_cupy
from hpcdask.workloads.packing import pack

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
    packed: bool = False,
) -> tuple[da.Array, Floats]:
    """Make a uint8 matrix of known singular values, chunk by chunk on the workers; return both.

    It is constant on ``rank`` x ``rank`` rectangles, with values from a small matrix C, so the
    singular values are those of diag(√rows) C diag(√columns). ``packed``: 0 to 3, four in a byte.
    ``cupy_meta`` says in the graph that chunks are CuPy arrays, which takes a GPU on the client.
    """
    if not 1 <= rank <= min(*shape, 64):
        raise WorkloadError(
            f"k={rank} is out of range: the test matrix of {shape[0]} x {shape[1]} "
            f"has 1 to {min(*shape, 64)} non-zero singular values"
        )
    meta = (client_cupy() if cupy_meta else np).empty((0, 0), np.uint8)
    how = {"shape": shape, "rank": rank, "device": device, "packed": packed}
    cut = (chunks[0], (-(-shape[1] // 4),)) if packed else chunks
    x = da.map_blocks(_block, chunks=cut, dtype=np.uint8, meta=meta, **how)
    rows, columns = (np.diff(_group_bounds(size, rank)) for size in shape)
    small = np.sqrt(rows)[:, None] * _core(rank, packed) * np.sqrt(columns)
    return x, np.linalg.svd(small, compute_uv=False)


def _core(rank: int, packed: bool) -> NDArray[np.uint8]:
    """Return a matrix of full rank, condition below twenty, distinct singular values."""
    if packed:  # triangular, with singular values from 2.5 on
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
    groups = np.searchsorted(_group_bounds(shape[1], rank), np.arange(start, stop), "right") - 1
    lines = _core(rank, packed)[:, groups]
    lines = xp.asarray(pack(lines) if packed else lines)
    bounds = np.clip(_group_bounds(shape[0], rank), top, bottom) - top
    out = xp.empty((bottom - top, lines.shape[1]), np.uint8)
    for group in range(rank):
        out[bounds[group] : bounds[group + 1]] = lines[group]
    return out


def check(
    s: Floats, v: Floats, u_gram: Floats, rows: Floats, u_rows: Floats, expected: Floats
) -> list[Check]:
    """Compare an SVD of the matrix with what is known of it, by some rows of the matrix and of u.

    Shapes: s and expected (k,), v (k, n), u_gram = uᵀu (k, k), rows (p, n), u_rows (p, k).
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
