"""Zarr stores: what is read, in which threads, how damage is told; and the genotype pipeline."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
from types import SimpleNamespace

import dask
import numcodecs
import numpy as np
import pytest
import zarr
import zarr.buffer.cpu
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, ZstdCodec

from hpcdask.workloads import WorkloadError, count_tasks, zarr_reading
from hpcdask.workloads.genotypes import (
    MISSING,
    count_variants,
    normalise,
    population_structure,
)
from hpcdask.workloads.made_genotypes import populations, write_genotypes
from hpcdask.workloads.svd import svd_exact, svd_rows
from hpcdask.workloads.zarr import find, n_missing_chunks, open_rows, read_all
from hpcdask.workloads.zarr_reading import StoredRows, reading_way

FEW = settings(max_examples=20, deadline=None)
HOST = socket.gethostname()


@pytest.fixture(autouse=True)
def _synchronous():
    with dask.config.set(scheduler="synchronous"):
        yield


def tree(n: int, branches: int) -> int:
    """Nodes of a reduction tree above ``n`` leaves."""
    total = 0
    while n > 1:
        n = math.ceil(n / branches)
        total += n
    return total


def store(path, values, chunks, **options):
    array = zarr.create_array(
        str(path), shape=values.shape, dtype=values.dtype, chunks=chunks, **options
    )
    array[:] = values
    return str(path)


def bytes_of(shape, seed=0):
    return np.random.default_rng(seed).integers(0, 4, shape, dtype=np.uint8)


rows_on_cpu = functools.partial(open_rows, device="cpu", n_slots=2)


# --- reading --------------------------------------------------------------------------------------


@FEW
@given(
    shape=st.tuples(st.integers(1, 60), st.integers(1, 40)),
    chunks=st.tuples(st.integers(9, 70), st.integers(15, 50)),
    dtype=st.sampled_from(["uint8", "int8", "bool", ">i4", "uint64", "float32", "float64"]),
    zarr_format=st.sampled_from([2, 3]),
    compressed=st.booleans(),
    max_nbytes=st.integers(1, 5_000),
    prefetch=st.booleans(),
)
def test_rows_are_as_stored(shape, chunks, dtype, zarr_format, compressed, max_nbytes, prefetch):
    values = np.random.default_rng(1).integers(0, 2, shape).astype(dtype)
    with tempfile.TemporaryDirectory() as folder:
        path = store(
            f"{folder}/x",
            values,
            chunks,
            zarr_format=zarr_format,
            compressors="auto" if compressed else None,
        )
        x = rows_on_cpu(path, max_nbytes=max_nbytes, prefetch=prefetch)
        assert (x.shape, x.dtype, x.numblocks[1]) == (shape, values.dtype.newbyteorder("="), 1)
        assert find(path).plain == (zarr_format == 3 and not compressed)
        assert all(height % chunks[0] == 0 for height in x.chunks[0][:-1])
        read = np.asarray(x.compute())
        np.testing.assert_array_equal(read, values)
        assert read.dtype == x.dtype
        assert read_all(x, device="cpu").compute() == values.astype(float).sum()


def test_big_endian_files_are_read_through_the_host(tmp_path):
    values = np.arange(12, dtype="i4").reshape(4, 3)
    path = store(
        tmp_path / "x", values, (2, 3), compressors=None, serializer=BytesCodec(endian="big")
    )
    assert not find(path).plain
    np.testing.assert_array_equal(rows_on_cpu(path).compute(), values)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "float32"])
def test_the_sum_of_all_is_exact(tmp_path, dtype):
    values = np.full((3, 1000), 100, dtype)
    values[1] *= -1 if dtype != "uint8" else 1
    x = rows_on_cpu(store(tmp_path / "x", values, (2, 300)))
    total = read_all(x, device="cpu").compute()
    assert total == values.sum(dtype=np.int64)
    assert total.dtype == {"u": "uint64", "i": "int64", "f": "float64"}[np.dtype(dtype).kind]


def test_an_array_of_a_group_and_shards(tmp_path):
    values = bytes_of((100, 30))
    group = zarr.create_group(str(tmp_path / "g"))
    calls = group.create_group("calls")
    array = calls.create_array(
        "genotype", shape=values.shape, dtype="u1", chunks=(10, 10), shards=(20, 30)
    )
    array[:] = values
    x = rows_on_cpu(tmp_path / "g", component="calls/genotype", max_nbytes=1)
    assert x.chunks[0] == (20,) * 5
    np.testing.assert_array_equal(x.compute(), values)
    with pytest.raises(WorkloadError, match=r"is a group.*genotype \(100, 30\)"):
        rows_on_cpu(tmp_path / "g")
    with pytest.raises(WorkloadError, match=r"is a group.*component=.*genotype"):
        rows_on_cpu(tmp_path / "g", component="calls")
    with pytest.raises(WorkloadError, match=r"has no 'genotype'; its arrays: calls/genotype"):
        rows_on_cpu(tmp_path / "g", component="genotype")


@pytest.mark.parametrize("n_chunks", [1, 8, 63, 64, 65])
@pytest.mark.parametrize("prefetch", [False, True])
def test_one_task_for_each_chunk(tmp_path, n_chunks, prefetch):
    path = store(tmp_path / "x", bytes_of((2 * n_chunks, 3)), (2, 3))
    x = open_rows(path, device="cuda", n_slots=1, max_nbytes=6, prefetch=prefetch)
    assert x.numblocks == (n_chunks, 1)
    assert count_tasks(read_all(x)) == n_chunks + tree(n_chunks, 64) + 1
    if n_chunks == 8:
        # The tree of the SVD, its solver, two views of it, and the names the client asked for.
        _, s, v = svd_rows(x, 2, prepare=normalise)
        assert count_tasks(s, v) == n_chunks + tree(8, 8) + 2 * 2


def test_rows_are_served_from_bands(tmp_path, monkeypatch):
    monkeypatch.setitem(zarr_reading.BAND_NBYTES, "cpu", 200)
    values = bytes_of((103, 10))
    stored = find(store(tmp_path / "x", values, (10, 4)))
    for edge in slice(60, None), slice(60, 70):
        assert StoredRows(stored, 20, 80, "cpu")[edge].shape == (0, 10)
    rows = StoredRows(stored, 20, 103, "cpu")
    assert (rows.shape, rows.nbytes, rows.ndim) == ((83, 10), 830, 2)
    assert len(rows._bands) == 5
    for piece in (
        slice(None),
        slice(3, 5),
        slice(19, 21),
        slice(40, 99),
        slice(5, 5),
        slice(-3, None),
        slice(83, None),
        slice(30, 15),
    ):
        np.testing.assert_array_equal(rows[piece], values[20:][piece])
    again = pickle.loads(pickle.dumps(rows))
    np.testing.assert_array_equal(np.asarray(again, dtype=float), values[20:])
    assert len(pickle.dumps(rows)) < 500
    assert sys.getsizeof(rows) >= 830
    with pytest.raises(IndexError, match="steps of 1"):
        rows[::2]


def test_a_store_written_anew_has_other_keys(tmp_path):
    path = store(tmp_path / "x", bytes_of((9, 3)), (3, 3))
    first = rows_on_cpu(path)
    assert first.name == rows_on_cpu(path).name
    store(path, bytes_of((9, 3), seed=1), (3, 3), overwrite=True)
    assert first.name != rows_on_cpu(path).name


# --- threads --------------------------------------------------------------------------------------


def test_the_next_rows_are_read_while_the_first_are_computed_with(tmp_path, monkeypatch):
    monkeypatch.setitem(zarr_reading.BAND_NBYTES, "cpu", 100)
    monkeypatch.setattr(zarr_reading, "n_readers", lambda _: 1)
    path = store(tmp_path / "x", bytes_of((1000, 10)), (10, 10))
    x = rows_on_cpu(path, max_nbytes=10_000, prefetch=True)
    assert x.numblocks == (1, 1)
    in_second, first_is_done, read = threading.Event(), threading.Event(), zarr_reading._read

    def reading(stored, start, *rest):
        if start == 10:
            in_second.set()
            assert first_is_done.wait(120)
        return read(stored, start, *rest)

    def compute(block):
        total = int(block[:10].sum())
        assert in_second.wait(120)
        first_is_done.set()
        return np.full((1, 1), total + int(block[10:].sum()))

    monkeypatch.setattr(zarr_reading, "_read", reading)
    total = x.map_blocks(compute, chunks=((1,), (1,)), meta=np.empty((0, 0), int)).compute()
    assert total == bytes_of((1000, 10)).sum()


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("n_threads", [1, 3])
def test_nothing_of_zarr_runs_in_threads_of_its_own(tmp_path, monkeypatch, zarr_format, n_threads):
    monkeypatch.setitem(zarr_reading.BAND_NBYTES, "cpu", 100)
    monkeypatch.setattr(zarr_reading, "n_readers", lambda _: n_threads)
    zarr_reading._pool.cache_clear()
    values = bytes_of((200, 100))
    path = store(
        tmp_path / "x", values, (10, 10), zarr_format=zarr_format, compressors=BLOSC[zarr_format]
    )
    before = dask.config.merge(zarr.config.config)
    seen = set()

    def decode(self, *args):
        seen.add(threading.current_thread().name)
        return blosc_decode(self, *args)

    blosc_decode = numcodecs.Blosc.decode
    monkeypatch.setattr(numcodecs.Blosc, "decode", decode)
    with dask.config.set(scheduler="threads", num_workers=4):
        np.testing.assert_array_equal(rows_on_cpu(path, max_nbytes=1).compute(), values)
    assert all(name.startswith("hpcdask-zarr") for name in seen)
    assert 1 <= len(seen) <= n_threads
    assert zarr.config.config == before
    assert numcodecs.blosc.use_threads is False  # Blosc itself


def test_a_worker_reads_in_as_many_threads_as_it_computes(tmp_path):
    from distributed import Client, LocalCluster

    values = bytes_of((400, 50))
    path = store(tmp_path / "x", values, (10, 50))
    with (
        LocalCluster(
            n_workers=1, threads_per_worker=3, processes=False, dashboard_address=":0"
        ) as local,
        Client(local) as client,
    ):
        assert client.submit(zarr_reading.n_readers, "cpu").result() == 3
        way = client.submit(reading_way, find(path), "cpu").result()
        x = rows_on_cpu(path, max_nbytes=1000, prefetch=True)
        assert client.compute(read_all(x, device="cpu")).result() == values.sum()
        s = svd_rows(x, 3, prepare=normalise, device="cpu")[1]
        s_of_arrays = svd_rows(rows_on_cpu(path), 3, prepare=normalise, device="cpu")[1]
        s, s_of_arrays = client.gather(client.compute([s, s_of_arrays]))
    assert way == "zarr-python into host memory, 3 threads"
    np.testing.assert_allclose(s, s_of_arrays)
    assert 1 <= zarr_reading.n_readers("cuda") <= 8


# --- devices --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kvikio", [False, True])
@pytest.mark.parametrize("compressed", [False, True])
def test_bands_go_to_the_device(tmp_path, monkeypatch, kvikio, compressed):
    """With stand-ins for CuPy and kvikio."""
    in_device = []
    fake_cupy = SimpleNamespace(
        asarray=lambda x: in_device.append("copied") or np.asarray(x),
        concatenate=np.concatenate,
        cuda=SimpleNamespace(
            Device=contextlib.nullcontext,
            get_current_stream=lambda: SimpleNamespace(synchronize=lambda: None),
        ),
    )

    class FakeGDSStore(zarr.storage.LocalStore):
        async def get(self, *args, **kwargs):
            in_device.append("kvikio")
            return await super().get(*args, **kwargs)

    monkeypatch.setattr(zarr_reading, "array_module", lambda _: fake_cupy)
    monkeypatch.setattr(zarr_reading, "_gds_store", lambda: FakeGDSStore if kvikio else None)
    monkeypatch.setattr("zarr.buffer.gpu.buffer_prototype", zarr.buffer.cpu.buffer_prototype)
    values = bytes_of((40, 6))
    path = store(tmp_path / "x", values, (10, 6), compressors="auto" if compressed else None)
    x = open_rows(path, device="cuda", n_slots=1)
    np.testing.assert_array_equal(x.compute(), values)
    direct = kvikio and not compressed
    assert ("kvikio" in in_device) == direct
    way = reading_way(find(path), "cuda")
    assert way.startswith("kvikio into device" if direct else "zarr-python into host")
    if not direct:
        assert way.endswith("format 2" if compressed else "kvikio is not installed")


def test_graphs_for_gpus_need_no_cupy_on_the_client(tmp_path):
    path = store(tmp_path / "x", bytes_of((400, 50)), (10, 50))
    code = f"""
    import sys
    class NoCuPy:
        def find_spec(self, name, *_):
            if name.split(".")[0] in ("cupy", "kvikio"):
                raise ImportError(name)
    sys.meta_path.insert(0, NoCuPy())
    from hpcdask.workloads import count_tasks, genotypes, zarr
    assert "zarr" not in sys.modules
    for prefetch in False, True:
        x = zarr.open_rows({path!r}, n_slots=2, max_nbytes=1000, prefetch=prefetch)
        assert count_tasks(x, zarr.read_all(x)) > 20
    s, v, n = genotypes.population_structure({path!r}, 2, n_slots=2)
    assert count_tasks(s, v, n) > 5
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


# --- what is wrong with a store -------------------------------------------------------------------

BLOSC = {
    2: numcodecs.Blosc("lz4", shuffle=numcodecs.Blosc.BITSHUFFLE),
    3: BloscCodec(cname="lz4", shuffle="bitshuffle"),
}


@pytest.mark.parametrize("codec", ["blosc", "auto", None])
@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("missing_nbytes", [1, 1000, None])
def test_a_truncated_chunk_is_named(tmp_path, codec, zarr_format, missing_nbytes):
    compressor = BLOSC[zarr_format] if codec == "blosc" else codec
    path = store(
        tmp_path / "x",
        bytes_of((400, 90)),
        (100, 45),
        zarr_format=zarr_format,
        compressors=compressor,
    )
    key = "2.1" if zarr_format == 2 else "c/2/1"
    nbytes = 0 if missing_nbytes is None else os.path.getsize(f"{path}/{key}") - missing_nbytes
    os.truncate(f"{path}/{key}", nbytes)
    x = rows_on_cpu(path, max_nbytes=9000)
    np.testing.assert_array_equal(x[:200].compute(), bytes_of((400, 90))[:200])
    with pytest.raises(WorkloadError, match=f"chunk {key} of {path} .*{HOST}.*{nbytes} bytes"):
        x.compute()


@pytest.mark.parametrize("index", ["start", "end"])
@pytest.mark.parametrize("codec", ["blosc", "auto", None])
@pytest.mark.parametrize("rows", [40, 100])  # part of a shard, and all of it
@pytest.mark.parametrize("kept", [-1, -50, 100, 1, 0])
def test_a_truncated_shard_is_named(tmp_path, index, codec, rows, kept):
    """An empty one that should end with its index was read as fill values."""
    path = store(
        tmp_path / "x",
        bytes_of((100, 90)),
        (20, 45),
        zarr_format=3,
        shards={"shape": (100, 90), "index_location": index},
        compressors=BLOSC[3] if codec == "blosc" else codec,
    )
    file = f"{path}/c/0/0"
    # Chunks are not written in order
    last = rows_on_cpu(path, max_nbytes=rows * 90)
    np.testing.assert_array_equal(last.compute(), bytes_of((100, 90)))
    nbytes = kept if kept >= 0 else os.path.getsize(file) + kept
    os.truncate(file, nbytes)
    with pytest.raises(WorkloadError, match=f"chunk c/0/0 of {path} .*{HOST}.*{nbytes} bytes"):
        rows_on_cpu(path, max_nbytes=rows * 90).compute()


@pytest.mark.parametrize("endian", ["little", "big"])
def test_a_shard_that_begins_with_its_index(tmp_path, endian):
    path, values = str(tmp_path / "x"), bytes_of((100, 90))
    codecs = zarr.codecs
    sharding = codecs.ShardingCodec(
        chunk_shape=(20, 45),
        index_codecs=[codecs.BytesCodec(endian=endian), codecs.Crc32cCodec()],
        index_location="start",
    )
    array = zarr.create(
        values.shape, chunks=values.shape, dtype="u1", store=path, zarr_format=3, codecs=[sharding]
    )
    array[:] = values
    np.testing.assert_array_equal(rows_on_cpu(path).compute(), values)


def test_a_chunk_that_is_no_file_of_ours_is_an_error_too(tmp_path, monkeypatch):
    path = store(tmp_path / "x", bytes_of((40, 9)), (10, 9))

    def refused(self, *args, **kwargs):
        raise PermissionError(13, "Permission denied", "c/0/0")

    x = rows_on_cpu(path)
    checked = zarr_reading._checked_store()
    get = checked.get

    async def no_chunks(self, key, *args, **kwargs):
        return refused(self) if key.startswith("c/") else await get(self, key, *args, **kwargs)

    monkeypatch.setattr(checked, "get", no_chunks)
    with pytest.raises(WorkloadError, match=r"chunk c/0/0 .*Permission denied") as told:
        x.compute()
    assert "damaged" not in str(told.value)


def test_a_missing_chunk_is_fill_values(tmp_path):
    path = store(tmp_path / "x", bytes_of((40, 9)) + 1, (10, 9), fill_value=7)
    assert n_missing_chunks(path) == 0
    os.remove(f"{path}/c/2/0")
    assert n_missing_chunks(path) == 1
    assert (rows_on_cpu(path).compute()[20:30] == 7).all()


def test_exact_svd_of_dependent_columns_while_rows_are_read(tmp_path):
    x = np.random.default_rng(0).random((53, 7))
    x[:, 1] = x[:, 2]  # QR decides, which takes whole chunks
    rows = rows_on_cpu(store(tmp_path / "x", x, (10, 3)), prefetch=True)
    s = svd_exact(rows, device="cpu")[1].compute()
    np.testing.assert_allclose(s, np.linalg.svd(x)[1], atol=1e-12)


def test_a_missing_shard_is_counted_and_none_beyond_the_edge(tmp_path):
    path = store(tmp_path / "x", bytes_of((30, 40)) % 3, (10, 10), shards=(20, 20))
    assert n_missing_chunks(path) == 0
    population_structure(path, 2, n_slots=2, device="cpu")
    os.remove(f"{path}/c/0/0")
    assert n_missing_chunks(path) == 1
    with pytest.raises(WorkloadError, match="lacks 1 of its chunks or shards"):
        population_structure(path, 2, n_slots=2, device="cpu")


def test_a_component_as_zarr_names_it(tmp_path):
    group = zarr.create_group(str(tmp_path / "g"))
    array = group.create_array("calls/gt", shape=(40, 9), chunks=(10, 9), dtype="u1")
    array[...] = bytes_of((40, 9))
    assert find(tmp_path / "g", array.name) == find(tmp_path / "g", "calls/gt")
    assert find(tmp_path / "g", array.name).stamp
    os.truncate(tmp_path / "g/calls/gt/c/2/0", 1)
    with pytest.raises(WorkloadError, match=r"chunk c/2/0 of .*/g/calls/gt "):
        rows_on_cpu(tmp_path / "g", component=array.name).compute()


def test_a_component_of_text_and_one_of_an_array(tmp_path):
    group = zarr.create_group(str(tmp_path / "g"))
    group.create_array("id", shape=(5,), chunks=(5,), dtype=np.dtypes.StringDType())
    with pytest.raises(WorkloadError, match="/g/id has 1 dimensions"):
        find(tmp_path / "g", "id")
    path = store(tmp_path / "x", bytes_of((40, 9)), (10, 9))
    with pytest.raises(WorkloadError, match="has no 'foo'; it is not a group"):
        find(path, "foo")


def test_blosc_below_another_codec(tmp_path):
    """The head of its files is not Blosc's."""
    x = bytes_of((40, 90))
    for last in (ZstdCodec(), Crc32cCodec()):
        path = store(
            tmp_path / "x", x, (20, 90), compressors=[BLOSC[3], last], zarr_format=3, overwrite=True
        )
        np.testing.assert_array_equal(rows_on_cpu(path).compute(), x)


def test_a_store_that_workers_do_not_see_or_that_changed(tmp_path):
    path = store(tmp_path / "x", bytes_of((40, 9)), (10, 9))
    x = rows_on_cpu(path)
    store(path, bytes_of((50, 9)), (10, 9), overwrite=True)
    with pytest.raises(WorkloadError, match=r"is \(50, 9\) uint8 .* was \(40, 9\) uint8.*open it"):
        x.compute()
    shutil.move(path, f"{path}.elsewhere")
    with pytest.raises(WorkloadError, match=f"{HOST} does not see .*{path}.*share"):
        x.compute()


def test_errors_before_anything_is_computed(tmp_path):
    def refused(match, name, **options):
        with pytest.raises(WorkloadError, match=match):
            rows_on_cpu(tmp_path / name, **options)

    refused(f"nowhere does not exist on {HOST}", "nowhere")
    (tmp_path / "file").write_text("x")
    refused("is not a folder", "file")
    (tmp_path / "empty").mkdir()
    refused("empty is not a Zarr store", "empty")
    refused("has no 'a'; it is not a group", "empty", component="a")
    zarr.create_group(str(tmp_path / "group"))
    refused("it has no arrays", "group")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "zarr.json").write_text("{")
    refused("metadata of .*bad cannot be read", "bad")
    store(tmp_path / "cube", np.zeros((2, 3, 4)), (1, 1, 1))
    refused(r"cube has 3 dimensions \(2, 3, 4\)", "cube")
    store(tmp_path / "complex", np.zeros((2, 3), complex), (1, 1))
    refused("complex128; integers", "complex")
    store(tmp_path / "none", np.zeros((0, 3)), (1, 1))
    refused("0 x 3: nothing to read", "none")


def test_a_missing_zarr_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "zarr", None)
    with pytest.raises(WorkloadError, match=r'pip install "hpcdask\[zarr\]"'):
        rows_on_cpu(tmp_path)


# --- genotypes ------------------------------------------------------------------------------------


def normalised(g, max_missing, min_maf):
    """Variant by variant, in float64."""
    out = np.zeros(g.shape)
    counts = [0, 0, 0]
    for i, row in enumerate(g):
        known = row != MISSING
        copies, alleles = int(row[known].sum()), 2 * int(known.sum())
        p = copies / alleles if alleles else 0
        if (~known).sum() / row.size > max_missing:
            counts[1] += 1
        elif not 0 < p < 1 or min(copies, alleles - copies) / alleles < min_maf:
            counts[2] += 1
        else:
            counts[0] += 1
            out[i, known] = (row[known] - 2 * p) / math.sqrt(2 * p * (1 - p))
    return out, counts


@FEW
@given(
    shape=st.tuples(st.integers(1, 40), st.integers(1, 60)),
    max_missing=st.sampled_from([0, 0.1, 0.3, 1]),
    min_maf=st.sampled_from([0, 0.05, 0.3]),
    dtype=st.sampled_from(["float32", "float64"]),
    data=st.data(),
)
def test_normalised_genotypes(shape, max_missing, min_maf, dtype, data):
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    g = rng.binomial(2, rng.uniform(0, 1, (shape[0], 1)), shape).astype(np.uint8)
    g[rng.random(shape) < rng.uniform(0, 0.4, (shape[0], 1))] = MISSING
    expected, counts = normalised(g, max_missing, min_maf)
    options = {"max_missing": max_missing, "min_maf": min_maf}
    out = normalise(g, dtype=dtype, **options)
    assert out.dtype == dtype
    np.testing.assert_allclose(out, expected, atol=1e-5 if dtype == "float32" else 1e-12)
    np.testing.assert_allclose(out.sum(axis=1), 0, atol=1e-3)
    x = dask.array.from_array(g, chunks=(7, -1))
    assert list(count_variants(x, device="cpu", **options).compute()) == counts


def test_a_variant_at_a_threshold_is_kept():
    """Whichever of its alleles is counted; 0.1 and 0.29 are not exact in floating point."""
    both = np.zeros((2, 10), np.uint8)
    both[0, :9] = both[1, :1] = 2
    x = dask.array.from_array(both, chunks=(1, -1))
    assert list(count_variants(x, min_maf=0.1, device="cpu").compute()) == [2, 0, 0]
    some_missing = np.ones((1, 100), np.uint8)
    some_missing[0, :29] = MISSING
    x = dask.array.from_array(some_missing, chunks=(1, -1))
    assert list(count_variants(x, max_missing=0.29, device="cpu").compute()) == [1, 0, 0]


def test_a_genotype_above_three_is_refused():
    g = bytes_of((5, 5))
    g[3, 3] = 9
    with pytest.raises(WorkloadError, match="there is a genotype 9"):
        normalise(g)


def test_signed_genotypes_may_have_another_mark_for_missing():
    values = dask.array.from_array(np.array([[0, 1, -1], [2, 1, 0]], np.int8), chunks=(1, 3))
    with pytest.raises(WorkloadError, match="genotypes are int8, not uint8"):
        count_variants(values, device="cpu").compute()


@pytest.fixture(scope="module")
def cohort(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("cohort") / "g")
    with dask.config.set(scheduler="synchronous"):
        total = write_genotypes(path, (3000, 90), chunks=(200, 50), n_slots=2, n_populations=3)
        return path, int(total.compute())


def test_written_genotypes_have_a_known_sum_and_structure(cohort):
    path, total = cohort
    x = rows_on_cpu(path, max_nbytes=40_000)
    g = x.compute()
    assert (g.shape, g.dtype, g.max()) == ((3000, 90), np.uint8, MISSING)
    assert read_all(x, device="cpu").compute() == g.sum(dtype=int) == total
    assert n_missing_chunks(path) == 0
    assert 0.01 < (g == MISSING).mean() < 0.06
    known = np.ma.masked_equal(g, MISSING)
    p = np.stack([known[:, populations(90, 3) == i].mean(axis=1) / 2 for i in range(3)])
    within = (p * (1 - p)).mean(axis=0)
    everywhere = p.mean(axis=0) * (1 - p.mean(axis=0))
    # Between three populations 2/3 of an FST of 0.1, and what thirty samples of each add.
    assert 0.05 < 1 - within.sum() / everywhere.sum() < 0.1
    assert list(populations(7, 3)) == [0, 0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("codec", ["zstd", None])
def test_genotypes_are_the_same_on_any_cluster_and_in_any_format(
    cohort, tmp_path, zarr_format, codec
):
    made = write_genotypes(
        tmp_path / "g",
        (3000, 90),
        chunks=(200, 90),
        n_slots=7,
        n_populations=3,
        zarr_format=zarr_format,
        codec=codec,
    )
    with dask.config.set(scheduler="threads"):
        assert made.compute() == cohort[1]
    same = rows_on_cpu(cohort[0]).compute()
    np.testing.assert_array_equal(rows_on_cpu(tmp_path / "g").compute(), same)
    array = zarr.open_array(str(tmp_path / "g"), mode="r")
    assert array.metadata.zarr_format == zarr_format
    assert bool(array.compressors) == (codec is not None)


def test_writing_has_one_task_for_each_slab(tmp_path):
    made = write_genotypes(tmp_path / "g", (2_000_000, 9000), chunks=(1000, 9000), n_slots=4)
    assert count_tasks(made) == 144 + tree(144, 64) + 1
    assert n_missing_chunks(tmp_path / "g") == 2000


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_populations_are_told_apart(cohort, dtype):
    path, _ = cohort
    options = {"device": "cpu", "n_power_iter": 6, "dtype": dtype}
    found = population_structure(path, 4, n_slots=2, max_nbytes=40_000, **options)
    s, v, variants = dask.compute(*found)
    expected, counts = normalised(rows_on_cpu(path).compute(), 0.1, 0.01)
    exact = np.linalg.svd(expected, full_matrices=False)
    np.testing.assert_allclose(s[:2], exact.S[:2], rtol=1e-5)
    np.testing.assert_allclose(np.abs(v[:2] @ exact.Vh[:2].T), np.eye(2), atol=1e-4)
    assert list(variants) == counts
    assert min(counts) > 0
    assert s[1] > 1.5 * s[2]
    of = populations(90, 3)
    centres = np.stack([v[:2, of == i].mean(axis=1) for i in range(3)])
    distances = np.linalg.norm(v[:2].T[:, None] - centres, axis=2)
    assert (distances.argmin(axis=1) == of).all()
    assert np.sort(distances, axis=1)[:, 0].max() < 0.5 * np.sort(distances, axis=1)[:, 1].min()


def test_one_reading_gives_structure_and_counts(cohort, monkeypatch):
    path, _ = cohort
    n_read, read = [], zarr_reading._read
    monkeypatch.setattr(zarr_reading, "_read", lambda *a: n_read.append(a[1]) or read(*a))
    found = population_structure(path, 2, n_slots=2, device="cpu", max_nbytes=40_000)
    dask.compute(*found)
    assert sorted(n_read) == sorted(set(n_read))
    n = len(n_read)
    assert n == 8
    # s and v alone: one for each chunk; with the counts, the chunk and its two uses.
    assert count_tasks(found.s, found.v) == n + tree(n, 8) + 2 * 2
    assert count_tasks(*found) == 3 * n + tree(n, 8) + 2 * 2 + tree(n, 64) + 1


def test_genotype_errors_before_anything_is_computed(cohort, tmp_path):
    def refused(match, path=cohort[0], **options):
        with pytest.raises(WorkloadError, match=match):
            population_structure(path, options.pop("k", 2), n_slots=1, device="cpu", **options)

    refused("k=91 is out of range", k=91)
    refused(r"max_missing=1\.5 is out of range", max_missing=1.5)
    refused(r"min_maf=0\.6 is out of range", min_maf=0.6)
    refused("float16 is not accepted", dtype="float16")
    refused("is int8; genotypes are uint8", store(tmp_path / "i", np.zeros((4, 4), "i1"), (1, 4)))
    lacking = store(tmp_path / "l", bytes_of((4, 4)) + 1, (1, 4))
    os.remove(f"{lacking}/c/2/0")
    refused("lacks 1 of its chunks or shards, which would be read as genotype 0", lacking)
    with pytest.raises(WorkloadError, match="exists: choose another path"):
        write_genotypes(cohort[0], (5, 5), chunks=(1, 5), n_slots=1)
    with pytest.raises(WorkloadError, match="n_populations=9 is out of range: 1 to 5"):
        write_genotypes(tmp_path / "w", (5, 5), chunks=(1, 5), n_slots=1, n_populations=9)
    with pytest.raises(WorkloadError, match="must be positive"):
        write_genotypes(tmp_path / "w", (5, 5), chunks=(0, 5), n_slots=1)
    (tmp_path / "file").write_text("x")
    with pytest.raises(WorkloadError, match="cannot be made"):
        write_genotypes(tmp_path / "file" / "w", (5, 5), chunks=(1, 5), n_slots=1)
    assert not (tmp_path / "w").exists()


def test_a_lost_chunk_of_written_genotypes_is_missing_variants(tmp_path):
    path = tmp_path / "g"
    write_genotypes(path, (400, 50), chunks=(100, 50), n_slots=1).compute()
    os.remove(path / "c" / "1" / "0")
    found = population_structure(path, 2, n_slots=1, device="cpu")
    assert found.variants.compute()[1] >= 100
