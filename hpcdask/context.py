"""The CUDA context of a worker's device."""

from __future__ import annotations

import os
import socket
from typing import Any

from .devices import CUDA_EXTRA
from .errors import DeviceError, MissingExtra

#: The event of which `hpcdask.bootstrap.mark` keeps the time.
CONTEXT_MADE = "CUDA context made"


def make_context() -> None:
    """Make the CUDA context of the one visible device.

    Raises
    ------
    DeviceError
        The driver refuses.
    """
    try:
        # loaded by the template already, through RMM
        from cuda.bindings import driver
    except ImportError:
        raise MissingExtra("cuda-bindings", CUDA_EXTRA, "a worker on a GPU") from None

    def call(name: str, *arguments: Any) -> Any:
        try:
            code, *results = getattr(driver, name)(*arguments)
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
