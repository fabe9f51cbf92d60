"""Genotypes, four to the byte: packing, unpacking, and float16 products on a GPU.

The layout is that of the Dask blog's "Large SVDs" (May 2020,
https://blog.dask.org/2020/05/13/large-svds): value j of a row is in bits ``2 * (j % 4)`` of byte
``j // 4`` of the packed row. Blocks are NumPy or CuPy arrays; results are of the same library.
"""

from __future__ import annotations

import functools
from typing import Any, cast

import dask.array as da
import numpy as np
from numpy.typing import DTypeLike, NDArray

from hpcdask.workloads import WorkloadError, array_module, check_dask, check_unmasked

PER_BYTE = 4
LARGEST = 3


def n_bytes(n: int) -> int:
    """Return the bytes that ``n`` packed values take."""
    return -(-n // PER_BYTE)


def pack(values: Any) -> Any:
    """Pack integers 0 to 3 along the last axis: (..., n) to (..., ceil(n / 4)) uint8."""
    if not _on_gpu(values):
        check_unmasked(values)
        values = np.asarray(values)
    _check_kind(values)
    bad = (values < 0) | (values > LARGEST)
    if bad.any():
        first = tuple(int(i) for i in np.unravel_index(int(bad.argmax()), bad.shape))
        raise WorkloadError(
            f"{int(bad.sum())} of {values.size} values are not 0 to 3, so two bits cannot hold "
            f"them; the first is {int(values[first])} at index {first}: mark what is missing or "
            "out of range before packing"
        )
    n = values.shape[-1]
    filled = _library(values).zeros((*values.shape[:-1], PER_BYTE * n_bytes(n)), np.uint8)
    filled[..., :n] = values
    words = filled.view(np.uint32)
    words *= np.uint32(0x01041040)  # moves the four values next to each other in the highest byte
    words >>= np.uint32(24)
    return words.astype(np.uint8)


def unpack(packed: Any, n: int, dtype: DTypeLike = np.uint8, out: Any = None) -> Any:
    """Undo `pack` for rows of n values, into ``out`` if given: contiguous, of any dtype."""
    if out is None:
        out = _library(packed).empty((*packed.shape[:-1], n), dtype)
    if _on_gpu(packed):
        spread(packed, 2, out)
    else:
        out[...] = _words()[packed].view(np.uint8)[..., :n]
    return out


@functools.cache
def _words() -> NDArray[np.uint32]:
    """Return the four values of each byte, as the bytes of a word."""
    values = np.arange(256, dtype=np.uint8)[:, None] >> (2 * np.arange(PER_BYTE, dtype=np.uint8))
    return (values & LARGEST).view(np.uint32)[:, 0]


def pack_array(x: da.Array) -> da.Array:
    """Pack an array of integers 0 to 3, (..., n), chunk by chunk: uint8, (..., ceil(n / 4)).

    Raise WorkloadError unless chunks of the last axis, but the last, are multiples of 4; other
    values than 0 to 3 raise it on the workers.
    """
    check_dask(x)
    _check_kind(x)
    if any(size % PER_BYTE for size in x.chunks[-1][:-1]):
        width = PER_BYTE * n_bytes(max(x.chunks[-1]))
        raise WorkloadError(
            "the chunks of the last axis are not multiples of 4, and a byte holds 4 values: "
            f"x = x.rechunk({{{x.ndim - 1}: {width}}})"
        )
    chunks = (*x.chunks[:-1], tuple(n_bytes(size) for size in x.chunks[-1]))
    meta = np.empty((0,) * x.ndim, np.uint8)
    return cast("da.Array", da.map_blocks(pack, x, chunks=chunks, dtype=np.uint8, meta=meta))


def _on_gpu(array: Any) -> bool:
    return type(array).__module__.partition(".")[0] == "cupy"


def _library(array: Any) -> Any:
    return array_module("cuda" if _on_gpu(array) else "cpu")


def _check_kind(x: Any) -> None:
    if x.dtype.kind not in "bui":
        raise WorkloadError(f"{x.dtype} values cannot be packed: integers or booleans can")


# --- on a GPU -------------------------------------------------------------------------------------


def spread(packed: Any, bits: int, out: Any) -> None:
    """Write the four values of each element, of so many bits, to the rows of a contiguous array.

    ``packed`` is uint8 with four 2-bit values, or uint32 with four bytes. CuPy's own cast of bytes
    takes three times as long.
    """
    packed = array_module("cuda").ascontiguousarray(packed)
    _spread_kernel()(packed, packed.shape[-1], out.shape[-1], bits, out, size=packed.size)


@functools.cache
def _spread_kernel() -> Any:
    return array_module("cuda").ElementwiseKernel(
        "raw W x, int64 width, int64 n, int32 bits",
        "raw T y",
        """
        long long first = 4 * i, count = 4;
        if (n % 4) {  // a division of long integers takes longer than the rest
            const long long row = i / width, column = 4 * (i - row * width);
            first = row * n + column;
            count = min(count, n - column);
        }
        const unsigned int word = x[i], mask = (1u << bits) - 1;
        for (int j = 0; j < 4; ++j)
            if (j < count) y[first + j] = T((int)(word >> (bits * j) & mask));
        """,
        "hpcdask_spread",
    )


def multiply_float16(matrix: Any, factor: Any, *, transposed: bool = False) -> Any:
    """Multiply a contiguous float16 matrix, or its transpose, and a float32 factor, in float32.

    The factor is split into two float16 digits, so that the tensor cores multiply; sums of products
    are float32. Columns with NaN or infinity give NaN.
    """
    cupy = array_module("cuda")
    (m, n), l = matrix.shape, factor.shape[1]  # noqa: E741
    top = cupy.maximum(abs(factor).max(axis=0), np.finfo(np.float32).tiny)
    scale = cupy.exp2(cupy.ceil(cupy.log2(top)))
    scaled, digit = factor / scale, np.float32(2048)
    digits = cupy.empty((len(factor), 2 * l), np.float16)
    digits[:, :l] = scaled
    digits[:, l:] = (scaled - digits[:, :l]) * digit
    out = cupy.empty((n if transposed else m, 2 * l), np.float32)
    one, zero = np.ones(1, np.float32), np.zeros(1, np.float32)
    # cuBLAS counts by columns, so these are the transposes of the product and its factors. CuPy's
    # own product of float16 is float16, which overflows.
    blas, half, single, compute_float32 = cupy.cuda.cublas, 2, 0, 68
    blas.gemmEx(
        cupy.cuda.Device().cublas_handle, blas.CUBLAS_OP_N,
        blas.CUBLAS_OP_T if transposed else blas.CUBLAS_OP_N, 2 * l, len(out), len(factor),
        one.ctypes.data, digits.data.ptr, half, 2 * l, matrix.data.ptr, half, n,
        zero.ctypes.data, out.data.ptr, single, 2 * l, compute_float32, blas.CUBLAS_GEMM_DEFAULT,
    )  # fmt: skip
    return (out[:, :l] + out[:, l:] / digit) * scale
