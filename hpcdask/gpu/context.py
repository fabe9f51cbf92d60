"""CUDA context of a worker's device, and the first use of CUDA's libraries.

On an H100, the first use of twenty usual operations of CuPy takes 0.9 s with a filled kernel cache
and 4 s with an empty one, for which the first Dask task would wait.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from hpcdask.errors import DeviceError

#: Seconds that an ending process may keep a device that only one can use (exclusive compute mode).
RELEASE_S = 3.0
#: The event of which `hpcdask.process.mark` keeps the time.
CONTEXT_MADE = "CUDA context made"
#: Operations that are used once for each type of float, with a matrix x and a random state.
USES: tuple[Callable[[Any, Any, Any], Any], ...] = (
    lambda cupy, random, x: (x + 1)[::2, ::2].sum(axis=(0, 1), keepdims=True),
    lambda cupy, random, x: x + x.T,
    lambda cupy, random, x: cupy.concatenate([x, x]),
    lambda cupy, random, x: (x @ x).mean(),
    lambda cupy, random, x: random.normal(0, 1, (8, 8)).astype(x.dtype),
    lambda cupy, random, x: cupy.linalg.qr(x),
    lambda cupy, random, x: cupy.linalg.svd(x),
    lambda cupy, random, x: cupy.fft.fft(x, axis=0),
    lambda cupy, random, x: random.randint(0, 9, (8, 8), "u1").astype("f4"),
)


def make_context() -> None:
    """Make the CUDA context of the one visible device."""
    from cuda.bindings import driver

    failed = f"no CUDA context on {socket.gethostname()}"
    deadline = time.monotonic() + RELEASE_S

    def call(name: str, *arguments: Any) -> Any:
        try:
            code, *results = getattr(driver, name)(*arguments)
        except RuntimeError as error:  # there is no libcuda
            remedy = "In a container, pass the driver in (apptainer exec --nv)"
            raise DeviceError(f"{failed}: {error} {remedy}") from error
        if code == driver.CUresult.CUDA_SUCCESS:
            return results[0] if results else None
        unavailable = code == driver.CUresult.CUDA_ERROR_DEVICE_UNAVAILABLE
        if unavailable and time.monotonic() < deadline:
            time.sleep(0.1)
            return call(name, *arguments)
        raise DeviceError(
            f"{failed}: {name} says {code.name} of GPU {os.environ.get('CUDA_VISIBLE_DEVICES')}. "
            f"See nvidia-smi there, and whether another process has the device for itself "
            f"(compute mode)"
        )

    call("cuInit", 0)
    call("cuCtxSetCurrent", call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", 0)))


def synchronize() -> None:
    """Wait until the device has done all that this process gave it so far; in any thread."""
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
    return None if code.name in ("CUDA_SUCCESS", "CUDA_ERROR_NOT_READY") else str(code.name)


class FirstUse(threading.Thread):
    """Thread that uses libraries and kernels of the device once, until it is `stopped`.

    Handles of cuBLAS and cuSOLVER, with some 160 MB, belong to the thread and go with it.
    """

    def __init__(self) -> None:
        super().__init__(name="first-use", daemon=True)
        self.stopped = threading.Event()

    def run(self) -> None:
        """Use one operation after the other."""
        # a Dask task that needs a library which is missing or fails here has the error
        with contextlib.suppress(Exception):
            import cupy

            # results are sent by it; numba comes with it, and takes half a second to load
            importlib.import_module("distributed.protocol.cupy")
            random = cupy.random.RandomState(1)
            for dtype in ("f8", "f4"):
                x = random.random_sample((64, 64), dtype)
                for use in USES:
                    if self.stopped.is_set():
                        return
                    use(cupy, random, x)
