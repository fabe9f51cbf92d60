"""A stand-in for arrays on a device: as CuPy's, they refuse to be taken for host memory."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from dask.sizeof import sizeof
from distributed.protocol.serialize import dask_deserialize, dask_serialize


class DeviceStandIn(np.lib.mixins.NDArrayOperatorsMixin):
    """Holds a NumPy array, and does with it what CuPy does with its own.

    Only `get` brings it to the host, and what is sent over tcp, or spilled: `copies_to_host` has
    the sizes of the latter.
    """

    __array_priority__ = 100
    copies_to_host: ClassVar[list[int]] = []

    def __init__(self, host: np.ndarray, base: Any = None) -> None:
        self._host = host
        self.base = base

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "shape": self.shape, "typestr": self.dtype.str}  # no address

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        raise TypeError("Implicit conversion to a NumPy array is not allowed")

    def __buffer__(self, flags: int) -> memoryview:
        raise TypeError("Accessing a CuPy ndarry on CPU is not allowed")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("pickled through the host")

    shape = property(lambda self: self._host.shape)
    ndim = property(lambda self: self._host.ndim)
    size = property(lambda self: self._host.size)
    dtype = property(lambda self: self._host.dtype)
    nbytes = property(lambda self: self._host.nbytes)

    def __len__(self) -> int:
        return len(self._host)

    def __getitem__(self, index: Any) -> DeviceStandIn:
        return DeviceStandIn(self._host[index], self if self.base is None else self.base)

    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(value, np.ndarray):
            raise TypeError("Unsupported type <class 'numpy.ndarray'>")
        self._host[index] = _plain(value)

    def copy(self, order: str = "C") -> DeviceStandIn:
        return DeviceStandIn(self._host.copy(order))

    def ravel(self) -> DeviceStandIn:
        flat = self._host.ravel()
        return DeviceStandIn(flat, self if np.shares_memory(flat, self._host) else None)

    def reshape(self, *shape: Any) -> DeviceStandIn:
        return DeviceStandIn(self._host.reshape(*shape), self if self.base is None else self.base)

    def astype(self, dtype: Any, **kwargs: Any) -> DeviceStandIn:
        return DeviceStandIn(self._host.astype(dtype, **kwargs))

    def get(self) -> np.ndarray:
        """Copy it to the host."""
        return self._host.copy()

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if np.ndarray in types:
            raise TypeError("Unsupported type <class 'numpy.ndarray'>")
        found = function(*_plain(args), **_plain(kwargs))
        return DeviceStandIn(found) if isinstance(found, np.ndarray) else found

    def __array_ufunc__(self, ufunc: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        found = getattr(ufunc, method)(*_plain(args), **_plain(kwargs))
        return DeviceStandIn(found) if isinstance(found, np.ndarray) else found


def _plain(value: Any) -> Any:
    if isinstance(value, DeviceStandIn):
        return value._host
    if isinstance(value, (list, tuple)):
        return type(value)(map(_plain, value))
    return {k: _plain(v) for k, v in value.items()} if isinstance(value, dict) else value


@sizeof.register(DeviceStandIn)
def _sizeof(array: DeviceStandIn) -> int:
    return array.nbytes


@dask_serialize.register(DeviceStandIn)
def _serialize(array: DeviceStandIn) -> Any:
    DeviceStandIn.copies_to_host.append(array.nbytes)
    header = {"shape": array.shape, "dtype": array.dtype.str}
    return header, [memoryview(array._host.ravel().view("uint8"))]


@dask_deserialize.register(DeviceStandIn)
def _deserialize(header: Any, frames: Any) -> DeviceStandIn:
    raw = np.frombuffer(bytearray().join(frames), dtype=header["dtype"])
    return DeviceStandIn(raw.reshape(header["shape"]))
