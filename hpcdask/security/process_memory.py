"""Memory of another process of the same user on this host, which this one copies.

That of the host by process_vm_readv, as MPI and UCX do: one copy, where a socket needs two. That of
a device by CUDA IPC: results for the program.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import importlib.util
import logging
import os
import struct
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from distributed.protocol.utils import host_array
from tornado.iostream import IOStream

logger = logging.getLogger("distributed.hpcdask.nearby")

#: Address and content of some memory that the other end of a connection tries to read.
PROBE = struct.Struct("<Q16s")
#: Bytes that a thread copies at once, and number of threads: one copies a few GB a second.
PART, THREADS = 2**22, 4
#: Size from which on memory is used again, bytes that are spare at most, and for how many seconds.
AGAIN, SPARE, SPARE_S = 2**20, 2**28, 5.0
_threads = ThreadPoolExecutor(THREADS, "hpcdask-copy")
LIBC, ONE = ctypes.CDLL(None, use_errno=True), ctypes.c_ulong(1)
# With Yama's ptrace_scope 1, only processes that asked for it are read by others of their user
PR_SET_PTRACER, PR_SET_PTRACER_ANY = 0x59616D61, ctypes.c_ulong(-1)


class _Part(ctypes.Structure):
    """The C library's iovec."""

    _fields_ = (("address", ctypes.c_void_p), ("size", ctypes.c_size_t))


def read_memory(pid: int, address: int, size: int) -> memoryview:
    """Copy memory of another process. Raises OSError if that cannot be read."""
    buffer = _memory(size) if size >= AGAIN else host_array(size)

    def copy(begin: int) -> None:
        part = min(PART, size - begin)
        here, there = _Part(_address(buffer) + begin, part), _Part(address + begin, part)
        if LIBC.process_vm_readv(pid, ctypes.byref(here), ONE, ctypes.byref(there), ONE, 0) != part:
            raise OSError(ctypes.get_errno(), f"the memory of process {pid} cannot be read")

    list((_threads.map if size > PART else map)(copy, range(0, size, PART)))
    return buffer


_spare: dict[int, list[Any]] = {}


def _memory(size: int) -> memoryview:
    """Return memory of an earlier copy, or new memory, which the kernel takes long to zero."""
    import numpy as np  # after start-up

    if not _spare:
        ending = threading.Timer(SPARE_S, _spare.clear)
        ending.daemon = True
        ending.start()
    fitting = _spare.setdefault(size, [])
    memory: Any = fitting.pop() if fitting else np.empty(size, "u1")
    # what arrays have as their base; a view of the memory they would pass over
    lent: Any = (ctypes.c_ubyte * size).from_buffer(memory)
    weakref.finalize(lent, _keep, memory).atexit = False
    return np.frombuffer(lent, "u1").data


def _keep(memory: Any) -> None:
    if sum(size * len(found) for size, found in list(_spare.items())) + memory.nbytes <= SPARE:
        _spare.get(memory.nbytes, []).append(memory)


def address_to_read(buffer: Any) -> int:
    """Return where a buffer begins; 0 if the kernel cannot copy it: a device driver mapped it."""
    address = _address(buffer)
    with contextlib.suppress(OSError):
        read_memory(os.getpid(), address, 1)
        return address
    return 0


def _address(buffer: Any) -> int:
    import numpy as np  # after start-up

    return int(np.frombuffer(buffer, "u1").ctypes.data)


async def agree(stream: IOStream, pid: int) -> tuple[bool, bool]:
    """Return what both ends of a new connection find out at the same time.

    That is whether each can read the other's memory, and whether the other takes device arrays.
    """
    LIBC.prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0)
    secret = ctypes.create_string_buffer(os.urandom(16), 16)
    stream.write(PROBE.pack(ctypes.addressof(secret), secret.raw))
    address, content = PROBE.unpack(await stream.read_bytes(PROBE.size))
    readable = False
    with contextlib.suppress(OSError):  # in a container, or forbidden
        readable = bytes(read_memory(pid, address, len(content))) == content
    stream.write(bytes([readable, _taken]))
    is_read, takes_device = await stream.read_bytes(2)
    return readable and bool(is_read), bool(takes_device)


# Memory of a device: the sender lends, the receiver copies
_taken = False


def take_arrays() -> None:
    """Take arrays as they are on a device from now on, if this process has CuPy and a GPU."""
    global _taken
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1")
    has_cupy = importlib.util.find_spec("cupy") is not None
    _taken = bool(glob.glob("/dev/nvidia[0-9]*")) and has_cupy and not hidden


def is_on_device(buffer: Any) -> bool:
    return hasattr(buffer, "__cuda_array_interface__")


def lend_arrays(buffers: Sequence[Any]) -> tuple[bytes, Any]:
    """Copy arrays to memory that other processes open by the handle, while it is kept.

    Whoever opens part of a pool maps all of it: 0.4 s for 70 GB. Raises MemoryError or RuntimeError
    if there is no such memory.
    """
    import cupy

    memory = cupy.cuda.Memory(max(1, sum(one.nbytes for one in buffers)))
    at = memory.ptr
    for buffer in buffers:
        _copy_on_device(at, buffer.__cuda_array_interface__["data"][0], buffer.nbytes)
        at += buffer.nbytes
    cupy.cuda.Device().synchronize()
    return cupy.cuda.runtime.ipcGetMemHandle(memory.ptr), memory


def copy_arrays(handle: bytes, sizes: Sequence[int]) -> list[Any]:
    """Copy arrays of so many bytes that another process lends. Raises OSError if it cannot."""
    global _taken
    import cupy

    runtime = cupy.cuda.runtime
    arrays = [cupy.empty(size, "u1") for size in sizes]
    try:
        at = opened = runtime.ipcOpenMemHandle(handle, runtime.cudaIpcMemLazyEnablePeerAccess)
        for array in arrays:
            _copy_on_device(array.data.ptr, at, array.nbytes)
            at += array.nbytes
        cupy.cuda.Device().synchronize()
        runtime.ipcCloseMemHandle(opened)
    except runtime.CUDARuntimeError as error:
        _taken = False
        logger.warning("results on a GPU come through host memory, which is slower: %s", error)
        raise OSError(str(error)) from error
    return arrays


def _copy_on_device(to: int, source: int, nbytes: int) -> None:
    from cupy.cuda import runtime

    runtime.memcpyAsync(to, source, nbytes, runtime.memcpyDeviceToDevice, 0)
