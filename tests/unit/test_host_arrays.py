"""CuPy arrays on workers without a GPU. The messages are made here, as CuPy would make them."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from distributed.protocol.serialize import dask_deserialize, deserialize, serialize

from hpcdask.comm import host_arrays
from launching import needs

pytestmark = needs("cupy")
with contextlib.suppress(ImportError):
    import cupy


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a worker on the CPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    host_arrays.receive_cupy_arrays()


def message(array: np.ndarray) -> tuple[dict, list]:
    """What `distributed.protocol.cupy` sends of a CuPy array with these values."""
    header = {"shape": array.shape, "typestr": array.dtype.str, "strides": array.strides}
    return header, [bytearray(array.tobytes("A"))]


def received(array: np.ndarray) -> np.ndarray:
    return dask_deserialize.dispatch(cupy.ndarray)(*message(array))


@pytest.mark.parametrize("order", ["C", "F"])
def test_a_device_array_computes_as_one_of_numpy(on_cpu, order: str):
    values = np.asarray(np.arange(12.0).reshape(3, 4), order=order)
    here = received(values)
    assert here.from_device
    np.testing.assert_array_equal(here, values)
    here += 1  # it may be written to
    assert float(here.sum()) == values.sum() + 12
    for other in (here + 1, here[1:], here.T, np.concatenate([here, here]), here.copy()):
        assert not getattr(other, "from_device", False)
        header, frames = serialize(other)
        assert not header.get("from_device")
        np.testing.assert_array_equal(deserialize(header, frames), other)


def test_it_becomes_a_device_array_where_there_is_a_device(on_cpu, monkeypatch):
    values = np.arange(6).reshape(2, 3)
    header, frames = serialize(received(values))
    again = deserialize(header, frames)  # a second worker on the CPU
    assert again.from_device
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1")
    monkeypatch.setattr(cupy, "asarray", lambda array: ("on the device", array))
    where, there = deserialize(header, frames)
    assert where == "on the device"
    np.testing.assert_array_equal(there, values)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    at_a_client = deserialize(header, frames)
    assert type(at_a_client) is np.ndarray


def test_nothing_is_too_small(on_cpu):
    for values in (np.zeros(()), np.zeros((0, 3))):
        here = received(values)
        assert here.shape == values.shape
        header, frames = serialize(here)
        np.testing.assert_array_equal(deserialize(header, frames), values)
