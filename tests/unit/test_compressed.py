"""Blosc-compressed chunks: round trips, sizes, lazy forms, refusals."""

from __future__ import annotations

import pickle
import sys

import dask
import dask.array as da
import numpy as np
import pytest
from dask.sizeof import sizeof
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcdask.workloads import WorkloadError, compressed, count_tasks
from hpcdask.workloads.compressed import (
    CompressedBlock,
    compress,
    compress_array,
    decompress,
    decompress_array,
)
from launching import needs

pytestmark = needs("numcodecs")

FEW = settings(max_examples=20, deadline=None)
DTYPES = ["u1", "?", ">i2", "i8", "f4", "f8", "c16", "M8[s]", "S3"]


@pytest.fixture(autouse=True)
def _synchronous():
    with dask.config.set(scheduler="synchronous"):
        yield


def values(shape, dtype="u1"):
    return np.random.default_rng(0).integers(0, 4, shape).astype(np.dtype(dtype))


@FEW
@given(shape=st.lists(st.integers(0, 40), max_size=3), dtype=st.sampled_from(DTYPES))
def test_a_block_survives_compression_and_pickling(shape, dtype):
    block = values(tuple(shape), dtype)
    held = pickle.loads(pickle.dumps(compress(block)))
    again = decompress(held)
    assert (again.dtype, again.shape) == (block.dtype, block.shape)
    np.testing.assert_array_equal(again, block)
    again[...] = 0  # writable, as any other chunk


def test_views_are_compressed_in_their_own_order():
    block = values((30, 40))
    np.testing.assert_array_equal(decompress(compress(block.T[::2])), block.T[::2])


def test_numpy_takes_a_block_for_an_array():
    block = values((30, 40))
    np.testing.assert_array_equal(np.asarray(compress(block)), block)
    assert np.asarray(compress(block), np.float32).dtype == np.float32
    with pytest.raises(ValueError, match="new array"):
        np.asarray(compress(block), copy=False)


def test_a_worker_counts_what_a_block_holds():
    block = values((1000, 1000))
    held = compress(block)
    assert len(held.data) < sizeof(held) < len(held.data) + 200
    assert block.nbytes / sizeof(held) > 3.5


def test_rare_values_compress_better_than_two_bits_each():
    rng = np.random.default_rng(0)
    frequencies = rng.beta(0.2, 2, (1000, 1))
    block = rng.binomial(2, np.broadcast_to(frequencies, (1000, 1000))).astype(np.uint8)
    assert block.nbytes / sizeof(compress(block)) > 6


@FEW
@given(
    rows=st.lists(st.integers(1, 20), min_size=1, max_size=3),
    columns=st.lists(st.integers(1, 20), min_size=1, max_size=3),
    dtype=st.sampled_from(DTYPES),
)
def test_lazy_round_trip(rows, columns, dtype):
    block = values((sum(rows), sum(columns)), dtype)
    x = da.from_array(block, chunks=(tuple(rows), tuple(columns)))
    held = compress_array(x).persist()
    assert (held.shape, held.dtype, held.chunks) == (x.shape, x.dtype, x.chunks)
    assert all(isinstance(b, CompressedBlock) for b in held.__dask_graph__().values())
    np.testing.assert_array_equal(decompress_array(held).compute(), block)
    np.testing.assert_array_equal(np.asarray(held.compute()), block)


def test_one_dask_task_per_chunk():
    x = da.zeros((40, 30), chunks=(10, 15), dtype=np.uint8)
    held = compress_array(x)
    assert count_tasks(held) == 8 + 1  # and one to put the chunks together
    assert count_tasks(decompress_array(held).map_blocks(np.negative)) == 8 + 1


def test_refusals_come_before_anything_is_computed():
    with pytest.raises(WorkloadError, match="Python objects"):
        compress_array(da.from_array(np.array([None, 1]), chunks=1))
    with pytest.raises(
        WorkloadError, match=r"of 2,147,483,648 bytes is too large .* x.rechunk"
    ) as refusal:
        compress_array(da.zeros((2**12, 2**17), chunks=(2**12, 2**16), dtype=np.float64))
    x = da.zeros((2**12, 2**17), chunks=(2**12, 2**16), dtype=np.float64)
    names = {"x": x}
    exec(str(refusal.value).split(": ", 1)[1], {}, names)
    compress_array(names["x"])
    with pytest.raises(WorkloadError, match="ndarray, not a CompressedBlock"):
        decompress_array(da.zeros(3, chunks=3)).compute()


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "numcodecs.blosc", None)
    with pytest.raises(WorkloadError, match=r"hpcdask\[zarr\]"):
        compress(values(3))


def test_dask_threads_do_the_compressing():
    compress(values(3))
    from numcodecs import blosc

    assert blosc.use_threads is False
    assert compressed.MAX_NBYTES == blosc.MAX_BUFFERSIZE
