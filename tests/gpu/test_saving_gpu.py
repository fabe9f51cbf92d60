"""save and load of arrays on a real GPU."""

from __future__ import annotations

from pathlib import Path

import dask
import dask.array as da
import numpy as np
import pytest

import hpcdask
from launching import needs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(180),
    pytest.mark.usefixtures("gpus"),
    needs("zarr"),
]


@pytest.mark.parametrize("typed", [True, False], ids=["CuPy's type", "NumPy's type"])
def test_cupy_arrays_come_back(tmp_path: Path, typed: bool):
    """What the array says of its chunks' type does not matter: what they are does."""
    import cupy

    numbers = np.random.default_rng(1).random((50, 40))
    x = da.from_array(numbers, chunks=((20, 30), (40,)))
    x = x.map_blocks(cupy.asarray, meta=cupy.empty((0, 0)) if typed else np.empty((0, 0)))
    with dask.config.set(scheduler="synchronous"):
        hpcdask.save(x, tmp_path / "x")
        loaded = hpcdask.load(tmp_path / "x")
        assert loaded.chunks == x.chunks
        found = loaded.compute()
        assert isinstance(found, cupy.ndarray)
        np.testing.assert_array_equal(found.get(), numbers)
        on_host = hpcdask.load(tmp_path / "x", device="cpu").compute()
        assert isinstance(on_host, np.ndarray)
        np.testing.assert_array_equal(on_host, numbers)
        hpcdask.save(da.ones(4), tmp_path / "y")
        assert isinstance(hpcdask.load(tmp_path / "y").compute(), np.ndarray)
        assert isinstance(hpcdask.load(tmp_path / "y", device="cuda").compute(), cupy.ndarray)
