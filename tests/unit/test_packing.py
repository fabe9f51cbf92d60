"""Two-bit packing: round trips, refusals, lazy forms."""

from __future__ import annotations

import dask
import dask.array as da
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcdask.workloads import WorkloadError, count_tasks
from hpcdask.workloads.packing import pack, pack_array, unpack

FEW = settings(max_examples=20, deadline=None)


INTEGERS = [np.bool_, np.uint8, np.int8, np.int16, np.uint32, np.int64, np.uint64]


FLOATS = [np.float32, np.float64]


@pytest.fixture(autouse=True)
def _synchronous():
    with dask.config.set(scheduler="synchronous"):
        yield


def genotypes(shape, dtype=np.uint8, seed=0):
    top = 2 if dtype == np.bool_ else 4
    return np.random.default_rng(seed).integers(0, top, shape).astype(dtype)


# --- pack and unpack ------------------------------------------------------------------------------


@FEW
@given(
    others=st.lists(st.integers(0, 6), max_size=3),
    n=st.integers(0, 70),
    dtype=st.sampled_from(INTEGERS),
    out=st.sampled_from([*INTEGERS, *FLOATS]),
)
def test_packing_and_unpacking_is_the_identity(others, n, dtype, out):
    values = genotypes((*others, n), dtype)
    packed = pack(values)
    assert packed.dtype == np.uint8
    assert packed.shape == (*others, -(-n // 4))
    again = unpack(packed, n, out)
    assert again.dtype == out
    assert again.flags.c_contiguous
    np.testing.assert_array_equal(again, values.astype(out))


@pytest.mark.parametrize(
    ("dtype", "bad"), [(np.uint8, 4), (np.int8, -1), (np.int64, 256), (np.uint64, 2**63)]
)
def test_values_outside_the_range_are_counted_and_located(dtype, bad):
    values = genotypes((300, 301)).astype(dtype)
    values[270, 17] = values[299, 0] = bad
    with pytest.raises(WorkloadError, match=rf"2 of 90300 .* first is {bad} at index \(270, 17\)"):
        pack(values)


# --- lazy -----------------------------------------------------------------------------------------


@FEW
@given(
    rows=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    quads=st.lists(st.integers(1, 5), max_size=3),
    last=st.integers(1, 9),
)
def test_arrays_are_packed_by_chunks(rows, quads, last):
    chunks = (tuple(rows), (*(4 * q for q in quads), last))
    values = genotypes((sum(rows), sum(chunks[1])))
    packed = pack_array(da.from_array(values, chunks=chunks))
    assert packed.chunks == (chunks[0], (*quads, -(-last // 4)))
    np.testing.assert_array_equal(packed.compute(), pack(values))


def test_one_dask_task_per_chunk():
    x = da.zeros((40, 30), chunks=(10, 16), dtype=np.uint8)
    assert count_tasks(pack_array(x)) == 8 + 1  # and one to put the chunks together


def test_lazy_refusals_come_before_anything_is_computed():
    with pytest.raises(WorkloadError, match=r"x = x.rechunk\({1: 12}\)"):
        pack_array(da.zeros((5, 25), chunks=(5, 10), dtype=np.uint8))
    with pytest.raises(WorkloadError, match="float64"):
        pack_array(da.zeros(8, chunks=4))
    x = da.zeros(8, chunks=4, dtype=np.uint8)
    with pytest.raises(WorkloadError, match="compute_chunk_sizes"):
        pack_array(x[x > 0])
