"""Packing and unpacking of NumPy arrays, for :mod:`hpcdask.workloads.packing`.

Per core, tiles in the second-level cache are packed at 4 and unpacked at 2 billion values per
second. A table of 256 words, looked up once for each byte, limits the unpacking; the passes over
the values limit the packing.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcdask.workloads import WorkloadError

__all__ = ["PER_BYTE", "n_bytes", "pack", "padded", "unpack", "validate_values"]

PER_BYTE = 4
LARGEST = 3
# So many values are packed or unpacked at a time: few enough that the passes over them stay in
# a second-level cache, enough that calling NumPy takes little of the time.
TILE = 1 << 18


def n_bytes(n: int) -> int:
    """Return the bytes that ``n`` values take."""
    return -(-n // PER_BYTE)


def padded(n: int) -> int:
    """Return ``n`` rounded up to whole bytes of values."""
    return PER_BYTE * n_bytes(n)


@functools.cache
def _table() -> NDArray[np.uint32]:
    """The four values of each byte, as the bytes of a word."""
    values = np.arange(256, dtype=np.uint8)[:, None] >> (2 * np.arange(PER_BYTE, dtype=np.uint8))
    return (values & LARGEST).view(np.uint32)[:, 0]


def _tiles(n_rows: int, n: int) -> Iterator[tuple[slice, slice]]:
    width = min(padded(n), TILE) or PER_BYTE
    height = TILE // width
    for row, column in itertools.product(range(0, n_rows, height), range(0, n, width)):
        yield slice(row, min(row + height, n_rows)), slice(column, min(column + width, n))


def pack(values: NDArray[Any]) -> NDArray[np.uint8]:
    """Pack integers or booleans 0 to 3 of shape (..., n) into (..., ceil(n / 4)) bytes."""
    *others, n = values.shape
    out = np.empty((*others, n_bytes(n)), np.uint8)
    n_rows = math.prod(others)
    flat, flat_out = values.reshape(n_rows, n), out.reshape(n_rows, out.shape[-1])
    buffer = np.empty(TILE, np.uint8)
    for rows, columns in _tiles(*flat.shape):
        tile = flat[rows, columns]
        validate_values(tile, values)
        height, width = tile.shape
        filled = buffer[: height * padded(width)].reshape(height, padded(width))
        filled[:, :width] = tile
        filled[:, width:] = 0
        words = filled.view(np.uint32)
        # Moves the four values next to each other in the highest byte.
        np.multiply(words, 0x01041040, out=words)
        np.right_shift(words, 24, out=words)
        flat_out[rows, columns.start // PER_BYTE : n_bytes(columns.stop)] = words
    return out


def unpack(packed: NDArray[np.uint8], out: NDArray[Any]) -> NDArray[Any]:
    """Unpack (..., ceil(n / 4)) bytes into values of shape (..., n)."""
    *others, n = out.shape
    n_rows = math.prod(others)
    flat, flat_out = packed.reshape(n_rows, packed.shape[-1]), out.reshape(n_rows, n)
    buffer = np.empty(TILE // PER_BYTE, np.uint32)
    for rows, columns in _tiles(*flat_out.shape):
        tile = flat[rows, columns.start // PER_BYTE : n_bytes(columns.stop)]
        words = buffer[: tile.size].reshape(tile.shape)
        np.take(_table(), tile, out=words, mode="clip")  # "raise" would copy through a buffer
        flat_out[rows, columns] = words.view(np.uint8)[:, : columns.stop - columns.start]
    return out


def validate_values(tile: Any, values: Any) -> None:
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
