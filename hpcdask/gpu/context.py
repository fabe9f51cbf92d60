"""The CUDA context of a worker's device."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import time
from typing import Any

from hpcdask.errors import DeviceError, MissingExtra

from .driver import cuda_extra

#: Seconds that a process may take to let go of a device that is for one at a time (compute mode).
RELEASE_S = 3.0
#: The event of which `hpcdask.process.mark` keeps the time.
CONTEXT_MADE = "CUDA context made"


def start_cuda() -> bool:
    """Start CUDA on the visible devices, without a context; return False without a driver."""
    with contextlib.suppress(OSError):
        ctypes.CDLL("libcuda.so.1").cuInit(0)
        return True
    return False


def make_context() -> None:
    """Make the CUDA context of the one visible device."""
    try:
        # loaded by the template already, through RMM
        from cuda.bindings import driver
    except ImportError:
        raise MissingExtra("cuda-bindings", cuda_extra(), "a worker on a GPU") from None

    def call(name: str, *arguments: Any) -> Any:
        deadline = time.monotonic() + RELEASE_S
        try:
            while True:
                code, *results = getattr(driver, name)(*arguments)
                taken = code == driver.CUresult.CUDA_ERROR_DEVICE_UNAVAILABLE
                if not taken or time.monotonic() > deadline:
                    break
                time.sleep(0.1)
        except RuntimeError as error:  # its library is not there
            raise DeviceError(
                f"no CUDA context on {socket.gethostname()}: {error} In a container, pass the "
                f"driver in (apptainer exec --nv)"
            ) from error
        if code != driver.CUresult.CUDA_SUCCESS:
            raise DeviceError(
                f"no CUDA context on {socket.gethostname()}: {name} says {code.name} of GPU "
                f"{os.environ.get('CUDA_VISIBLE_DEVICES')}. See nvidia-smi there, and whether "
                f"another process has the device for itself (compute mode)"
            )
        return results[0] if results else None

    call("cuInit", 0)
    call("cuCtxSetCurrent", call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", 0)))


def synchronize() -> None:
    """Wait, in any thread, until the device has done what this process gave it so far."""
    from cuda.bindings import driver

    driver.cuCtxSetCurrent(driver.cuDevicePrimaryCtxRetain(driver.cuDeviceGet(0)[1])[1])
    driver.cuCtxSynchronize()
    driver.cuDevicePrimaryCtxRelease(0)


def lost() -> str | None:
    """Return the name of the CUDA error that broke this process's context, or None.

    After an illegal address, say, every call fails with that error until the process ends. Only
    from the thread that made the context.
    """
    from cuda.bindings import driver

    (code,) = driver.cuStreamQuery(0)
    sound = (driver.CUresult.CUDA_SUCCESS, driver.CUresult.CUDA_ERROR_NOT_READY)
    return None if code in sound else str(code.name)
