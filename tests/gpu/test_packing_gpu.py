"""Packed genotypes on a real GPU: round trips, products, decompositions."""

from __future__ import annotations

import dask
import numpy as np
import pytest

from hpcdask.workloads import WorkloadError, packing, svd

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]


@pytest.fixture
def cupy(gpus):
    return pytest.importorskip("cupy")


def genotypes(*shape):
    return np.random.default_rng(0).integers(0, 4, shape, dtype=np.uint8)


@pytest.mark.parametrize("shape", [(1,), (7, 13), (3, 5, 64), (1000, 4001)])
def test_packing_and_unpacking_is_the_identity(cupy, shape):
    values = genotypes(*shape)
    packed = packing.pack(cupy.asarray(values))
    np.testing.assert_array_equal(packed.get(), packing.pack(values))
    for dtype in (np.uint8, np.float32):
        again = packing.unpack(packed, shape[-1], dtype)
        assert again.dtype == dtype
        np.testing.assert_array_equal(again.get(), values)


def test_values_outside_the_range_are_located(cupy):
    values = genotypes(30, 40).astype(np.int16)
    values[20, 3] = values[21, 2] = -7
    with pytest.raises(WorkloadError, match=r"2 of 1200 .* first is -7 at index \(20, 3\)"):
        packing.pack(cupy.asarray(values))


@pytest.mark.parametrize("columns", [1, 20, 33])
@pytest.mark.parametrize("shape", [(1, 1), (1, 4003), (5000, 6), (3001, 2048)])
def test_products_of_float16(cupy, shape, columns):
    values = genotypes(*shape)
    matrix = packing.unpack(cupy.asarray(packing.pack(values)), shape[1], np.float16)
    rng = np.random.default_rng(1)
    for transposed, left in (False, values), (True, values.T):
        factor = rng.standard_normal((left.shape[1], columns)) * 10.0 ** (np.arange(columns) % 7)
        factor = factor.astype(np.float32)
        found = packing.multiply_float16(matrix, cupy.asarray(factor), transposed=transposed)
        most = (left @ np.abs(factor)).max(axis=0)
        assert (np.abs(found.get() - left @ factor.astype(np.float64)) <= 1e-5 * most).all()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("n", [40, 43])
def test_svd_of_integers(cupy, monkeypatch, packed, dtype, n):
    monkeypatch.setitem(svd.TILE_NBYTES, "cuda", 300 * n * 8)
    x, expected = svd.planted((2000, n), 4, chunks=((700, 1300), (n,)), packed=packed)
    how = {"packed_columns": n if packed else None, "dtype": dtype}
    u, s, v = dask.compute(*svd.svd_rows(x, 4, **how), scheduler="synchronous")
    rows = x.compute(scheduler="synchronous").get()
    rows = packing.unpack(rows, n) if packed else rows
    checks = svd.check(s, v, u.T @ u, rows, u, expected)
    assert all(check.ok for check in checks), checks
