"""Chunks that CPU workers hold compressed by Blosc, for data larger than their memory.

The second of the two ways in which the Dask blog's "Large SVDs" (May 2020,
https://blog.dask.org/2020/05/13/large-svds) makes a genotype matrix smaller. The first, in
:mod:`hpcdask.workloads.packing`, is four to one for any data of two bits, works on GPUs, and has
products that need no copy of the matrix. Blosc is for CPUs, takes any type, and does better where
most values are the same:

===================================================  ======  =====
values 0 to 3 (uint8)                                packed  Blosc
===================================================  ======  =====
all equally likely                                   4.0     3.9
two alleles, frequencies from Beta(0.5, 0.5)         4.0     4.8
two alleles, most of them rare, from Beta(0.2, 2)    4.0     7.8
===================================================  ======  =====

The last two are binomial, one frequency per row, 1 % of them missing and stored as 3.
"""

from __future__ import annotations

import importlib
import math
import sys
from dataclasses import dataclass
from typing import Any, cast

import dask.array as da
import numpy as np
from numpy.typing import NDArray

from hpcdask.workloads import WorkloadError, check_dask, check_unmasked, to_host

# The blog's, two levels higher. After a transposition of bits, LZ4 makes genotypes half as
# large as after one of bytes, at about 1 GB/s and core both ways. Zstandard makes them up to 1.8
# times smaller still and takes two to four times as long.
COMPRESSOR, LEVEL = "lz4", 5
MAX_NBYTES = 2**31 - 17  # Blosc counts with 32 bits
INSTALL = 'pip install "hpcdask[zarr]"'


@dataclass(frozen=True, slots=True)
class CompressedBlock:
    """One chunk, compressed. It pickles as it is, and ``numpy.asarray`` decompresses it.

    ``data`` is what Blosc made of its bytes, in C order.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    data: bytes

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """Decompress, for NumPy."""
        if copy is False:
            raise ValueError("decompressing makes a new array")
        return decompress(self).astype(dtype or self.dtype, copy=False)

    def __sizeof__(self) -> int:
        return object.__sizeof__(self) + sys.getsizeof(self.data)


def compress(block: Any) -> CompressedBlock:
    """Compress an array of at most 2 GiB without Python objects, NumPy or CuPy."""
    check_unmasked(block)
    array = np.asarray(to_host(block), order="C")
    _validate(array.dtype, array.nbytes)
    return CompressedBlock(array.shape, array.dtype, bytes(_codec().encode(array)))


def decompress(block: CompressedBlock) -> NDArray[Any]:
    """Return the array that `compress` was given, as NumPy."""
    if not isinstance(block, CompressedBlock):
        raise WorkloadError(
            f"a chunk is {type(block).__name__}, not a CompressedBlock: decompress_array() takes "
            "what compress_array() returns"
        )
    out = np.empty(block.shape, block.dtype)
    if out.size:
        _codec().decode(block.data, out=out)
    return out


def compress_array(x: da.Array) -> da.Array:
    """Compress an array chunk by chunk on the workers, in one Dask task each.

    Every chunk is a `CompressedBlock`: for ``persist()`` and `decompress_array`, not for
    arithmetic.
    """
    check_dask(x)
    largest = math.prod(max(sizes) for sizes in x.chunks) * x.dtype.itemsize
    _validate(x.dtype, largest)
    return _map(compress, x)


def decompress_array(compressed: da.Array) -> da.Array:
    """Undo :func:`compress_array`: NumPy chunks of the same shapes, one Dask task for each."""
    return _map(decompress, compressed)


def _map(function: Any, x: da.Array) -> da.Array:
    meta = np.empty((0,) * x.ndim, x.dtype)
    return cast("da.Array", da.map_blocks(function, x, dtype=x.dtype, meta=meta))


def _validate(dtype: np.dtype[Any], nbytes: float) -> None:
    if dtype.hasobject:
        raise WorkloadError(f"{dtype} holds Python objects, which Blosc cannot compress")
    if nbytes > MAX_NBYTES:
        raise WorkloadError(
            f"a chunk of {nbytes:,.0f} bytes is too large for Blosc, which takes {MAX_NBYTES:,}: "
            'x = x.rechunk("auto", block_size_limit=2**30)'
        )


def _codec() -> Any:
    try:
        blosc: Any = importlib.import_module("numcodecs.blosc")
    except ImportError as exc:
        raise WorkloadError(f"compressed chunks need numcodecs ({exc}): {INSTALL}") from exc
    # Blosc's own threads are shared by the process and locked; Dask's threads fill the cores.
    blosc.use_threads = False
    return blosc.Blosc(cname=COMPRESSOR, clevel=LEVEL, shuffle=blosc.BITSHUFFLE)
