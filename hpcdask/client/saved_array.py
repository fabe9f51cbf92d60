"""Arrays of `save` and `load`: one Zarr array each, written and read by regions.

Zarr takes a chunk that is not there for one of fill values. So all chunks are written, zeros too,
and who reads looks whether they are there.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import shutil
import socket
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import dask.array as da
import numpy as np

from hpcdask.errors import HpcdaskError, UsageError
from hpcdask.upstream.dask import meta_of
from hpcdask.upstream.zarr import chunk_key

#: Kinds of dtype that Zarr's specification has.
KINDS = "biufcmM"
#: Bytes that zstd takes at once.
MAX_COMPRESSED = (1 << 31) - 1


@dataclass(frozen=True)
class ArrayRecord:
    """An array: `chunk` is Zarr's, `chunks` are Dask's; `cupy` tells what its chunks were."""

    shape: tuple[int, ...]
    dtype: str
    chunk: tuple[int, ...]
    chunks: tuple[tuple[int, ...], ...]
    cupy: bool


def check(x: da.Array) -> None:
    """Raise UsageError if Zarr cannot have it."""
    if any(math.isnan(n) for n in x.shape):
        raise UsageError("save(): the chunk sizes are unknown: call x.compute_chunk_sizes() first")
    if x.dtype.kind not in KINDS or x.dtype.itemsize > 16 or x.dtype == np.longdouble:
        raise UsageError(
            f"save(): {x.dtype} has no place in Zarr's format: numbers, booleans and times have. "
            f"Save the fields of a structured array one by one"
        )
    if _library(meta_of(x)) is None:
        raise UsageError(f"save(): {type(meta_of(x))} as chunks: NumPy or CuPy arrays are accepted")


def _library(block: Any) -> str | None:
    """``numpy`` or ``cupy``, without an import of it; None for others, masked arrays too."""
    if isinstance(block, np.ndarray | np.generic) and not isinstance(block, np.ma.MaskedArray):
        return "numpy"
    name, _, _ = type(block).__module__.partition(".")
    return "cupy" if name == "cupy" else None


def regular(chunks: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The largest chunk of each axis, at least 1."""
    return tuple(max(1, *sizes) for sizes in chunks)


def without_device(x: da.Array) -> da.Array:
    """The same with NumPy's type: to build with it, or to unpickle it, needs no GPU."""
    return da.Array(x.dask, x.name, x.chunks, meta=np.empty((0,) * x.ndim, x.dtype))


def write(
    x: da.Array, data: Path, compress: bool
) -> tuple[da.Array, Callable[[Any], dict[str, Any]]]:
    """What writes an array, and what makes a record of its result."""
    import zarr

    chunk = regular(x.chunks)
    if compress and math.prod(chunk) * x.dtype.itemsize > MAX_COMPRESSED:
        raise UsageError("save(): compress=True needs chunks of less than 2 GiB: rechunk first")
    array = zarr.create_array(
        str(data),
        shape=x.shape,
        chunks=chunk,
        dtype=x.dtype.newbyteorder("="),
        compressors="auto" if compress else None,
        fill_value=0,
        zarr_format=3,
        config={"write_empty_chunks": True},
    )
    blocks = without_device(x).rechunk(chunk)
    written = blocks.map_blocks(
        _write_block,
        path=str(data),
        array=array,  # its config is no part of what is opened
        chunks=tuple((1,) * n for n in blocks.numblocks),
        meta=np.empty((0,) * x.ndim, bool),
    )

    def content(cupy: Any) -> dict[str, Any]:
        return asdict(ArrayRecord(x.shape, x.dtype.str, chunk, x.chunks, bool(cupy)))

    return written.any(), content


def _write_block(
    block: Any,
    *,
    path: str,
    array: Any,
    block_id: tuple[int, ...],
) -> Any:
    """Write one chunk; whether it was a CuPy array, as an array of one element."""
    library = _library(block)
    host = block.get() if library == "cupy" else np.asarray(block)
    starts = [i * n for i, n in zip(block_id, array.chunks, strict=True)]
    stops = [min(a + n, m) for a, n, m in zip(starts, array.chunks, array.shape, strict=True)]
    _see(path)
    expected = (tuple(b - a for a, b in zip(starts, stops, strict=True)), array.dtype)
    if library is None or (host.shape, host.dtype.newbyteorder("=")) != expected:
        raise HpcdaskError(
            f"save(): chunk {block_id} is {type(block).__name__} {host.shape} {host.dtype}, where "
            f"the array says {expected[0]} {expected[1]}"
        )
    array[tuple(slice(a, b) for a, b in zip(starts, stops, strict=True))] = host
    if not os.path.exists(os.path.join(path, "zarr.json")):  # given up, and made by this again
        shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):
            for parent in list(Path(path).parents)[:2]:
                parent.rmdir()
        _see(path)
    return np.full((1,) * array.ndim, library == "cupy")


def _see(path: str) -> None:
    if not os.path.exists(os.path.join(path, "zarr.json")):
        raise HpcdaskError(
            f"{path} is not there on {socket.gethostname()}: it was replaced or removed, or is on "
            f"a file system that not all workers share"
        )


def read(data: Path, content: dict[str, Any], device: Literal["cuda", "cpu"] | None) -> da.Array:
    """The array of a record."""
    record = ArrayRecord(**content)
    dtype = np.dtype(record.dtype)
    loaded: da.Array = da.map_blocks(
        _read_block,
        chunks=tuple(map(tuple, record.chunks)),
        meta=np.empty((0,) * len(record.shape), dtype),
        path=str(data),
        cupy=device == "cuda" or (device is None and record.cupy),
        as_dtype=dtype,
    )
    return loaded


def _read_block(*, path: str, cupy: bool, as_dtype: np.dtype[Any], block_info: Any) -> Any:
    import zarr

    _see(path)
    region = block_info[None]["array-location"]
    array = zarr.open_array(path, mode="r")
    block = np.asarray(array[tuple(slice(a, b) for a, b in region)]).astype(as_dtype, copy=False)
    wanted = (range(a // n, -(-b // n)) for (a, b), n in zip(region, array.chunks, strict=True))
    for index in itertools.product(*wanted):
        if not os.path.exists(os.path.join(path, chunk_key(array, index))):
            _see(path)
            raise HpcdaskError(f"chunk {index} of {path} is missing: the save is damaged")
    return _to_device(block) if cupy else block


def _to_device(block: Any) -> Any:
    try:
        import cupy

        return cupy.asarray(block)
    except Exception as error:
        raise HpcdaskError(
            f"load(): no CuPy array can be made on {socket.gethostname()}: {error}. For NumPy "
            f'arrays: load(folder, device="cpu")'
        ) from error
