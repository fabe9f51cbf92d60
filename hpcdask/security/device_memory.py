"""Device memory that a process of the same host copies (CUDA IPC): results for the program."""

from __future__ import annotations

import glob
import importlib.util
import logging
import os
from collections.abc import Sequence
from typing import Any

logger = logging.getLogger("distributed.hpcdask.nearby")

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


def lend(buffers: Sequence[Any]) -> tuple[bytes, Any]:
    """Copy arrays to memory that other processes open by the handle, while it is kept.

    Whoever opens part of a pool maps all of it: 0.4 s for 70 GB. Raises MemoryError or RuntimeError
    if there is no such memory.
    """
    import cupy

    memory = cupy.cuda.Memory(max(1, sum(one.nbytes for one in buffers)))
    at = memory.ptr
    for buffer in buffers:
        _copy(at, buffer.__cuda_array_interface__["data"][0], buffer.nbytes)
        at += buffer.nbytes
    cupy.cuda.Device().synchronize()
    return cupy.cuda.runtime.ipcGetMemHandle(memory.ptr), memory


def copy(handle: bytes, sizes: Sequence[int]) -> list[Any]:
    """Copy arrays of so many bytes that another process lends. Raises OSError if it cannot."""
    global _taken
    import cupy

    runtime = cupy.cuda.runtime
    arrays = [cupy.empty(size, "u1") for size in sizes]
    try:
        at = opened = runtime.ipcOpenMemHandle(handle, runtime.cudaIpcMemLazyEnablePeerAccess)
        for array in arrays:
            _copy(array.data.ptr, at, array.nbytes)
            at += array.nbytes
        cupy.cuda.Device().synchronize()
        runtime.ipcCloseMemHandle(opened)
    except runtime.CUDARuntimeError as error:
        _taken = False
        logger.warning("results on a GPU come through host memory, which is slower: %s", error)
        raise OSError(str(error)) from error
    return arrays


def _copy(to: int, source: int, nbytes: int) -> None:
    from cupy.cuda import runtime

    runtime.memcpyAsync(to, source, nbytes, runtime.memcpyDeviceToDevice, 0)
