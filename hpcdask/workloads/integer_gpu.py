"""Products of small integers on a GPU: launches ``integer_kernels.cu``.

For workers only. A matrix is of uint8, or of 2-bit values packed four to the byte. Floats made of
it would take four to eight times the memory, once more to write and once to read.

On an H200, both products of a gigabyte of bytes with 20 columns take 1.5 ms in float32 and 3.2 ms
in float64, if a row is a multiple of 8 bytes; else some three times as long.

Blocks are CuPy arrays. The tensor cores of compute capability 8.0 (A100) and later have the
instruction that the products need; :func:`can_multiply` tells.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any

import numpy as np

from hpcdask.workloads import array_module

# Digits to the base 256: 24 bits and 53 bits need so many.
N_DIGITS = {"float32": 3, "float64": 7}
# Products of the largest value by -128 that a 32-bit sum holds, in whole chunks.
MAX_TERMS = {
    per_byte: (2**31 - 1) // (largest * 128) // 128 * 128
    for per_byte, largest in ((4, 3), (1, 255))
}
# These five are also written in the kernels.
MAX_TILES = 8
TILE_COLUMNS = 8
CHUNK = {4: 128, 1: 32}  # terms of a sum that are staged together
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


def multiply(matrix: Any, right: Any, per_byte: int = 1) -> Any:
    """Return a uint8 matrix (m, b), unpacked, times ``right`` (n, l), float32 or float64.

    n is b, or for four packed values per byte between 4b - 3 and 4b. The result is float64, (m, l).
    Elements of ``right`` are rounded by at most 1.2e-7 (float32) or 2.8e-17 (float64) of the
    largest magnitude of their column, the sums of products are exact, hence always the same, and a
    column with NaN or infinity gives NaN.
    """
    cupy = array_module("cuda")
    rows = _Matrix.of(matrix, per_byte)
    digits = _Digits.of(right, rows)
    kernel = digits.kernel("multiply")
    out = cupy.zeros((rows.n_rows, right.shape[1]))
    step = max(1, SCRATCH_NBYTES // (4 * digits.width))
    for left_end in range(0, len(right), MAX_TERMS[per_byte]):
        right_end = min(len(right), left_end + MAX_TERMS[per_byte])
        split, n_chunks = digits.split(left_end, right_end)
        for start in range(0, rows.n_rows, step):
            part = rows.part(start, start + step, left_end, right_end)
            sums = cupy.empty((part.n_rows, digits.width), np.int32)
            n_blocks = math.ceil(part.n_rows / BLOCK_ROWS) * digits.groups
            args = *part.args, split, n_chunks, digits.groups, sums
            kernel((n_blocks,), (BLOCK_THREADS,), args)
            digits.combine(sums, out[start : start + step])
    return out


def multiply_transposed(matrix: Any, left: Any, n: int, per_byte: int = 1) -> Any:
    """Return the transpose of ``matrix``, unpacked to n columns, times ``left`` (m, l).

    The result is float64, (n, l), as exact as `multiply`.
    """
    cupy = array_module("cuda")
    rows = _Matrix.of(matrix, per_byte)
    digits = _Digits.of(left, rows)
    kernel = digits.kernel("multiply_transposed")
    out = cupy.zeros((n, left.shape[1]))
    n_column_blocks = math.ceil(n / BLOCK_ROWS) * digits.groups
    n_slots = cupy.cuda.Device().attributes["MultiProcessorCount"] * BLOCKS_PER_SM
    step = max(1, min(SCRATCH_NBYTES // digits.width, MAX_TERMS[per_byte]))
    for start in range(0, rows.n_rows, step):
        part = rows.part(start, start + step)
        split, n_chunks = digits.split(start, start + part.n_rows)
        n_cuts = min(n_chunks, math.ceil(N_ROUNDS * n_slots / n_column_blocks))
        chunks_per_block = math.ceil(n_chunks / n_cuts)
        sums = cupy.zeros((n, digits.width), np.int32)
        kernel(
            (n_column_blocks, math.ceil(n_chunks / chunks_per_block)),
            (BLOCK_THREADS,),
            (*part.args, n, split, n_chunks, chunks_per_block, digits.groups, sums),
        )
        digits.combine(sums, out)
    return out


@dataclass(frozen=True)
class _Matrix:
    """Rows whose bytes are next to each other."""

    array: Any
    per_byte: int
    aligned: bool

    @classmethod
    def of(cls, array: Any, per_byte: int) -> _Matrix:
        if array.strides[1] != 1 and array.shape[1] > 1:
            array = array_module("cuda").ascontiguousarray(array)
        aligned = all(x % 8 == 0 for x in (array.data.ptr, array.strides[0], array.shape[1]))
        return cls(array, per_byte, aligned)

    @property
    def n_rows(self) -> int:
        return int(self.array.shape[0])

    @property
    def args(self) -> tuple[Any, ...]:
        return self.array, self.array.strides[0], *self.array.shape

    def part(self, top: int, bottom: int, first: int = 0, last: int | None = None) -> _Matrix:
        columns = slice(first // self.per_byte, last and math.ceil(last / self.per_byte))
        return replace(self, array=self.array[top:bottom, columns])


@dataclass(frozen=True)
class _Digits:
    """A factor that is taken apart into digits, and the products of the digits put together.

    The digits of all columns are cut into tiles of eight, and those into ``groups`` of ``tiles``.
    """

    factor: Any  # float64
    top: Any  # largest magnitude of each column
    matrix: _Matrix  # that it is to be multiplied with
    n_digits: int
    groups: int
    tiles: int

    @classmethod
    def of(cls, factor: Any, matrix: _Matrix) -> _Digits:
        cupy, columns = array_module("cuda"), factor.shape[1]
        n_digits = N_DIGITS[factor.dtype.name]
        n_tiles = math.ceil(columns * n_digits / TILE_COLUMNS)
        groups = math.ceil(n_tiles / MAX_TILES)
        factor = cupy.ascontiguousarray(factor, dtype=np.float64)
        top = cupy.zeros(columns)
        digits = cls(factor, top, matrix, n_digits, groups, math.ceil(n_tiles / groups))
        n_blocks = max(64, math.ceil(columns / BLOCK_THREADS))
        args = factor, *factor.shape, top
        digits.kernel("column_max")((n_blocks,), (BLOCK_THREADS,), args)
        return digits

    @property
    def width(self) -> int:
        return self.groups * self.tiles * TILE_COLUMNS

    def kernel(self, name: str) -> Any:
        return _kernel(name, self.tiles, self.matrix.aligned, self.matrix.per_byte)

    def split(self, start: int, stop: int) -> tuple[Any, int]:
        """Return the digits of some rows, and how many chunks of terms they are."""
        rows, chunk = self.factor[start:stop], CHUNK[self.matrix.per_byte]
        n_chunks = math.ceil(len(rows) / chunk)
        digits = array_module("cuda").zeros(n_chunks * chunk * self.width, np.int8)
        self.kernel("split")(
            (math.ceil(rows.size / BLOCK_THREADS),),
            (BLOCK_THREADS,),
            (rows, *rows.shape, self.top, self.n_digits, n_chunks, digits),
        )
        return digits, n_chunks

    def combine(self, sums: Any, out: Any) -> None:
        """Add to ``out`` what the digits' products ``sums`` amount to."""
        self.kernel("combine")(
            (math.ceil(out.size / BLOCK_THREADS),),
            (BLOCK_THREADS,),
            (sums, sums.shape[1], self.top, *out.shape, self.n_digits, out),
        )


@functools.cache
def _kernel(name: str, tiles: int, aligned: bool, per_byte: int) -> Any:
    # CuPy compiles the source once for each set of options and keeps the result on disk.
    source = files("hpcdask.workloads").joinpath("integer_kernels.cu").read_text(encoding="utf-8")
    options = (f"-DTILES={tiles}", f"-DALIGNED={int(aligned)}", f"-DPER_BYTE={per_byte}")
    return array_module("cuda").RawKernel(source, name, options)
