"""Packed matrices on a GPU: launches :mod:`hpcdask.workloads.packing_kernels`, on workers only.

Blocks are CuPy arrays. The tensor cores of compute capability 8.0 (A100) and later have the
instruction that the products need; :func:`can_multiply` tells.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpcdask.workloads import WorkloadError, array_module
from hpcdask.workloads.packing_kernels import INTRINSICS, KERNELS

__all__ = [
    "can_multiply",
    "multiply",
    "multiply_transposed",
    "pack_words",
    "spread_bytes",
]

# Digits to the base 256: 24 bits and 53 bits need so many.
N_DIGITS = {"float32": 3, "float64": 7}
# Products of 3 by -128 that a 32-bit sum holds.
MAX_TERMS = (2**31 - 1) // (3 * 128)
# These five are also written in the kernels.
MAX_TILES = 8
TILE_COLUMNS = 8
CHUNK = 128  # terms of a sum that are staged together
BLOCK_THREADS = 128
BLOCK_ROWS = 256  # of the result
BLOCKS_PER_SM = 2
# The transposed product is cut along its sums until the device has this many rounds of blocks:
# the last round is then seldom empty, and each block still sums many more terms than it adds up
# with the other blocks.
N_ROUNDS = 4
# Bounds what is held for some rows of the matrix: their 32-bit sums, or their digits.
SCRATCH_NBYTES = 1 << 26


def can_multiply() -> bool:
    """Tell whether the current device has the instruction that the products are made of."""
    return int(array_module("cuda").cuda.Device().compute_capability) >= 80


def multiply(packed: Any, right: Any) -> Any:
    """Return unpacked ``packed`` times ``right``.

    Parameters
    ----------
    packed
        Shape (m, b), uint8.
    right
        Shape (n, l), float32 or float64, with n between 4b - 3 and 4b.

    Returns
    -------
    cupy.ndarray
        Shape (m, l), float64.

    Raises
    ------
    WorkloadError
        More than 5.6 million columns.
    """
    if len(right) > MAX_TERMS:
        raise WorkloadError(
            f"{len(right)} columns are too many for the 32-bit sums of the GPU: split them into "
            f"blocks of at most {MAX_TERMS}, multiply each and add the products"
        )
    cupy = array_module("cuda")
    matrix = _Packed.of(packed)
    digits = _Digits.of(right, aligned=matrix.aligned)
    layout, kernel = digits.layout, digits.kernel("multiply")
    out = cupy.zeros((matrix.n_rows, layout.columns))
    split, n_chunks = digits.split(0, len(right))
    step = max(1, SCRATCH_NBYTES // (4 * layout.width))
    for start in range(0, matrix.n_rows, step):
        rows = matrix.rows(start, start + step)
        sums = cupy.empty((rows.n_rows, layout.width), np.int32)
        n_blocks = math.ceil(rows.n_rows / BLOCK_ROWS) * layout.groups
        kernel((n_blocks,), (BLOCK_THREADS,), (*rows.args, split, n_chunks, layout.groups, sums))
        digits.combine(sums, out[start : start + step])
    return out


def multiply_transposed(packed: Any, left: Any, n: int) -> Any:
    """Return the transpose of unpacked ``packed`` times ``left``.

    Parameters
    ----------
    packed
        Shape (m, ceil(n / 4)), uint8.
    left
        Shape (m, l), float32 or float64.
    n
        Columns of the unpacked matrix.

    Returns
    -------
    cupy.ndarray
        Shape (n, l), float64.
    """
    cupy = array_module("cuda")
    matrix = _Packed.of(packed)
    digits = _Digits.of(left, aligned=matrix.aligned)
    layout, kernel = digits.layout, digits.kernel("multiply_transposed")
    out = cupy.zeros((n, layout.columns))
    n_column_blocks = math.ceil(n / BLOCK_ROWS) * layout.groups
    n_slots = cupy.cuda.Device().attributes["MultiProcessorCount"] * BLOCKS_PER_SM
    step = max(1, min(SCRATCH_NBYTES // layout.width, MAX_TERMS))
    for start in range(0, matrix.n_rows, step):
        rows = matrix.rows(start, start + step)
        split, n_chunks = digits.split(start, start + rows.n_rows)
        n_cuts = min(n_chunks, math.ceil(N_ROUNDS * n_slots / n_column_blocks))
        chunks_per_block = math.ceil(n_chunks / n_cuts)
        sums = cupy.zeros((n, layout.width), np.int32)
        kernel(
            (n_column_blocks, math.ceil(n_chunks / chunks_per_block)),
            (BLOCK_THREADS,),
            (*rows.args, n, split, n_chunks, chunks_per_block, layout.groups, sums),
        )
        digits.combine(sums, out)
    return out


@dataclass(frozen=True)
class _Packed:
    """Rows of a packed matrix whose bytes are next to each other."""

    array: Any
    aligned: bool

    @classmethod
    def of(cls, array: Any) -> _Packed:
        if array.strides[1] != 1 and array.shape[1] > 1:
            array = array_module("cuda").ascontiguousarray(array)
        aligned = all(x % 8 == 0 for x in (array.data.ptr, array.strides[0], array.shape[1]))
        return cls(array, aligned)

    @property
    def n_rows(self) -> int:
        return int(self.array.shape[0])

    @property
    def args(self) -> tuple[Any, ...]:
        return self.array, self.array.strides[0], *self.array.shape

    def rows(self, start: int, stop: int) -> _Packed:
        return _Packed(self.array[start:stop], self.aligned)


@dataclass(frozen=True)
class _Layout:
    """How the digits of all columns are cut into tiles of eight, and those into groups."""

    columns: int
    n_digits: int

    @property
    def n_tiles(self) -> int:
        return math.ceil(self.columns * self.n_digits / TILE_COLUMNS)

    @property
    def groups(self) -> int:
        return math.ceil(self.n_tiles / MAX_TILES)

    @property
    def tiles(self) -> int:
        return math.ceil(self.n_tiles / self.groups)

    @property
    def width(self) -> int:
        return self.groups * self.tiles * TILE_COLUMNS


@dataclass(frozen=True)
class _Digits:
    """A factor that is taken apart into digits, and the products of the digits put together."""

    factor: Any  # float64
    top: Any  # largest magnitude of each column
    layout: _Layout
    aligned: bool  # the matrix that it is to be multiplied with

    @classmethod
    def of(cls, factor: Any, *, aligned: bool) -> _Digits:
        cupy = array_module("cuda")
        layout = _Layout(factor.shape[1], N_DIGITS[factor.dtype.name])
        factor = cupy.ascontiguousarray(factor, dtype=np.float64)
        digits = cls(factor, cupy.zeros(layout.columns), layout, aligned)
        n_blocks = max(64, math.ceil(layout.columns / BLOCK_THREADS))
        args = factor, *factor.shape, digits.top
        digits.kernel("column_max")((n_blocks,), (BLOCK_THREADS,), args)
        return digits

    def kernel(self, name: str) -> Any:
        return _kernel(name, self.layout.tiles, self.aligned)

    def split(self, start: int, stop: int) -> tuple[Any, int]:
        """Return the digits of some rows, and how many chunks of terms they are."""
        rows, layout = self.factor[start:stop], self.layout
        n_chunks = math.ceil(len(rows) / CHUNK)
        digits = array_module("cuda").zeros(n_chunks * CHUNK * layout.width, np.int8)
        self.kernel("split")(
            (math.ceil(rows.size / BLOCK_THREADS),),
            (BLOCK_THREADS,),
            (rows, *rows.shape, self.top, layout.n_digits, n_chunks, digits),
        )
        return digits, n_chunks

    def combine(self, sums: Any, out: Any) -> None:
        """Add to ``out`` what the digits' products ``sums`` amount to."""
        self.kernel("combine")(
            (math.ceil(out.size / BLOCK_THREADS),),
            (BLOCK_THREADS,),
            (sums, sums.shape[1], self.top, *out.shape, self.layout.n_digits, out),
        )


@functools.cache
def _kernel(name: str, tiles: int, aligned: bool) -> Any:
    # CuPy compiles the source once for each set of options and keeps the result on disk.
    options = (f"-DTILES={tiles}", f"-DALIGNED={int(aligned)}")
    return array_module("cuda").RawKernel(INTRINSICS + KERNELS, name, options)


@functools.cache
def pack_words() -> Any:
    """Return the kernel that makes one byte of four, each 0 to 3, in a 32-bit word."""
    return array_module("cuda").ElementwiseKernel(
        "uint32 x", "uint8 y", "y = (x * 0x01041040u) >> 24", "hpcdask_pack"
    )


@functools.cache
def spread_bytes() -> Any:
    """Return the kernel that makes a 32-bit word of four values of each packed byte."""
    return array_module("cuda").ElementwiseKernel(
        "uint8 x",
        "uint32 y",
        "y = (x | x << 12) & 0x000F000Fu; y = (y | y << 6) & 0x03030303u;",
        "hpcdask_unpack",
    )
