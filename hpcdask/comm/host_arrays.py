"""CuPy arrays on workers without a GPU: `HostArray`, which computes as NumPy."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import numpy as np
from distributed.protocol.numpy import deserialize_numpy_ndarray, serialize_numpy_ndarray
from distributed.protocol.serialize import dask_deserialize, dask_serialize


class HostArray(np.ndarray[Any, Any]):
    """A device array's values; results and views do not inherit `from_device`."""

    from_device = False


def receive_cupy_arrays() -> None:
    """Make this process read CuPy's arrays that come from other workers as `HostArray`."""
    import cupy

    with contextlib.suppress(ImportError):  # numba or RMM may not be there, nor needed
        import distributed.protocol.cupy  # noqa: F401  (its other types)
    dask_deserialize.register(cupy.ndarray, _from_device)


def _from_device(header: dict[str, Any], frames: list[Any]) -> HostArray:
    shape, kind, strides = (header[name] for name in ("shape", "typestr", "strides"))
    found = np.ndarray(shape, kind, buffer=frames[0] if frames else b"", strides=strides)
    return _marked(found)


def _marked(array: np.ndarray[Any, Any]) -> HostArray:
    found = array.view(HostArray)
    found.from_device = True
    return found


@dask_serialize.register(HostArray)  # type: ignore[untyped-decorator]
def _serialize(array: HostArray, context: Any = None) -> tuple[dict[str, Any], list[Any]]:
    header, frames = serialize_numpy_ndarray(array.view(np.ndarray), context)
    return {**header, "from_device": array.from_device}, frames


@dask_deserialize.register(HostArray)  # type: ignore[untyped-decorator]
def _deserialize(header: dict[str, Any], frames: list[Any]) -> Any:
    found = deserialize_numpy_ndarray(header, frames)
    bound = os.environ.get("CUDA_VISIBLE_DEVICES")  # what a nanny sets: a GPU's UUID, or empty
    if not header["from_device"] or bound is None:
        return found  # a client has no device of its own
    if not bound:
        return _marked(found)
    import cupy

    return cupy.asarray(found)
