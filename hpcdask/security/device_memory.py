"""Device memory that a process of the same host copies (CUDA IPC): results for the program."""

from __future__ import annotations

import glob
import importlib.util
import logging
import os
import struct
from collections.abc import Sequence
from typing import Any

logger = logging.getLogger("distributed.hpcdask.nearby")

#: Handle of an allocation, and where in it an array begins.
LOAN = struct.Struct("<64sQ")

_taken = False


def take_arrays() -> None:
    """Take arrays as they are on a device from now on, if this process has CuPy and a GPU."""
    global _taken
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1")
    has_cupy = importlib.util.find_spec("cupy") is not None
    _taken = bool(glob.glob("/dev/nvidia[0-9]*")) and has_cupy and not hidden


def takes_arrays() -> bool:
    return _taken


def is_on_device(buffer: Any) -> bool:
    return hasattr(buffer, "__cuda_array_interface__")


def lend(buffers: Sequence[Any]) -> list[bytes]:
    """Return what `copy` needs of arrays. Raises RuntimeError if their memory cannot be shared."""
    import cupy
    from cuda.bindings import driver

    cupy.cuda.Device().synchronize()
    loans = []
    for buffer in buffers:
        address = buffer.__cuda_array_interface__["data"][0]
        handle, base = b"", address
        if buffer.nbytes:
            handle = cupy.cuda.runtime.ipcGetMemHandle(address)
            base = int(driver.cuMemGetAddressRange(address)[1])
        loans.append(LOAN.pack(handle, address - base))
    return loans


def copy(loans: Sequence[tuple[bytes, int]]) -> list[Any]:
    """Copy arrays of so many bytes from another process. Raises OSError if that is not possible."""
    global _taken
    import cupy

    runtime, opened, made = cupy.cuda.runtime, dict[bytes, int](), []
    try:
        for loan, size in loans:
            handle, offset = LOAN.unpack(loan)
            made.append(cupy.empty(size, "u1"))
            if size:
                if handle not in opened:
                    lazily = runtime.cudaIpcMemLazyEnablePeerAccess
                    opened[handle] = runtime.ipcOpenMemHandle(handle, lazily)
                source, kind = opened[handle] + offset, runtime.memcpyDeviceToDevice
                runtime.memcpy(made[-1].data.ptr, source, size, kind)
        cupy.cuda.Device().synchronize()
    except runtime.CUDARuntimeError as error:
        _taken = False
        logger.warning("results on a GPU come through host memory, which is slower: %s", error)
        raise OSError(str(error)) from error
    finally:
        for address in opened.values():
            runtime.ipcCloseMemHandle(address)
    return made
