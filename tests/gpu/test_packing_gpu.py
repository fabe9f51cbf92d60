"""Packed genotypes on a real GPU: round trips, products, and that nothing is unpacked in memory."""

from __future__ import annotations

import numpy as np
import pytest

from hpcdask.workloads import WorkloadError, integer_gpu, packing

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]

# Of the largest sum of magnitudes.
TOLERANCE = {np.float32: 2e-6, np.float64: 1e-14}


@pytest.fixture
def cupy(gpus):
    return pytest.importorskip("cupy")


def genotypes(*shape):
    return np.random.default_rng(0).integers(0, 4, shape, dtype=np.uint8)


def factor(*shape, dtype):
    return np.random.default_rng(1).standard_normal(shape).astype(dtype)


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


@pytest.mark.parametrize("tensor_cores", [True, False])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("columns", [1, 20, 33, 64])
@pytest.mark.parametrize("shape", [(1, 1), (1, 4003), (5000, 6), (3001, 2048), (777, 5002)])
def test_products(cupy, monkeypatch, shape, columns, dtype, tensor_cores):
    if not tensor_cores:
        monkeypatch.setattr(integer_gpu, "can_multiply", lambda: False)
    elif not integer_gpu.can_multiply():
        pytest.skip("no integer tensor cores")
    m, n = shape
    values = genotypes(m, n)
    right, left = factor(n, columns, dtype=dtype), factor(m, columns, dtype=dtype)
    packed = cupy.asarray(packing.pack(values))
    found = packing.multiply(packed, cupy.asarray(right), n)
    check(found, values, right, dtype)
    found = packing.multiply_transposed(packed, cupy.asarray(left), n)
    check(found, values.T, left, dtype)


def check(found, values, factor, dtype):
    assert found.dtype == dtype
    values, factor = values.astype(np.float64), factor.astype(np.float64)
    most = (values @ np.abs(factor)).max()
    assert np.abs(found.get() - values @ factor).max() <= TOLERANCE[dtype] * most


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("columns", [1, 20, 64])
@pytest.mark.parametrize(
    "shape", [(1, 1), (1, 4003), (5000, 6), (3001, 2048), (777, 5002), (130, 70_001), (70_001, 9)]
)
def test_products_of_bytes(cupy, shape, columns, dtype):
    if not integer_gpu.can_multiply():
        pytest.skip("no integer tensor cores")
    m, n = shape
    values = np.random.default_rng(0).integers(200, 256, shape, dtype=np.uint8)
    right, left = factor(n, columns, dtype=dtype), factor(m, columns, dtype=dtype)
    found = integer_gpu.multiply(cupy.asarray(values), cupy.asarray(right))
    check(found.astype(dtype), values, right, dtype)
    found = integer_gpu.multiply_transposed(cupy.asarray(values), cupy.asarray(left), n)
    check(found.astype(dtype), values.T, left, dtype)


def test_nothing_near_the_unpacked_matrix_is_allocated_and_sums_repeat(cupy):
    if not integer_gpu.can_multiply():
        pytest.skip("no integer tensor cores")
    m, n, columns = 200_000, 20_000, 20
    packed = cupy.asarray(packing.pack(genotypes(1000, n)))
    packed = cupy.tile(packed, (m // 1000, 1))
    right, left = (cupy.asarray(factor(k, columns, dtype=np.float32)) for k in (n, m))
    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        product = packing.multiply(packed, right, n)
        transposed = packing.multiply_transposed(packed, left, n)
        assert pool.total_bytes() < packed.nbytes / 2
        assert (product == packing.multiply(packed, right, n)).all()
        assert (transposed == packing.multiply_transposed(packed, left, n)).all()
    assert (product[:1000] == product[-1000:]).all()
    folded = left.reshape(-1, 1000, columns).astype(np.float64).sum(axis=0)
    expected = packing.multiply_transposed(packed[:1000], folded, n)
    assert float(abs(transposed - expected).max()) <= 1e-5 * float(abs(expected).max())
