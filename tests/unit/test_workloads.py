"""The reference computations: answers, exact task counts, and clients without GPU or CuPy."""

from __future__ import annotations

import math
import subprocess
import sys
import tracemalloc

import dask
import dask.array as da
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcdask.workloads import (
    WorkloadError,
    array_module,
    client_cupy,
    count_tasks,
    packing,
    plain_svd,
    slab_rows,
)
from hpcdask.workloads import array as array_workload
from hpcdask.workloads import svd as svd_workload
from hpcdask.workloads.packing import pack_array
from launching import needs

FEW = settings(max_examples=20, deadline=None)


def tree(n: int, branches: int) -> int:
    """Nodes of a reduction tree above ``n`` leaves."""
    total = 0
    while n > 1:
        n = math.ceil(n / branches)
        total += n
    return total


@pytest.fixture(autouse=True)
def _synchronous():
    with dask.config.set(scheduler="synchronous"):
        yield


# --- slabs ----------------------------------------------------------------------------------------


@given(
    n_rows=st.integers(1, 10_000),
    row_nbytes=st.integers(1, 10_000),
    n_slots=st.integers(1, 40),
    max_nbytes=st.integers(1, 10**7),
    multiple=st.sampled_from([1, 2]),
)
def test_slabs_cover_the_rows_and_keep_their_bounds(
    n_rows, row_nbytes, n_slots, max_nbytes, multiple
):
    rows = slab_rows(n_rows, row_nbytes, n_slots=n_slots, max_nbytes=max_nbytes, multiple=multiple)
    assert sum(rows) == n_rows
    assert min(rows) >= 1
    assert all(r % multiple == 0 for r in rows[:-1])
    assert max(rows) * row_nbytes <= max(max_nbytes, multiple * row_nbytes)
    assert max(rows) - min(rows) <= 2 * multiple


# --- array ----------------------------------------------------------------------------------------


@FEW
@given(
    pairs=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    odd=st.booleans(),
    n_columns=st.integers(1, 90),
    seed=st.integers(0, 2**32),
)
def test_array_equals_the_same_numbers_summed_by_numpy(pairs, odd, n_columns, seed):
    rows = (*(2 * p for p in pairs[:-1]), 2 * pairs[-1] - odd)
    x = np.concatenate(
        [
            np.random.Generator(
                np.random.SFC64(np.random.SeedSequence(seed, spawn_key=(i,)))
            ).standard_normal((r, n_columns))
            for i, r in enumerate(rows)
        ]
    )
    selected = (x + 10 + 1)[::2, ::2]
    (total,) = array_workload.tuned_sum(rows, n_columns, device="cpu", seed=seed).compute()
    assert total == pytest.approx(selected.sum(), rel=1e-12)


@pytest.mark.parametrize("n_chunks", [1, 2, 63, 64, 65, 504])
def test_array_has_one_task_for_each_chunk_and_a_shallow_tree(n_chunks):
    x = array_workload.tuned_sum((2,) * n_chunks, 4, device="cuda")
    # The last one: dask gives the root of the tree the key that was asked for.
    assert count_tasks(x) == n_chunks + tree(n_chunks, 64) + 1


# --- svd ------------------------------------------------------------------------------------------


def decaying(m: int, n: int, ratio: float, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    u, _ = np.linalg.qr(rng.standard_normal((m, min(m, n))))
    v, _ = np.linalg.qr(rng.standard_normal((n, min(m, n))))
    return u * ratio ** np.arange(min(m, n)) @ v.T


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_svd_finds_planted_values_in_integers(dtype):
    shape = (5000, 60)
    x, expected = svd_workload.planted(shape, 10, chunks=((1200, 1300, 2500), (60,)), device="cpu")
    matrix = x.compute()
    assert (matrix.shape, matrix.dtype) == (shape, np.uint8)
    np.testing.assert_allclose(np.linalg.svd(matrix, compute_uv=False)[:10], expected)
    assert np.linalg.matrix_rank(matrix) == 10
    u, s, v = dask.compute(*svd_workload.svd_rows(x, 10, dtype=dtype, device="cpu"))
    checks = svd_workload.check(s, v, u.T @ u, matrix[:50], u[:50], expected)
    assert all(c.ok for c in checks), checks
    assert not svd_workload.check(1.01 * s, v, u.T @ u, matrix[:5], u[:5], expected)[0].ok


def test_svd_is_zero_past_the_rank():
    x, expected = svd_workload.planted((400, 30), 3, chunks=((200, 200), (30,)), device="cpu")
    u, s, v = dask.compute(*svd_workload.svd_rows(x, 5, device="cpu"))
    np.testing.assert_allclose(s, [*expected, 0, 0])
    assert not u[:, 3:].any()
    assert not v[3:].any()
    zero = dask.compute(*svd_workload.svd_rows(da.zeros((9, 4), chunks=(3, 4)), 2, device="cpu"))
    assert not any(part.any() for part in zero)


@pytest.mark.parametrize("n_chunks", [8, 20, 100])
def test_svd_has_one_task_for_each_chunk(n_chunks):
    x, _ = svd_workload.planted((9 * n_chunks, 30), 2, chunks=((9,) * n_chunks, (30,)))
    u, s, v = svd_workload.svd_rows(x, 2)
    # A tree and its end; two parts of the end, and their names for the client. x is not persisted
    # here: read once, it is made in the task that reads it
    most = n_chunks + tree(n_chunks, 8) + 1 + 2 * 2
    assert count_tasks(s, v) <= most
    # u: a task for each chunk, and the client's concatenation.
    assert count_tasks(u, s, v) <= most + n_chunks + n_chunks + 1


@pytest.mark.parametrize(
    "values", [[np.nan], [np.inf], [np.inf, -np.inf, np.inf, -np.inf], [1e200]]
)
def test_svd_says_that_products_are_not_finite(values):
    """NumPy does not warn of them."""
    matrix = np.ones((30, 4))
    matrix[17, : len(values)] = values
    x = da.from_array(matrix, chunks=(10, 4))
    with pytest.raises(WorkloadError, match=r"not finite, or its products overflow in float64"):
        dask.compute(*svd_workload.svd_rows(x, 2, device="cpu"))


def test_prepare_cannot_rewrite_the_chunks():
    """Each reading would have scaled them again."""
    matrix = np.random.default_rng(0).random((50, 4))
    x = da.from_array(matrix, chunks=(25, -1))

    def scale(tile):
        tile *= 2
        return tile

    before = matrix.copy()
    with pytest.raises(ValueError, match="read-only"):
        svd_workload.svd_rows(x, 2, prepare=scale, device="cpu")[1].compute()
    np.testing.assert_array_equal(matrix, before)


def test_masked_arrays_are_refused():
    x = da.ma.masked_equal(da.from_array(np.arange(40).reshape(10, 4), chunks=(5, -1)), 7)
    for lazy in (svd_workload.svd_rows(x, 2, device="cpu")[1], pack_array(x)):
        with pytest.raises(WorkloadError, match=r"fill it first, x = da\.ma\.filled"):
            lazy.compute()


def test_svd_rows_has_the_signs_of_dask():
    matrix = decaying(200, 30, 0.5, seed=3)
    x = da.from_array(matrix, chunks=(50, 30))
    u, _, v = dask.compute(*svd_workload.svd_rows(x, 4, device="cpu"))
    stock_u, _, stock_v = dask.compute(*da.linalg.svd(x))
    np.testing.assert_allclose(v, stock_v[:4], atol=1e-3)
    np.testing.assert_allclose(u, stock_u[:, :4], atol=1e-3)


def test_signs_of_centred_data_do_not_depend_on_rounding():
    """Regression: rows of v then have sums of 0, and CPU and GPU gave opposite signs."""
    x = np.random.default_rng(2).standard_normal((300, 12))
    x -= x.mean(axis=1, keepdims=True)
    _, v = dask.compute(*svd_workload.svd_rows(da.from_array(x, (100, 12)), 3, device="cpu")[1:])
    assert abs(v.sum(axis=1)).max() < 1e-9
    np.testing.assert_array_equal(v.max(axis=1), abs(v).max(axis=1))


@pytest.mark.parametrize(
    ("prepare", "what"),
    [
        (lambda tile: tile[::2], r"(float64|uint8) of shape \(10, 4\)"),
        (lambda tile: tile.mean(1, keepdims=True), r"float64 of shape \(20, 1\)"),
        (lambda tile: tile * (1 + 1j), r"complex128 of shape \(20, 4\)"),
    ],
)
def test_what_prepare_returns_is_checked(prepare, what):
    """Regression: rows were left out, repeated or made real, without a word."""
    x = da.from_array(np.arange(80).reshape(20, 4).astype("uint8"), chunks=(20, -1))
    with pytest.raises(WorkloadError, match=f"prepare returned {what}: it has to be real"):
        svd_workload.svd_rows(x, 2, prepare=prepare, device="cpu")[1].compute()


@FEW
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=5).filter(any),
    n=st.integers(1, 25),
    dtype=st.sampled_from(["f4", "f8", "i1", "u1", "i2", "u2", "?", ">f4", ">u2"]),
    work=st.sampled_from(["float32", "float64"]),
    order=st.sampled_from("CF"),
    seed=st.integers(0, 99),
)
def test_svd_of_any_type_and_chunks_equals_numpy(sizes, n, dtype, work, order, seed):
    m, kind = sum(sizes), np.dtype(dtype)
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((m, n))
    if kind.kind != "f":
        least, greatest = (0, 1) if kind.kind == "b" else (np.iinfo(kind).min, np.iinfo(kind).max)
        values = rng.integers(least, greatest, (m, n), endpoint=True)
    matrix = values.astype(kind, order=order)
    k = min(m, n, 4)
    x = da.from_array(matrix, chunks=(tuple(sizes), n))
    how = {"dtype": work, "oversample": n, "device": "cpu"}
    u, s, v = dask.compute(*svd_workload.svd_rows(x, k, **how))
    exact = np.linalg.svd(matrix.astype(float), compute_uv=False)
    resolved = (1e-2 if work == "float32" else 1e-5) * max(exact[0], 1)
    np.testing.assert_allclose(s, exact[:k], atol=resolved)
    # what is below that may be zero, or noise
    rest = math.hypot(np.linalg.norm(exact[k:]), math.sqrt(k) * resolved)
    assert np.linalg.norm(u * s @ v - matrix) <= 1.01 * rest + resolved


@pytest.mark.parametrize(
    ("x", "k", "options", "match"),
    [
        (da.zeros((9, 4), chunks=(3, 4)), 5, {}, "k=5 is out of range: a 9 x 4 matrix has 4 sing"),
        (da.zeros((9, 4), chunks=(3, 4)), 0, {}, "k=0 is out of range"),
        (da.zeros((9, 4), chunks=(3, 2)), 2, {}, r"x = x\.rechunk\(\{1: -1\}\)"),
        (da.zeros(9, chunks=3), 1, {}, "wants a matrix"),
        (da.zeros((9, 4), chunks=(3, 4), dtype=complex), 1, {}, "complex128"),
        (da.zeros((9, 4), chunks=(3, 4)), 1, {"dtype": "float16"}, "float32 or float64"),
        (da.zeros((9, 4), chunks=(3, 4)), 1, {"packed_columns": 13}, "13 packed columns are 4 co"),
        (np.zeros((9, 4)), 1, {}, r"x is ndarray, not a dask array: x = da\.from_array"),
    ],
)
def test_svd_errors_come_before_computing(x, k, options, match):
    with pytest.raises(WorkloadError, match=match):
        svd_workload.svd_rows(x, k, device="cpu", **options)


X = da.ones((9, 4), chunks=(3, 4), dtype="uint8")


@needs("cupy")
@pytest.mark.parametrize("part", [0, 1])
def test_numpy_chunks_are_no_cupy_arrays(part):
    lazy = svd_workload.svd_rows(X, 2, device="cuda")[part]
    with pytest.raises(WorkloadError, match=r"a chunk is ndarray.*x\.map_blocks\(cupy\.asarray\)"):
        lazy.compute()


# --- memory, and packed values --------------------------------------------------------------------


def peak_in_chunks(collections: list, chunk_nbytes: float) -> float:
    """What computing needs above what is there, on one thread."""
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    dask.compute(*collections)
    peak = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    return peak / chunk_nbytes


def test_svd_rows_needs_less_than_three_chunks():
    matrix = np.random.default_rng(0).integers(0, 4, (8_000, 1000), dtype=np.uint8)
    x = da.from_array(matrix, chunks=(4_000, 1000))
    triplets = svd_workload.svd_rows(x, 10, device="cpu")
    assert peak_in_chunks(triplets, matrix.nbytes / 2) < 3


@FEW
@given(
    m=st.integers(1, 60), n=st.integers(1, 30), n_chunks=st.integers(1, 5), data=st.data()
)  # fmt: skip
def test_packed_svd_equals_that_of_the_values(m, n, n_chunks, data):
    k = data.draw(st.integers(1, min(m, n)))
    values = np.random.default_rng(m * n).integers(0, 4, (m, n), dtype=np.uint8)
    x = da.from_array(values, chunks=(max(1, m // n_chunks), n))
    packed = packing.pack_array(x)
    assert packed.shape == (m, -(-n // 4))
    ours = dask.compute(*svd_workload.svd_rows(packed, k, packed_columns=n, device="cpu"))
    theirs = dask.compute(*svd_workload.svd_rows(x, k, device="cpu"))
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-5 * max(1, theirs[1][0]))


def test_plain_svds_find_planted_values():
    how = {"chunks": ((1500,) * 2, (20,) * 2), "device": "cpu"}
    x, expected = svd_workload.planted((3000, 40), 4, **how)
    _, s, _ = dask.compute(*plain_svd.approximate(x, 4))
    np.testing.assert_allclose(s, expected, rtol=1e-3)
    _, s, _ = dask.compute(*plain_svd.exact(x.rechunk({1: -1}).astype(float)))
    np.testing.assert_allclose(s[:4], expected)


# --- clients without GPU, without CuPy ------------------------------------------------------------

BUILD_ALL = """
import os, sys
os.environ["CUDA_VISIBLE_DEVICES"] = ""
class Missing:
    def find_spec(self, name, *_):
        if name.split(".")[0] in {missing}:
            raise ImportError(name)
sys.meta_path.insert(0, Missing())
from hpcdask.workloads import array, count_tasks, genotypes, svd, zarr
assert not [m for m in sys.modules if m == "zarr" or m.startswith("hpcdask.bench")]
x = array.tuned_sum((4,) * 100, 8, device="cuda")
assert count_tasks(x) > 100
m, s = svd.planted((10_000_000, 20_000), 10, chunks=((100_000,) * 100, (20_000,)), device="cuda")
u, s, v = svd.svd_rows(m, 10, device="cuda")
assert count_tasks(u, s, v) > 200
assert (u.shape, v.shape) == ((10_000_000, 10), (10, 20_000))
dask.compute(*genotypes.write_genotypes({path!r}, (400, 30), rows=10))
assert count_tasks(zarr.open_rows({path!r}, n_slots=2, max_nbytes=1000)) > 10
assert count_tasks(*genotypes.population_structure({path!r}, 3, n_slots=2)) > 4
"""


@pytest.mark.parametrize(
    "missing",
    [
        pytest.param((), id="GPU", marks=needs("cupy")),
        pytest.param(("cupy", "kvikio"), id="CuPy"),
    ],
)
def test_cuda_graphs_need_nothing_on_the_client(tmp_path, missing):
    code = "import dask\n" + BUILD_ALL.format(missing=missing, path=str(tmp_path / "x"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_missing_cupy_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(WorkloadError, match="doctor` there names the packages"):
        array_module("cuda")
    with pytest.raises(WorkloadError, match="where the client has CuPy"):
        client_cupy()
    with pytest.raises(WorkloadError, match="hpcdask"):
        array_workload.tuned_sum((2,), 2, device="cuda").compute()
