"""Genotypes, four to the byte: packing, and products that never hold the unpacked matrix.

The matrix of the Dask blog's "Large SVDs" (May 2020, https://blog.dask.org/2020/05/13/large-svds)
has the values 0 to 3, two bits each, and the layout is the blog's. Value j of a row is in bits
``2 * (j % 4)`` of byte ``j // 4`` of the packed row; the last byte is filled up with zeros. A
quarter of the memory is held, moved and read, and a randomised SVD needs no more of the matrix than
the two products here.

On a CPU the products unpack a tile at a time and leave the rest to BLAS. On a GPU they run on the
integer tensor cores, see ``integer_kernels.cu``.

Blocks are NumPy or CuPy arrays, and what comes back is of the same library.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any, cast

import dask.array as da
import numpy as np
from numpy.typing import DTypeLike, NDArray

from hpcdask.workloads import WorkloadError, array_module, check_dask, check_unmasked, packing_cpu
from hpcdask.workloads.packing_cpu import PER_BYTE, n_bytes, padded, validate_values

__all__ = ["multiply", "multiply_transposed", "pack", "pack_array", "unpack", "unpack_array"]

# The products unpack a tile of floats: bounds the scratch memory of a GPU that has not the tensor
# cores, and keeps a CPU in its last-level cache.
TILE_NBYTES = {"cpu": 1 << 21, "cuda": 1 << 28}
# Each tile of the transposed product updates n x l sums, which takes as long as about l rows.
MIN_TILE_ROWS = 64


def pack(values: Any) -> Any:
    """Pack integers 0 to 3 along the last axis: (..., n) to (..., ceil(n / 4)) uint8."""
    if not _on_gpu(values):
        check_unmasked(values)
        values = np.asarray(values)
    if values.ndim < 1 or values.dtype.kind not in "bui":
        raise WorkloadError(
            f"{values.dtype} values with {values.ndim} axes cannot be packed: integers or "
            "booleans with at least one axis can"
        )
    if not _on_gpu(values):
        return packing_cpu.pack(values)
    validate_values(values, values)
    n = values.shape[-1]
    words = array_module("cuda").zeros((*values.shape[:-1], padded(n)), np.uint8)
    words[..., :n] = values
    return _pack_words()(words.view(np.uint32))


def unpack(packed: Any, n: int, dtype: DTypeLike = np.uint8, out: Any = None) -> Any:
    """Undo `pack` for rows of n values, into ``out`` if given: contiguous NumPy of any dtype."""
    if not _on_gpu(packed):
        packed = np.asarray(packed)
    _validate_packed(packed, n)
    shape = (*packed.shape[:-1], n)
    if out is not None and (_on_gpu(packed) or out.shape != shape or not out.flags.c_contiguous):
        raise WorkloadError(
            f"out is to be a contiguous NumPy array of shape {shape}, for packed values that are "
            f"NumPy's; it has shape {out.shape}"
        )
    if not _on_gpu(packed):
        if out is None:
            out = np.empty(shape, dtype)
        return packing_cpu.unpack(packed, out)
    xp = array_module("cuda")
    values = _spread_bytes()(xp.ascontiguousarray(packed)).view(np.uint8)[..., :n]
    return xp.ascontiguousarray(values, dtype=dtype)


def multiply(packed: Any, right: Any, n: int) -> Any:
    """Multiply an unpacked matrix (m x n) and ``right`` (n x l), float32 or float64, as the result.

    On a CPU it is what BLAS makes of it. On a GPU with integer tensor cores, it is as exact as
    `hpcdask.workloads.integer_gpu.multiply`.
    """
    _validate_product(packed, right, n, n_rows=n)
    if _on_gpu(packed) and 0 not in (*packed.shape, *right.shape) and _gpu().can_multiply():
        return _gpu().multiply(packed, right, PER_BYTE).astype(right.dtype, copy=False)
    parts = [tile @ right for _, tile in _tiles(packed, n, right.dtype)]
    return _library(packed).concatenate(parts) if parts else right[:0]


def multiply_transposed(packed: Any, left: Any, n: int) -> Any:
    """Multiply the transpose of an unpacked matrix (m x n) and ``left`` (m x l), in its dtype.

    Sums over tiles of rows are float64 on a CPU; on a GPU everything is as with `multiply`.
    """
    _validate_product(packed, left, n, n_rows=len(packed))
    if _on_gpu(packed) and 0 not in (*packed.shape, *left.shape) and _gpu().can_multiply():
        return _gpu().multiply_transposed(packed, left, n, PER_BYTE).astype(left.dtype, copy=False)
    sums = _library(packed).zeros((left.shape[1], n))
    for rows, tile in _tiles(packed, n, left.dtype):
        sums += left[rows].T @ tile  # on a CPU, tile.T @ left takes up to twice as long
    return _library(packed).ascontiguousarray(sums.T, dtype=left.dtype)


def pack_array(x: da.Array) -> da.Array:
    """Pack an array chunk by chunk on the workers.

    Parameters
    ----------
    x
        Shape (..., n), integers or bool from 0 to 3; its chunks along the last axis are multiples
        of 4, except the last one.

    Returns
    -------
    dask.array.Array
        Shape (..., ceil(n / 4)), uint8, NumPy or CuPy chunks as in ``x``. One Dask task per chunk,
        which raises :class:`WorkloadError` for other values, with the index in its chunk.

    Raises
    ------
    WorkloadError
        No axis, not integers, or chunks of another size.
    """
    check_dask(x)
    if x.ndim < 1 or x.dtype.kind not in "bui":
        raise WorkloadError(
            f"a {x.dtype} array with {x.ndim} axes cannot be packed: integers or booleans with at "
            "least one axis can"
        )
    _validate_chunks(x)
    if any(size % PER_BYTE for size in x.chunks[-1][:-1]):
        raise WorkloadError(
            f"the chunks {_some(x.chunks[-1])} of the last axis are not multiples of 4, and a byte "
            f"holds 4 values: x = x.rechunk({{{x.ndim - 1}: {padded(max(x.chunks[-1]))}}})"
        )
    chunks = (*x.chunks[:-1], tuple(n_bytes(size) for size in x.chunks[-1]))
    return cast("da.Array", da.map_blocks(pack, x, chunks=chunks, dtype=np.uint8, meta=_meta(x)))


def unpack_array(packed: da.Array, n: int, dtype: DTypeLike = np.uint8) -> da.Array:
    """Undo `pack_array` for rows of n values, one Dask task per chunk."""
    _validate_chunks(packed)
    _validate_packed(packed, n)
    bounds = [0, *(min(PER_BYTE * stop, n) for stop in itertools.accumulate(packed.chunks[-1]))]
    sizes = tuple(stop - start for start, stop in itertools.pairwise(bounds))
    return cast(
        "da.Array",
        da.map_blocks(
            _unpack_block,
            packed,
            sizes=sizes,
            out_dtype=np.dtype(dtype),
            chunks=(*packed.chunks[:-1], sizes),
            dtype=dtype,
            meta=_meta(packed).astype(dtype),
        ),
    )


def _unpack_block(
    block: Any, *, sizes: tuple[int, ...], out_dtype: Any, block_id: tuple[int, ...]
) -> Any:
    return unpack(block, sizes[block_id[-1]], out_dtype)


def _on_gpu(array: Any) -> bool:
    return type(array).__module__.partition(".")[0] == "cupy"


def _library(array: Any) -> Any:
    return array_module("cuda" if _on_gpu(array) else "cpu")


def _gpu() -> Any:
    from hpcdask.workloads import integer_gpu

    return integer_gpu


@functools.cache
def _pack_words() -> Any:
    """Return the kernel that makes one byte of four, each 0 to 3, in a 32-bit word."""
    return array_module("cuda").ElementwiseKernel(
        "uint32 x", "uint8 y", "y = (x * 0x01041040u) >> 24", "hpcdask_pack"
    )


@functools.cache
def _spread_bytes() -> Any:
    """Return the kernel that makes a 32-bit word of four values of each packed byte."""
    return array_module("cuda").ElementwiseKernel(
        "uint8 x",
        "uint32 y",
        "y = (x | x << 12) & 0x000F000Fu; y = (y | y << 6) & 0x03030303u;",
        "hpcdask_unpack",
    )


def _tiles(packed: Any, n: int, dtype: DTypeLike) -> Iterator[tuple[slice, Any]]:
    limit = TILE_NBYTES["cuda" if _on_gpu(packed) else "cpu"]
    step = max(MIN_TILE_ROWS, limit // max(1, n * np.dtype(dtype).itemsize))
    for start in range(0, len(packed), step):
        rows = slice(start, start + step)
        yield rows, unpack(packed[rows], n, dtype)


def _validate_packed(packed: Any, n: int) -> None:
    if packed.dtype != np.uint8 or packed.ndim < 1:
        raise WorkloadError(f"packed values are uint8 with at least one axis, not {packed.dtype}")
    if n < 0:
        raise WorkloadError(f"n={n} values: a row has 0 or more")
    if packed.shape[-1] != n_bytes(n):
        raise WorkloadError(
            f"n={n} values take {n_bytes(n)} bytes; the rows have {packed.shape[-1]}: give the "
            "number of values of a row before it was packed"
        )


def _validate_product(packed: Any, factor: Any, n: int, *, n_rows: int) -> None:
    _validate_packed(packed, n)
    if packed.ndim != 2 or factor.ndim != 2 or len(factor) != n_rows:
        raise WorkloadError(
            f"a packed matrix of shape {packed.shape} and a factor of shape {factor.shape} do not "
            f"fit: the factor has two axes and {n_rows} rows"
        )
    if factor.dtype not in (np.float32, np.float64):
        raise WorkloadError(f"the factor is {factor.dtype}: float32 or float64 is accepted")
    if _on_gpu(packed) != _on_gpu(factor):
        raise WorkloadError("one operand is on the GPU and the other is not: move one of them")


def _validate_chunks(x: da.Array) -> None:
    if any(math.isnan(size) for sizes in x.chunks for size in sizes):
        raise WorkloadError("x has chunks of unknown size; call x.compute_chunk_sizes() first")


def _some(sizes: tuple[int, ...]) -> str:
    return str(sizes) if len(sizes) <= 6 else f"({', '.join(map(str, sizes[:5]))}, ...)"


def _meta(x: da.Array) -> NDArray[np.uint8]:
    return np.empty((0,) * x.ndim, np.uint8)
