"""Release of device memory of dead processes that UCX 1.21 keeps mapped (CUDA IPC).

Memory that a process has mapped of another's stays allocated after the other's death, and a dead
worker's replacement would find no room. Here UCX's table is emptied for a process that is gone.

UCX 1.22.0 needs no help: it unmaps with the endpoint. libucxx 0.52 pins libucx below 1.22; delete
this module when that pin moves past it, unless a later UCX has gone back.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Callable
from typing import Any

from hpcdask.gpu.context import synchronize
from hpcdask.process import process_start

#: The version of UCX whose table is laid out as below (`uct_cuda_ipc_remote_cache` in
#: src/uct/cuda/cuda_ipc/cuda_ipc_cache.c; the table is klib's khash), and one that needs no help.
KNOWN, NEEDS_NONE = (1, 21), (1, 22, 0)
LIBRARY = "libuct_cuda.so.0"
#: Seconds between two looks at whether those whose memory is mapped still live.
LOOK_INTERVAL_S = 0.25
#: Times that UCX is progressed before the release, so that it hears of the end of copies.
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
    """Return the process id namespace of this process, as UCX numbers it."""
    return os.stat("/proc/self/ns/pid").st_ino


class Mappings:
    """Processes whose memory UCX has mapped here; only for the thread that drives UCX."""

    def __init__(self, version: tuple[int, ...] = ()) -> None:
        self.known = version[:2] == KNOWN
        self.unknown = "" if self.known or version == NEEDS_NONE else ".".join(map(str, version))
        self._library: Any = None

    def processes(self) -> set[tuple[int, int]]:
        """Return id and process id namespace of each process whose memory is mapped."""
        return {(key.pid, key.namespace) for key, _ in self._entries()}

    def tell(self) -> dict[str, Any] | None:
        """Return this process and those whose memory it has mapped; None if that is not known."""
        if not self.known:
            return None
        return {"process": (os.getpid(), own_namespace()), "mapped": [*self.processes()]}

    def shared_with(self, theirs: dict[str, Any] | None) -> bool | None:
        """Return whether another process, by its `tell`, or this one has mapped the other."""
        ours = self.tell()
        if not ours or not theirs:
            return None
        mapped = {tuple(one) for one in (*ours["mapped"], *theirs["mapped"])}
        return tuple(ours["process"]) in mapped or tuple(theirs["process"]) in mapped

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
        if not self.known:
            return []
        try:
            self._library = self._library or ctypes.CDLL(LIBRARY, os.RTLD_NOLOAD)
        except OSError:  # UCX has not loaded it
            return []
        table = _Table.in_dll(self._library, "uct_cuda_ipc_remote_cache")
        return [
            (table.keys[index], index)
            for index in range(table.buckets if table.size else 0)
            if not table.flags[index >> 4] >> ((index & 15) << 1) & 3
        ]


async def release_of_the_dead(mappings: Mappings, progress: Callable[[], None]) -> None:
    """Release the memory of each process that ends, for ever."""
    starts: dict[tuple[int, int], str] = {}  # empty once it was released
    while mappings.known:
        await asyncio.sleep(LOOK_INTERVAL_S)
        for process in sorted(mappings.processes()):
            if process[1] != own_namespace():
                continue
            start = process_start(process[0])
            if start and not starts.get(process):
                starts[process] = start
            elif start != starts.get(process):
                await asyncio.to_thread(synchronize)  # copies may still read that memory
                for _ in range(PROGRESS_TURNS):
                    progress()
                mappings.release(process)
                starts[process] = ""
