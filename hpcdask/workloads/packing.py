"""Genotypes, four to the byte: packing, and products that never hold the unpacked matrix.

The matrix of the Dask blog's "Large SVDs" (May 2020, https://blog.dask.org/2020/05/13/large-svds)
has the values 0 to 3, two bits each, and the layout is the blog's. Value j of a row is in bits
``2 * (j % 4)`` of byte ``j // 4`` of the packed row; the last byte is filled up with zeros. A
quarter of the memory is held, moved and read, and a randomised SVD needs no more of the matrix than
the two products here.

On a CPU the products unpack a tile at a time and leave the rest to BLAS. Per core, tiles in the
second-level cache are packed at 4 and unpacked at 2 billion values per second: a table of 256
words, looked up once for each byte, limits the unpacking, the passes over the values the packing.
 On a GPU they run on the
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

from hpcdask.workloads import WorkloadError, array_module, check_dask, check_sizes, check_unmasked

PER_BYTE = 4
LARGEST = 3
# So many values are packed or unpacked at a time: few enough that the passes over them stay in
# a second-level cache, enough that calling NumPy takes little of the time.
TILE = 1 << 18
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
    _validate_kind(values, f"{values.dtype} values")
    if not _on_gpu(values):
        return _pack_host(values)
    _validate_values(values, values)
    n = values.shape[-1]
    words = array_module("cuda").zeros((*values.shape[:-1], _padded(n)), np.uint8)
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
        return _unpack_host(packed, out)
    xp = array_module("cuda")
    values = _spread_bytes()(xp.ascontiguousarray(packed)).view(np.uint8)[..., :n]
    return xp.ascontiguousarray(values, dtype=dtype)


def multiply(packed: Any, right: Any, n: int) -> Any:
    """Multiply an unpacked matrix (m x n) and ``right`` (n x l), float32 or float64, as the result.

    On integer tensor cores, it is as exact as `hpcdask.workloads.integer_gpu.multiply`.
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
    _validate_kind(x, f"a {x.dtype} array")
    check_sizes(x)
    if any(size % PER_BYTE for size in x.chunks[-1][:-1]):
        raise WorkloadError(
            f"the chunks {_some(x.chunks[-1])} of the last axis are not multiples of 4, and a byte "
            f"holds 4 values: x = x.rechunk({{{x.ndim - 1}: {_padded(max(x.chunks[-1]))}}})"
        )
    chunks = (*x.chunks[:-1], tuple(_n_bytes(size) for size in x.chunks[-1]))
    return cast("da.Array", da.map_blocks(pack, x, chunks=chunks, dtype=np.uint8, meta=_meta(x)))


def unpack_array(packed: da.Array, n: int, dtype: DTypeLike = np.uint8) -> da.Array:
    """Undo `pack_array` for rows of n values, one Dask task per chunk."""
    check_sizes(packed)
    _validate_packed(packed, n)
    bounds = [0, *(min(PER_BYTE * stop, n) for stop in itertools.accumulate(packed.chunks[-1]))]
    sizes = tuple(stop - start for start, stop in itertools.pairwise(bounds))
    how: dict[str, Any] = {"sizes": sizes, "out_dtype": np.dtype(dtype), "dtype": dtype}
    how |= {"chunks": (*packed.chunks[:-1], sizes), "meta": _meta(packed).astype(dtype)}
    return cast("da.Array", da.map_blocks(_unpack_block, packed, **how))


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


def _validate_kind(x: Any, what: str) -> None:
    if x.ndim < 1 or x.dtype.kind not in "bui":
        raise WorkloadError(
            f"{what} with {x.ndim} axes cannot be packed: integers or booleans with at "
            "least one axis can"
        )


def _validate_packed(packed: Any, n: int) -> None:
    if packed.dtype != np.uint8 or packed.ndim < 1:
        raise WorkloadError(f"packed values are uint8 with at least one axis, not {packed.dtype}")
    if n < 0:
        raise WorkloadError(f"n={n} values: a row has 0 or more")
    if packed.shape[-1] != _n_bytes(n):
        raise WorkloadError(
            f"n={n} values take {_n_bytes(n)} bytes; the rows have {packed.shape[-1]}: give the "
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


def _some(sizes: tuple[int, ...]) -> str:
    return str(sizes) if len(sizes) <= 6 else f"({', '.join(map(str, sizes[:5]))}, ...)"


def _meta(x: da.Array) -> NDArray[np.uint8]:
    return np.empty((0,) * x.ndim, np.uint8)


# --- NumPy ----------------------------------------------------------------------------------------


def _n_bytes(n: int) -> int:
    """Return the bytes that ``n`` values take."""
    return -(-n // PER_BYTE)


def _padded(n: int) -> int:
    """Return ``n`` rounded up to whole bytes of values."""
    return PER_BYTE * _n_bytes(n)


@functools.cache
def _table() -> NDArray[np.uint32]:
    """The four values of each byte, as the bytes of a word."""
    values = np.arange(256, dtype=np.uint8)[:, None] >> (2 * np.arange(PER_BYTE, dtype=np.uint8))
    return (values & LARGEST).view(np.uint32)[:, 0]


def _places(n_rows: int, n: int) -> Iterator[tuple[slice, slice]]:
    width = min(_padded(n), TILE) or PER_BYTE
    height = TILE // width
    for row, column in itertools.product(range(0, n_rows, height), range(0, n, width)):
        yield slice(row, min(row + height, n_rows)), slice(column, min(column + width, n))


def _pack_host(values: NDArray[Any]) -> NDArray[np.uint8]:
    """Pack integers or booleans 0 to 3 of shape (..., n) into (..., ceil(n / 4)) bytes."""
    *others, n = values.shape
    out = np.empty((*others, _n_bytes(n)), np.uint8)
    n_rows = math.prod(others)
    flat, flat_out = values.reshape(n_rows, n), out.reshape(n_rows, out.shape[-1])
    buffer = np.empty(TILE, np.uint8)
    for rows, columns in _places(*flat.shape):
        tile = flat[rows, columns]
        _validate_values(tile, values)
        height, width = tile.shape
        filled = buffer[: height * _padded(width)].reshape(height, _padded(width))
        filled[:, :width] = tile
        filled[:, width:] = 0
        words = filled.view(np.uint32)
        # Moves the four values next to each other in the highest byte.
        np.multiply(words, 0x01041040, out=words)
        np.right_shift(words, 24, out=words)
        flat_out[rows, columns.start // PER_BYTE : _n_bytes(columns.stop)] = words
    return out


def _unpack_host(packed: NDArray[np.uint8], out: NDArray[Any]) -> NDArray[Any]:
    """Unpack (..., ceil(n / 4)) bytes into values of shape (..., n)."""
    *others, n = out.shape
    n_rows = math.prod(others)
    flat, flat_out = packed.reshape(n_rows, packed.shape[-1]), out.reshape(n_rows, n)
    buffer = np.empty(TILE // PER_BYTE, np.uint32)
    for rows, columns in _places(*flat_out.shape):
        tile = flat[rows, columns.start // PER_BYTE : _n_bytes(columns.stop)]
        words = buffer[: tile.size].reshape(tile.shape)
        np.take(_table(), tile, out=words, mode="clip")  # "raise" would copy through a buffer
        flat_out[rows, columns] = words.view(np.uint8)[:, : columns.stop - columns.start]
    return out


def _validate_values(tile: Any, values: Any) -> None:
    """Raise WorkloadError if a value of ``tile`` is not 0 to 3, and say where in ``values``.

    Both are NumPy or CuPy arrays, and the tile is a part of the values or all of them.
    """
    if tile.size == 0 or (tile.max() <= LARGEST and tile.min() >= 0):
        return
    bad = (values < 0) | (values > LARGEST)
    first = tuple(int(i) for i in np.unravel_index(int(bad.argmax()), bad.shape))
    raise WorkloadError(
        f"{int(bad.sum())} of {values.size} values are not 0 to 3, so two bits cannot hold them; "
        f"the first is {int(values[first])} at index {first}: mark what is missing or out of "
        "range before packing"
    )
