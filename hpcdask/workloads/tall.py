"""What workers do with the row chunks of a tall matrix, for `hpcdask.workloads.svd`.

A matrix A has chunks Aᵢ of some rows, and Yᵢ = Aᵢ · basis. Sums over the chunks travel as a plain
tuple ``(z, gram, y_sums, parts)``, whose arrays distributed can send from device to device:

- from Gram matrices: ``z`` = Σ AᵢᵀYᵢ (n, width), ``gram`` = Σ YᵢᵀYᵢ, ``y_sums`` = Σ 1ᵀYᵢ. Where
  the basis is the identity, ``z`` is ``gram``, and None here;
- from QR: only ``parts``, a list of `Part`.

A basis is a tuple ``(matrix, by_qr)``. A matrix None is the identity.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpcdask.workloads import (
    Device,
    WorkloadError,
    array_module,
    check_unmasked,
    integer_gpu,
    to_host,
)
from hpcdask.workloads.compressed import CompressedBlock, decompress
from hpcdask.workloads.packing import multiply, multiply_transposed, unpack

# Integers are cast to floats tile by tile: this bounds the scratch memory, and keeps the CPU in
# its cache.
TILE_NBYTES: dict[Device, int] = {"cuda": 1 << 28, "cpu": 1 << 22}
# Each tile updates n x l sums, which takes as long as reading about l rows.
MIN_TILE_ROWS = 64

Floats = NDArray[np.floating[Any]]
Prepare = Callable[[Any], Any]
Basis = tuple[Any, bool]


class Part(NamedTuple):
    """Of a chunk, by its first row: R and QᵀA, where Y = QR, and the sums of the columns of Q."""

    first: int
    r: Floats
    c: Floats | None
    q_sums: Floats


@dataclass(frozen=True)
class Rows:
    """How the chunks of ``n`` columns on a device become floats.

    They are multiplied in the float type ``work``; ``prepare`` is applied to each tile of rows;
    ``packed`` chunks are 2-bit values, four in a byte.
    """

    n: int
    work: str
    device: Device
    prepare: Prepare | None = None
    packed: bool = False

    def tiles(self, block: Any, dtype: str) -> Iterator[Any]:
        """Yield some rows after the other as floats; each is gone when the next is asked for."""
        width = self.n * np.dtype(dtype).itemsize
        step = max(MIN_TILE_ROWS, TILE_NBYTES[self.device] // width)
        # Made once: workers give freed memory back, and fresh pages cost more than the products.
        as_it_is = block.dtype == dtype and not self.packed and self.prepare is None
        height = 0 if as_it_is else min(step, block.shape[0])
        room = array_module(self.device).empty((height, self.n), dtype)
        for start in range(0, block.shape[0], step):
            tile = block[start : start + step]
            floats = room[: tile.shape[0]]
            if self.packed:
                # Without a scaling, and a GPU, values go where they are needed as floats
                into = floats if self.device == "cpu" and self.prepare is None else None
                tile = unpack(tile, self.n, out=into)
            if self.prepare is not None:
                if isinstance(
                    tile, np.ndarray
                ):  # else it could rewrite the chunk; CuPy cannot say so
                    tile = tile.view()
                    tile.flags.writeable = False
                tile = self.prepare(tile)
                _check_prepared(tile, floats.shape)
            if tile.dtype != dtype:
                floats[...] = tile
                tile = floats
            yield tile

    def fused(self, block: Any) -> bool:
        """Whether small integers are multiplied as they are; CPUs do better with tiles."""
        if self.device == "cpu" or self.prepare is not None or not block.shape[0]:
            return False
        return self.packed or (block.dtype == np.uint8 and integer_gpu.can_multiply())

    def _multiply(self, block: Any, right: Any) -> Any:
        if self.packed:
            return multiply(block, right, self.n)
        return integer_gpu.multiply(block, right).astype(right.dtype, copy=False)

    def _multiply_transposed(self, block: Any, left: Any) -> Any:
        if self.packed:
            return multiply_transposed(block, left, self.n)
        return integer_gpu.multiply_transposed(block, left, self.n)

    def products(self, block: Any, basis: Any) -> tuple[Any, Any, Any]:
        """Return z, or None if it is gram, gram and y_sums of a chunk, float64."""
        xp = array_module(self.device)
        if basis is not None and self.fused(block):
            y = self._multiply(block, basis)
            z = self._multiply_transposed(block, y).astype(np.float64, copy=False)
            return z, *_sums_of(y, xp)
        width = self.n if basis is None else basis.shape[1]
        gram, y_sums = xp.zeros((width, width)), xp.zeros(width)
        if basis is not None:
            zt, part = xp.zeros((width, self.n)), xp.empty((width, self.n), self.work)
        for tile in self.tiles(block, self.work):
            y = tile if basis is None else tile @ basis
            if basis is not None:
                scaled, scale = _scaled(y, xp)
                xp.matmul(scaled.T, tile, out=part)  # on a CPU, tile.T @ y takes twice as long
                zt += part if scale is None else part * scale
            gram_of_tile, sums_of_tile = _sums_of(y, xp)
            gram += gram_of_tile
            y_sums += sums_of_tile
        return (None if basis is None else zt.T), gram, y_sums

    def times(self, block: Any, right: Any) -> Any:
        """Return a chunk times (n, l), float64."""
        xp = array_module(self.device)
        if right is None and self.prepare is None and not self.packed:
            return block[:].astype(np.float64, copy=False)  # rows that are being read as well
        if right is None:
            tiles = [tile.copy() for tile in self.tiles(block, "float64")]
            return xp.concatenate(tiles) if tiles else xp.empty((0, self.n))
        if self.fused(block):
            return self._multiply(block, xp.asarray(right, np.float64))
        # always in float64: what undoes the scale of Ω has opposite signs, which cancel
        tiles = [tile @ right for tile in self.tiles(block, "float64")]
        return xp.concatenate(tiles) if tiles else xp.empty((0, right.shape[1]))

    def transposed_times(self, block: Any, q: Any) -> Any:
        """Return (l, rows) times a chunk, float64."""
        out, start = 0, 0
        for tile in self.tiles(block, "float64"):
            out = out + q[start : start + tile.shape[0]].T @ tile
            start += tile.shape[0]
        return out


def _check_prepared(tile: Any, shape: tuple[int, ...]) -> None:
    found, dtype = getattr(tile, "shape", None), getattr(tile, "dtype", None)
    if found != shape or dtype is None or dtype.kind not in "buif":
        what = type(tile).__name__ if found is None else f"{dtype} of shape {found}"
        raise WorkloadError(
            f"prepare returned {what} for rows of shape {shape}: real numbers of that shape are "
            "accepted"
        )
    check_unmasked(tile)


def _scaled(y: Any, xp: Any) -> tuple[Any, Any]:
    """Return y over a power of two, float64, so that float32 holds its products; None for 1."""
    if y.dtype != np.float32:
        return y, None
    exponent = xp.clip(xp.frexp(xp.abs(y).max())[1], -126, 126)
    return xp.ldexp(y, -exponent), xp.ldexp(xp.float64(1), exponent)


def _sums_of(y: Any, xp: Any) -> tuple[Any, Any]:
    """Return the Gram matrix of a tall matrix and the sums of its columns, float64."""
    y = y.astype(np.float64, copy=False)
    return y.T @ y, _column_sums(y, xp)


def _column_sums(y: Any, xp: Any) -> Any:
    # On a GPU, y.sum(axis=0) takes a hundred times longer.
    return xp.ones(len(y)) @ y


def products(
    block: Any, start: Any, basis: Any = None, *, rows: Rows, width: int, seed: int | None
) -> tuple[Any, Any, Any, list[Part]]:
    """Return the sums of one chunk, which holds finite values of the library that was said."""
    block, first = _chunk(block, rows.device), int(only(start)[0])
    matrix, by_qr = basis_of(basis, rows, width, seed)
    if by_qr:
        # A chunk without rows, as filters leave them, begins at the row where the next one does
        parts = [_part(block, first, matrix, rows)] if block.shape[0] else []
        return None, None, None, parts
    xp = array_module(rows.device)
    matrix = None if matrix is None else xp.asarray(matrix, rows.work)
    with np.errstate(invalid="ignore", over="ignore"):  # what is not finite gets an error below
        z, gram, y_sums = rows.products(block, matrix)
    if not all(bool(xp.isfinite(part).all()) for part in (gram, z) if part is not None):
        _name_what_is_not_finite(block, first, rows)
    return z, gram, y_sums, []


def _chunk(nested: Any, device: Device) -> Any:
    """Return the rows that blockwise hands over."""
    block = only(nested)
    if isinstance(block, CompressedBlock):
        block = decompress(block)
    check_unmasked(block)
    if not hasattr(block, "nbytes"):  # such as SciPy's, which have no rows to slice either
        raise WorkloadError(
            f"a chunk is {type(block).__name__}; NumPy and CuPy arrays are accepted: "
            "x = x.map_blocks(lambda block: block.toarray()) makes them of sparse matrices"
        )
    if device == "cuda" and isinstance(block, np.ndarray):
        raise WorkloadError(
            'chunks are NumPy arrays, and device="cuda" is for CuPy arrays: device="cpu", or '
            "x = x.map_blocks(cupy.asarray)"
        )
    return block


def basis_of(basis: Any, rows: Rows, width: int, seed: int | None) -> Basis:
    """Return the basis that blockwise hands over, or else the random one of a seed."""
    if basis is not None:
        found: Basis = only(basis)
        return found
    return (None if seed is None else _omega(rows.n, width, seed, rows.work, rows.device)), False


@functools.lru_cache(maxsize=4)
def _omega(n: int, width: int, seed: int, work: str, device: Device) -> Any:
    # Drawn on the host from the seed: the same on every worker, and nothing to send with the
    # graph.
    omega = np.random.default_rng(seed).standard_normal((n, width))
    return array_module(device).asarray(omega, work)


def _part(block: Any, first: int, matrix: Any, rows: Rows) -> Part:
    xp = array_module(rows.device)
    q, r = _qr(rows.times(block, matrix), xp)
    c = None if matrix is None else to_host(rows.transposed_times(block, q))
    return Part(first, to_host(r), c, to_host(_column_sums(q, xp)))


#: Rows of which NumPy makes one QR.
SLAB_ROWS = 16_384


def _qr(y: Any, xp: Any) -> tuple[Any, Any]:
    """QR of a tall chunk.

    NumPy's takes up to four times the memory of what it decomposes, so it gets a slab at a time.
    """
    rows, columns = y.shape
    count = rows // max(SLAB_ROWS, 4 * columns)
    if xp is not np or count < 2:
        q, r = xp.linalg.qr(y)
        return q, r
    q = np.empty_like(y)
    slabs = np.array_split(q, count)  # views
    above = []
    for slab, part in zip(slabs, np.array_split(y, count), strict=True):
        slab[:], r = np.linalg.qr(part)
        above.append(r)
    turns, r = np.linalg.qr(np.concatenate(above))
    for slab, turn in zip(slabs, np.split(turns, count), strict=True):
        slab[:] = slab @ turn
    return q, r


def _name_what_is_not_finite(block: Any, first: int, rows: Rows) -> None:
    xp = array_module(rows.device)
    for tile in rows.tiles(block, "float64"):
        wrong = ~xp.isfinite(tile)
        if bool(wrong.any()):
            row, column = divmod(int(xp.flatnonzero(wrong)[0]), rows.n)
            raise WorkloadError(
                f"x is {float(tile[row, column])} at row {first + row}, column {column}, and not "
                f"finite at {int(wrong.sum())} places in rows {first} to "
                f"{first + tile.shape[0] - 1}: replace or drop these values"
            )
        first += tile.shape[0]
    raise WorkloadError(f"x is finite, but its products overflow in {rows.work}: scale x")


def combine(flat: list[Any]) -> tuple[Any, Any, Any, list[Part]]:
    """Add the sums of some chunks."""
    if flat[0][1] is None:
        return None, None, None, [part for sums in flat for part in sums[3]]
    gram, y_sums = (functools.reduce(operator.add, (sums[i] for sums in flat)) for i in (1, 2))
    if flat[0][0] is None:
        return None, gram, y_sums, []
    return functools.reduce(operator.add, (sums[0] for sums in flat)), gram, y_sums, []


def end(function: Callable[..., Any], blocks: list[Any], *basis: Any, **how: Any) -> Any:
    """Add the sums of some chunks, and hand them to a function."""
    return function(combine(blocks), *basis, **how)


def only(nested: Any) -> Any:
    """Unwrap what blockwise hands over for summed indices: nested lists of a single block."""
    while isinstance(nested, list):
        (nested,) = nested
    return nested


def left(block: Any, start: Any, solution: Any, *, rows: Rows) -> Floats:
    """Left singular vectors of a chunk."""
    block, found = _chunk(block, rows.device), only(solution)
    if not block.shape[0]:
        return np.empty((0, len(found.s)))
    xp = array_module(rows.device)
    right = None if found.right is None else xp.asarray(found.right, np.float64)
    y = rows.times(block, right)
    if found.of_chunks:
        y = _qr(y, xp)[0] @ xp.asarray(found.of_chunks[int(only(start)[0])])
    return to_host(y)
