"""Zarr stores: what is read, how errors are told; and the genotype pipeline."""

from __future__ import annotations

import functools
import math
import os
import shutil
import sys
import tempfile
from types import SimpleNamespace

import dask
import numpy as np
import pytest
import zarr
import zarr.buffer.cpu
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.codecs import BytesCodec

from hpcdask.workloads import WorkloadError
from hpcdask.workloads import zarr as stores
from hpcdask.workloads.genotypes import (
    MISSING,
    normalise,
    population_structure,
    populations,
    write_genotypes,
)
from hpcdask.workloads.zarr import find, open_rows

FEW = settings(max_examples=20, deadline=None)


@pytest.fixture(autouse=True)
def _synchronous():
    with dask.config.set(scheduler="synchronous"):
        yield


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
)
def test_rows_are_as_stored(shape, chunks, dtype, zarr_format, compressed, max_nbytes):
    values = np.random.default_rng(1).integers(0, 2, shape).astype(dtype)
    how = {"zarr_format": zarr_format, "compressors": "auto" if compressed else None}
    with tempfile.TemporaryDirectory() as folder:
        x = rows_on_cpu(store(f"{folder}/x", values, chunks, **how), max_nbytes=max_nbytes)
        assert (x.shape, x.dtype, x.numblocks[1]) == (shape, values.dtype.newbyteorder("="), 1)
        assert all(height % chunks[0] == 0 for height in x.chunks[0][:-1])
        read = x.compute()
        np.testing.assert_array_equal(read, values)
        assert read.dtype == x.dtype


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
    assert find(tmp_path / "g", array.name) == find(tmp_path / "g", "calls/genotype")
    for component in None, "calls":
        with pytest.raises(WorkloadError, match=r"is a group.*component=.*genotype \(100, 30\)"):
            rows_on_cpu(tmp_path / "g", component=component)
    with pytest.raises(WorkloadError, match=r"no Zarr array .*/g/genotype on"):
        rows_on_cpu(tmp_path / "g", component="genotype")


@pytest.mark.parametrize("kvikio", [False, True])
@pytest.mark.parametrize("how", ["plain", "compressed", "big-endian"])
def test_rows_go_to_the_device(tmp_path, monkeypatch, kvikio, how):
    """With stand-ins for CuPy and kvikio."""
    direct = []

    class FakeGDSStore(zarr.storage.LocalStore):
        def __init__(self, *args, **kwargs):
            direct.append(args)
            super().__init__(*args, **kwargs)

    fake_cupy = SimpleNamespace(asarray=np.asarray)
    monkeypatch.setattr(stores, "array_module", lambda _: fake_cupy)
    monkeypatch.setitem(
        sys.modules, "kvikio.zarr", SimpleNamespace(GDSStore=FakeGDSStore) if kvikio else None
    )
    monkeypatch.setattr("zarr.buffer.gpu.buffer_prototype", zarr.buffer.cpu.buffer_prototype)
    values = np.arange(120, dtype="i4").reshape(20, 6)
    options = {
        "plain": {"compressors": None},
        "compressed": {},
        "big-endian": {"compressors": None, "serializer": BytesCodec(endian="big")},
    }
    path = store(tmp_path / "x", values, (10, 6), **options[how])
    x = open_rows(path, device="cuda", n_slots=2)
    np.testing.assert_array_equal(x.compute(), values)
    assert bool(direct) == (kvikio and how == "plain")


def test_a_store_that_workers_do_not_see(tmp_path):
    """da.from_zarr would return fill values."""
    path = store(tmp_path / "x", bytes_of((40, 9)), (10, 9))
    x = rows_on_cpu(path)
    shutil.move(path, f"{path}.elsewhere")
    with pytest.raises(WorkloadError, match=f"no Zarr array {path} on .*share"):
        x.compute()


def test_errors_before_anything_is_computed(tmp_path):
    def refused(match, name, **options):
        with pytest.raises(WorkloadError, match=match):
            rows_on_cpu(tmp_path / name, **options)

    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    for name in "nowhere", "file", "empty":
        refused(f"no Zarr array .*{name} on", name)
    refused("no Zarr array .*empty/a on", "empty", component="a")
    store(tmp_path / "cube", np.zeros((2, 3, 4)), (1, 1, 1))
    refused(r"cube is float64 of shape \(2, 3, 4\)", "cube")
    store(tmp_path / "complex", np.zeros((2, 3), complex), (1, 1))
    refused("complex is complex128 of shape", "complex")
    store(tmp_path / "none", np.zeros((0, 3)), (1, 1))
    refused(r"none is float64 of shape \(0, 3\)", "none")


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
    data=st.data(),
)
def test_normalised_genotypes(shape, max_missing, min_maf, data):
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    g = rng.binomial(2, rng.uniform(0, 1, (shape[0], 1)), shape).astype(np.uint8)
    g[rng.random(shape) < rng.uniform(0, 0.4, (shape[0], 1))] = MISSING
    expected, counts = normalised(g, max_missing, min_maf)
    options = {"max_missing": max_missing, "min_maf": min_maf}
    out = normalise(g, **options)
    np.testing.assert_allclose(out, expected, atol=1e-12)
    np.testing.assert_allclose(out.sum(axis=1), 0, atol=1e-3)
    with tempfile.TemporaryDirectory() as folder:
        path = store(f"{folder}/x", g, (7, shape[1]), fill_value=MISSING)
        found = population_structure(path, 1, n_slots=2, max_nbytes=1, device="cpu", **options)
        assert list(found[2].compute()) == counts


def made(path, shape, **how):
    """Write a store, and return the sum of its genotypes."""
    return dask.compute(*write_genotypes(path, shape, **how))[1]


@pytest.fixture(scope="module")
def cohort(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("cohort") / "g")
    with dask.config.set(scheduler="synchronous"):
        return path, int(made(path, (3000, 90), rows=200, n_populations=3))


def test_populations_are_told_apart(cohort):
    path, _ = cohort
    options = {"device": "cpu", "oversample": 86}
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


def test_genotype_errors_before_anything_is_computed(cohort, tmp_path):
    def refused(match, path=cohort[0], **options):
        with pytest.raises(WorkloadError, match=match):
            population_structure(path, options.pop("k", 2), n_slots=1, device="cpu", **options)

    refused("k=91 is out of range", k=91)
    refused(r"max_missing=1\.5 .* out of range", max_missing=1.5)
    refused(r"min_maf=0\.6 is out of range", min_maf=0.6)
    refused("genotypes are int8, not uint8", store(tmp_path / "i", np.zeros((4, 4), "i1"), (1, 4)))
    lacking = store(tmp_path / "l", bytes_of((4, 4)) + 1, (1, 4))
    os.remove(f"{lacking}/c/2/0")
    refused("lacks some of its chunks, which would be read as genotype 0", lacking)
    (tmp_path / "file").write_text("x")
    for path in cohort[0], tmp_path / "file" / "w":
        with pytest.raises(WorkloadError, match="cannot be made"):
            write_genotypes(path, (5, 5), rows=1)
