"""Device memory of other processes that UCX keeps mapped (CUDA IPC), and letting go of it.

What a process has mapped of another's memory stays allocated after the other's death. UCX maps a
peer's memory once and keeps it until its own process ends, so that a dead worker's pool would live
on in its peers, and the worker that takes its place would find no room. UCX has no call for that:
here its table of mappings is read, and emptied for a process that is gone.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Callable
from typing import Any

from hpcdask.gpu.context import synchronize
from hpcdask.logs import say
from hpcdask.process import process_start

#: The versions of UCX whose table is laid out as below (`uct_cuda_ipc_remote_cache` in
#: src/uct/cuda/cuda_ipc/cuda_ipc_cache.c; the table is klib's khash). Seen in 1.21.0.
KNOWN_VERSIONS = ((1, 21),)
LIBRARY = "libuct_cuda.so"
#: Seconds between two looks at whether those whose memory is mapped still live.
LOOK_INTERVAL_S = 0.25
#: Seconds after which the user is told that copies of a dead peer's memory still wait for the GPU.
NOTICE_S = 10.0
#: Times that UCX is progressed afterwards, so that it hears of their end: 16 each time.
PROGRESS_TURNS = 64


class _Key(ctypes.Structure):
    _fields_ = (("pid", ctypes.c_int), ("namespace", ctypes.c_ulong), ("device", ctypes.c_int))


class _Table(ctypes.Structure):
    _fields_ = (
        ("buckets", ctypes.c_uint32),
        ("size", ctypes.c_uint32),
        ("occupied", ctypes.c_uint32),
        ("upper_bound", ctypes.c_uint32),
        ("flags", ctypes.POINTER(ctypes.c_uint32)),
        ("keys", ctypes.POINTER(_Key)),
        ("values", ctypes.POINTER(ctypes.c_void_p)),
    )


def own_namespace() -> int:
    """The process id namespace of this process, as UCX numbers it."""
    return os.stat("/proc/self/ns/pid").st_ino


def _library() -> Any:
    """UCX's module for CUDA, if this process has loaded it."""
    with open("/proc/self/maps") as file:
        for line in file:
            if LIBRARY in line:
                return ctypes.CDLL(line.split(maxsplit=5)[5].rstrip("\n"), os.RTLD_NOLOAD)
    return None


class Mappings:
    """Whose memory UCX of this version has mapped here; only for the thread that drives UCX."""

    def __init__(self, version: tuple[int, ...]) -> None:
        self.known = version[:2] in KNOWN_VERSIONS
        self._library: Any = None

    def processes(self) -> set[tuple[int, int]]:
        """Id and process id namespace of each process whose memory is mapped."""
        return {(key.pid, key.namespace) for key, _ in self._entries()}

    def release(self, process: tuple[int, int]) -> None:
        """Unmap all memory of a process; no copy of it may be under way."""
        for key, index in self._entries():
            if (key.pid, key.namespace) == process:
                fresh = ctypes.c_void_p()
                name = f"dest:{key.pid}:{key.namespace}:{key.device}".encode()
                if self._library.uct_cuda_ipc_create_cache(ctypes.byref(fresh), name) != 0:
                    return
                table = _Table.in_dll(self._library, "uct_cuda_ipc_remote_cache")
                old = ctypes.c_void_p(table.values[index])
                table.values[index] = fresh.value
                self._library.uct_cuda_ipc_destroy_cache(old)

    def _entries(self) -> list[tuple[_Key, int]]:
        if self._library is None and self.known:
            self._library = _library()
        if self._library is None:
            return []
        table = _Table.in_dll(self._library, "uct_cuda_ipc_remote_cache")
        return [
            (table.keys[index], index)
            for index in range(table.buckets if table.size else 0)
            if not table.flags[index >> 4] >> ((index & 15) << 1) & 3
        ]


async def release_of_the_dead(
    mappings: Mappings, progress: Callable[[], None], worker: str
) -> None:
    """Release the memory of each process that ends, for ever."""
    starts: dict[tuple[int, int], str] = {}  # empty once it was let go of
    while mappings.known:
        await asyncio.sleep(LOOK_INTERVAL_S)
        for process in sorted(mappings.processes()):
            if process[1] != own_namespace():
                continue
            start = process_start(process[0])
            if start and not starts.get(process):
                starts[process] = start
            elif start != starts.get(process):
                await _idle(process[0], worker)
                for _ in range(PROGRESS_TURNS):
                    progress()
                mappings.release(process)
                starts[process] = ""


async def _idle(pid: int, worker: str) -> None:
    """Wait for the end of copies that may still read the memory of a process that has ended."""
    idle = asyncio.ensure_future(asyncio.to_thread(synchronize))
    if not (await asyncio.wait([idle], timeout=NOTICE_S))[0]:
        say(
            f"worker {worker}: memory of process {pid}, which has ended, stays mapped until what "
            f"the GPU computes is done"
        )
    await idle
