"""How workers read rows of a Zarr array: ahead of what is computed, and to where it is computed.

Bands of rows get to a device through the buffers that a single call asks for, never through
``zarr.config.enable_gpu()``, which changes what all threads of the process get.

Zarr-python hands every file and every decompression to threads of one pool per process, and copies
what comes back in a single thread. Here a reading thread does all of its work itself, with an event
loop of its own: threads are as many as there are reading threads, copies go on side by side, and
no setting of the process is changed. Blosc starts no threads: importing zarr tells it so.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import itertools
import logging
import math
import operator
import os
import socket
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from dask.system import CPU_COUNT
from distributed import get_worker
from numpy.typing import NDArray

from hpcdask.upstream import zarr as upstream
from hpcdask.workloads import Device, WorkloadError, array_module, to_host

ZARR_INSTALL = 'pip install "hpcdask[zarr]"'
#: Bytes read at once. A band is at least one chunk of the store high.
BAND_NBYTES: dict[Device, int] = {"cuda": 1 << 26, "cpu": 1 << 24}
BLOSC_HEADER_NBYTES = 16
INDEX_ENTRY_NBYTES = 16
# A GPU takes what several cores decompress. With more, the workers of a node, one for each GPU, are
# in each other's way.
MAX_READERS = 8

logger = logging.getLogger(__name__)


def zarr_module() -> Any:
    """Return zarr-python 3 or later; WorkloadError where this runs without."""
    try:
        import zarr
        import zarr.api.asynchronous
        import zarr.storage
    except ImportError as exc:
        raise WorkloadError(f"Zarr stores need zarr-python 3 ({exc}): {ZARR_INSTALL}") from exc
    return zarr


@dataclass(frozen=True)
class StoredArray:
    """A matrix in a Zarr store, as the client found it, in the byte order of the machine.

    ``chunk`` is the rows and columns of what is one file: a chunk, or a shard. ``plain`` says that
    files hold the elements as they are in memory. ``stamp`` is when its metadata were written, in
    ns: a store that is written anew has other Dask keys.
    """

    path: str
    component: str
    shape: tuple[int, int]
    dtype: str
    chunk: tuple[int, int]
    fill_value: float
    plain: bool
    stamp: int

    def __str__(self) -> str:
        return os.path.join(self.path, self.component) if self.component else self.path

    async def open(self, store: Any, mode: str = "r") -> Any:
        """Open the array as zarr's ``AsyncArray``, and see that it is what was found."""
        host = socket.gethostname()
        try:
            array = await zarr_module().api.asynchronous.open_array(
                store=store, path=self.component, mode=mode
            )
        except FileNotFoundError as exc:
            raise WorkloadError(
                f"{host} does not see the Zarr array {self}: "
                "workers need it on a file system that they share with the client"
            ) from exc
        if (array.shape, array.dtype.newbyteorder("=")) != (self.shape, np.dtype(self.dtype)):
            raise WorkloadError(
                f"{self} is {array.shape} {array.dtype} on {host}, and was "
                f"{self.shape} {self.dtype} when it was opened: open it again"
            )
        return array

    def band_rows(self, device: Device) -> int:
        """Return how many rows are read at once: whole chunks of the store."""
        chunk_nbytes = self.chunk[0] * self.shape[1] * np.dtype(self.dtype).itemsize
        return self.chunk[0] * max(1, BAND_NBYTES[device] // chunk_nbytes)


class StoredRows:
    """Rows of a stored matrix, from ``start`` to before ``stop``, being read since this was made.

    ``rows[a:b]`` waits for those rows only. What cannot be read, a slice raises as WorkloadError.
    Pickled, it is a note of where to read again.
    """

    ndim = 2

    def __init__(self, stored: StoredArray, start: int, stop: int, device: Device) -> None:
        self.shape = (stop - start, stored.shape[1])
        self.dtype = np.dtype(stored.dtype)
        self.nbytes = math.prod(self.shape) * self.dtype.itemsize
        self._made_from = (stored, start, stop, device)
        self._height = stored.band_rows(device)
        gpu = array_module(device).cuda.Device() if device == "cuda" else None
        direct = device == "cuda" and not _why_not_direct(stored)
        # It is before the bands in the queue: none of them can wait for what has no thread.
        opening = in_reading_thread(device, run_inline, _open(stored, direct))
        self._bands = [
            in_reading_thread(
                device, _read, stored, a, min(a + self._height, stop), opening, direct, gpu
            )
            for a in range(start, stop, self._height)
        ]

    def __getitem__(self, rows: slice) -> Any:
        start, stop, step = rows.indices(self.shape[0])
        if step != 1:
            raise IndexError(f"rows are read in steps of 1, not {step}")
        stop = max(start, stop)
        first = min(start // self._height, len(self._bands) - 1)
        parts = []
        for i in range(first, max(first + 1, math.ceil(stop / self._height))):
            band = self._bands[i].result()
            parts.append(band[max(0, start - i * self._height) : stop - i * self._height])
        if len(parts) == 1:
            return parts[0]
        return array_module(self._made_from[3]).concatenate(parts)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(to_host(self[:]), dtype=dtype)

    def __sizeof__(self) -> int:
        return self.nbytes

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._made_from


async def _open(stored: StoredArray, direct: bool) -> Any:
    store = (_gds_store() if direct else _checked_store())(stored.path, read_only=True)
    array = await stored.open(store)
    if not direct:
        codecs = [type(codec).__name__ for codec in array.compressors]
        while codecs and "Crc" in codecs[-1]:  # appended to what is there
            codecs.pop()
        store.blosc = array.shards is None and bool(codecs) and "Blosc" in codecs[-1]
        if array.shards:
            n_chunks = math.prod(map(operator.floordiv, array.shards, array.chunks))
            store.index_nbytes = n_chunks * INDEX_ENTRY_NBYTES
            store.index_type = upstream.first_index_type(array)
    return array


def _read(
    stored: StoredArray, start: int, stop: int, opening: Future[Any], direct: bool, gpu: Any
) -> Any:
    """Read rows into host memory, or with a ``cupy.cuda.Device`` into its memory."""
    array = opening.result()
    kind = "gpu" if direct else "cpu"
    buffers = importlib.import_module(f"zarr.buffer.{kind}").buffer_prototype
    if gpu is None:
        return run_inline(_rows(stored, array, start, stop, buffers))
    with gpu:
        cupy = array_module("cuda")
        # CuPy copies through pinned memory of its own.
        rows = cupy.asarray(run_inline(_rows(stored, array, start, stop, buffers)))
        # The thread that computes may use another stream.
        cupy.cuda.get_current_stream().synchronize()
    return rows


async def _rows(stored: StoredArray, array: Any, start: int, stop: int, buffers: Any) -> Any:
    try:
        rows = await array.getitem((slice(start, stop), slice(None)), prototype=buffers)
    except Exception as exc:
        await _name_the_chunk(stored, array, start, stop, buffers)
        raise WorkloadError(
            f"rows {start} to {stop - 1} of {stored} cannot be read: {exc}"
        ) from exc
    # CuPy has no other byte order than the machine's.
    return rows.astype(stored.dtype, copy=False)


async def _name_the_chunk(
    stored: StoredArray, array: Any, start: int, stop: int, buffers: Any
) -> None:
    height, width = stored.chunk
    rows = range(start // height, math.ceil(stop / height))
    for i, j in itertools.product(rows, range(math.ceil(stored.shape[1] / width))):
        area = slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width)
        try:
            await array.getitem(area, prototype=buffers)
        except Exception as exc:
            key = upstream.chunk_key(array, (i, j))
            what = f"chunk {key} of {stored} cannot be read on {socket.gethostname()}: {exc}"
            if isinstance(exc, OSError):
                raise WorkloadError(what) from exc
            nbytes = os.stat(os.path.join(str(stored), key)).st_size
            raise WorkloadError(
                f"{what}. The file of {nbytes} bytes is damaged or was not written to its end: "
                "write the chunk again"
            ) from exc


@functools.cache
def _checked_store() -> Any:
    local_store: Any = zarr_module().storage.LocalStore

    class CheckedStore(local_store):  # type: ignore[misc] # zarr's are Any here
        """Refuses what is shorter than it says: c-blosc reads past the end of its chunks.

        Files are chunks of ``blosc``, or shards, which have ``index_nbytes`` at least: where their
        chunks are. ``index_type`` is of the numbers that say so, in shards that begin with them.
        Others are found to be cut off, but for empty ones, which zarr takes for missing.
        """

        blosc = False
        index_nbytes = 0
        index_type = ""

        async def get(self, key: str, prototype: Any = None, byte_range: Any = None) -> Any:
            found = await super().get(key, prototype, byte_range)
            if found is not None and (self.blosc or self.index_nbytes):
                expected = self._expected(found.as_numpy_array(), byte_range)
                if len(found) < expected:
                    raise ValueError(f"{len(found)} bytes of {expected} are there")
            return found

        def _expected(self, found: NDArray[Any], byte_range: Any) -> int:
            if self.blosc:
                header = found[:BLOSC_HEADER_NBYTES].tobytes()
                return max(BLOSC_HEADER_NBYTES, int.from_bytes(header[12:], "little"))
            if hasattr(byte_range, "suffix"):
                return int(byte_range.suffix)
            if byte_range is not None:
                return int(byte_range.end - byte_range.start)
            if not self.index_type or len(found) < self.index_nbytes:
                return self.index_nbytes
            index = found[: self.index_nbytes].tobytes()
            starts, sizes = np.frombuffer(index, self.index_type).reshape(-1, 2).T
            there = starts != np.iinfo(np.uint64).max
            return int((starts + sizes)[there].max(initial=0))

    return CheckedStore


def reading_way(stored: StoredArray, device: Device) -> str:
    """Say in one line how this process reads a matrix; for ``client.run``."""
    threads = f"{n_readers(device)} threads"
    if device == "cpu":
        return f"zarr-python into host memory, {threads}"
    why = _why_not_direct(stored)
    if why:
        return f"zarr-python into host memory, then a copy to the device, {threads}: {why}"
    return f"kvikio into device memory, {threads}"


def _why_not_direct(stored: StoredArray) -> str:
    if not stored.plain:
        # They would go to the device, back to zarr's codecs on the host, and to the device again.
        return "the chunks are compressed, sharded or of Zarr format 2"
    return "" if _gds_store() else "kvikio is not installed"


@functools.cache
def _gds_store() -> Any:
    try:
        return importlib.import_module("kvikio.zarr").GDSStore
    except (ImportError, OSError) as exc:  # OSError: without the libraries that it loads
        logger.info("uncompressed Zarr chunks are read through host memory: %s", exc)
        return None


# --- threads --------------------------------------------------------------------------------------


def n_readers(device: Device) -> int:
    """Return how many threads read: as many as compute; for a GPU its cores, up to 8."""
    if device == "cuda":
        return min(MAX_READERS, CPU_COUNT)
    try:
        return int(get_worker().state.nthreads)
    except ValueError:  # not in a distributed worker
        return CPU_COUNT


def in_reading_thread(device: Device, function: Callable[..., Any], *args: Any) -> Future[Any]:
    """Start a function in one of this process's reading threads, in the order of the calls."""
    return _pool(n_readers(device), os.getpid()).submit(function, *args)


@functools.lru_cache(maxsize=4)
def _pool(n_threads: int, pid: int) -> ThreadPoolExecutor:
    # A forked process gets the cache of its parent, but not the parent's threads: hence the pid.
    return ThreadPoolExecutor(n_threads, thread_name_prefix="hpcdask-zarr")


def run_inline(coroutine: Any) -> Any:
    """Run a coroutine of zarr in the calling thread alone, which must not run an event loop."""

    def new_loop() -> asyncio.AbstractEventLoop:
        loop = asyncio.new_event_loop()
        loop.set_default_executor(_Inline(1))
        return loop

    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(coroutine)


class _Inline(ThreadPoolExecutor):
    """Runs what zarr means for other threads in the thread that hands it over."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as exc:
            future.set_exception(exc)
        return future
