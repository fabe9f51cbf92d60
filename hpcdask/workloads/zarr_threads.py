"""The threads in which workers read and write Zarr stores.

Zarr-python hands every file and every decompression to threads of one pool per process, and copies
what comes back in a single thread. Here a reading thread does all of its work itself, with an event
loop of its own: threads are as many as there are reading threads, copies go on side by side, and
no setting of the process is changed. Blosc starts no threads: importing zarr tells it so.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from dask.system import CPU_COUNT
from distributed import get_worker

from hpcdask.workloads import Device

__all__ = ["in_reading_thread", "n_readers", "run_inline"]

# A GPU takes what several cores decompress. With more, the workers of a node, one for each GPU, are
# in each other's way.
MAX_READERS = 8


def n_readers(device: Device) -> int:
    """Return how many threads of this process read.

    On a CPU as many as the worker computes with; for a GPU the cores that this process may use, at
    most eight.
    """
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
