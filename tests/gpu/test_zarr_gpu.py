"""Zarr stores read into the memory of a real GPU, and the genotype pipeline on it."""

from __future__ import annotations

import dask
import numpy as np
import pytest

from hpcdask.workloads.genotypes import normalise, population_structure, write_genotypes
from hpcdask.workloads.zarr import open_rows

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180), pytest.mark.usefixtures("gpus")]


@pytest.fixture(autouse=True)
def _synchronous():
    with dask.config.set(scheduler="synchronous"):
        yield


@pytest.fixture
def stored(tmp_path):
    """Path and sum of genotypes."""
    pytest.importorskip("zarr")
    made = write_genotypes(tmp_path / "g", (4000, 300), rows=500)
    return tmp_path / "g", int(dask.compute(*made)[1])


@pytest.mark.parametrize("compressed", [True, False])
def test_rows_are_read_into_device_memory(stored, tmp_path, compressed):
    import cupy
    import zarr

    path, total = stored
    on_host = open_rows(path, device="cpu", n_slots=2).compute()
    if not compressed:  # by kvikio, where it is installed
        path = tmp_path / "plain"
        what = {"shape": on_host.shape, "chunks": (500, 300), "dtype": "u1"}
        zarr.create_array(str(path), compressors=None, **what)[:] = on_host
    x = open_rows(path, device="cuda", n_slots=2).compute()
    assert isinstance(x, cupy.ndarray)
    np.testing.assert_array_equal(cupy.asnumpy(x), on_host)
    assert int(x.sum(dtype="u8")) == total


def test_the_pipeline_is_the_same_on_a_gpu(stored):
    import cupy

    path, _ = stored
    found = {
        device: dask.compute(*population_structure(path, 3, n_slots=2, device=device))
        for device in ("cpu", "cuda")
    }
    np.testing.assert_allclose(found["cuda"][0], found["cpu"][0], rtol=1e-9)
    np.testing.assert_allclose(found["cuda"][1], found["cpu"][1], atol=1e-7)
    np.testing.assert_array_equal(found["cuda"][2], found["cpu"][2])
    tile = open_rows(path, device="cpu", n_slots=2)[:100].compute()
    out = normalise(cupy.asarray(tile))
    assert type(out) is cupy.ndarray
    np.testing.assert_allclose(cupy.asnumpy(out), normalise(tile), atol=1e-9)
    assert found["cuda"][2].sum() == 4000
