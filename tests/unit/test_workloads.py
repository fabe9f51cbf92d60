"""The reference computations: answers, exact task counts, and clients without GPU or CuPy."""

from __future__ import annotations

import math
import subprocess
import sys
import textwrap
import tracemalloc

import dask
import dask.array as da
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcdask.workloads import (
    Check,
    WorkloadError,
    array_module,
    client_cupy,
    count_tasks,
    packing,
    planted,
    slab_rows,
)
from hpcdask.workloads import array as array_workload
from hpcdask.workloads import svd as svd_workload
from hpcdask.workloads.genotypes import count_variants
from hpcdask.workloads.made_genotypes import write_genotypes
from hpcdask.workloads.packing import pack_array
from hpcdask.workloads.zarr import open_rows
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


def test_the_reference_sizes_give_every_worker_the_same_number_of_chunks():
    n = array_workload.side(2 * 10**12)
    assert n == 500_000
    # The array is made slab by slab, so chunks need only bound the time of a Dask task
    assert len(array_workload.chunk_rows(n, device="cuda", n_slots=1)) == 32
    assert len(array_workload.chunk_rows(n, device="cuda", n_slots=8)) == 32
    shape = svd_workload.shape_for(200 * 10**9)
    assert shape == (10_000_000, 20_000)
    assert len(svd_workload.chunk_rows(shape, device="cuda", n_slots=8)) == 56
    # Little data: at least four chunks for every worker,
    assert len(array_workload.chunk_rows(20_000, device="cuda", n_slots=8)) == 32
    # but one where Dask tasks take longer than the products
    shape = svd_workload.shape_for(1600 * 10**6)
    assert len(svd_workload.chunk_rows(shape, device="cuda", n_slots=8)) == 8
    assert len(svd_workload.chunk_rows(shape, device="cpu", n_slots=8)) == 32


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
    total, count = array_workload.tuned_sum(rows, n_columns, device="cpu", seed=seed).compute()
    assert count == selected.size
    assert total == pytest.approx(selected.sum(), rel=1e-12)


def test_array_tiles_of_a_large_chunk_line_up():
    rows, n_columns = (1000, 501), 2001
    total, count = array_workload.tuned_sum(rows, n_columns, device="cpu", seed=5).compute()
    assert all(c.ok for c in array_workload.check_sum(total, int(count), (1501, n_columns)))
    assert count == 751 * 1001


def test_array_is_reproducible_and_seeds_differ():
    first, again, other = (
        array_workload.tuned_sum((100, 100), 50, device="cpu", seed=seed).compute()[0]
        for seed in (1, 1, 2)
    )
    assert first == again != other


@pytest.mark.parametrize("n_chunks", [1, 2, 63, 64, 65, 504])
def test_array_has_one_task_for_each_chunk_and_a_shallow_tree(n_chunks):
    x = array_workload.tuned_sum((2,) * n_chunks, 4, device="cuda")
    assert x.shape == (2,)
    # The last one: dask gives the root of the tree the key that was asked for.
    assert count_tasks(x) == n_chunks + tree(n_chunks, 64) + 1


def test_array_check_finds_a_wrong_sum_and_a_wrong_count():
    assert [c.ok for c in array_workload.check_sum(11 * 25e4, 250_000, (1000, 1000))] == [
        True,
        True,
    ]
    assert [c.ok for c in array_workload.check_sum(11.1 * 25e4, 250_000, (1000, 1000))] == [
        True,
        False,
    ]
    assert [c.ok for c in array_workload.check_sum(11 * 25e4, 249_999, (1000, 1000))] == [
        False,
        True,
    ]
    assert not Check("nan", math.nan, 0, 1).ok


def test_array_errors():
    with pytest.raises(WorkloadError, match="too small: the least is 32 B"):
        array_workload.side(31)
    with pytest.raises(WorkloadError, match="even number of rows"):
        array_workload.tuned_sum((3, 4), 4)
    with pytest.raises(WorkloadError, match="no elements"):
        array_workload.tuned_sum((), 4)


def test_array_stock_has_the_known_mean():
    total = float(array_workload.stock_sum(1000, device="cpu").compute())
    assert all(c.ok for c in array_workload.check_sum(total, 250_000, (1000, 1000)))


# --- svd ------------------------------------------------------------------------------------------


def decaying(m: int, n: int, ratio: float, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    u, _ = np.linalg.qr(rng.standard_normal((m, min(m, n))))
    v, _ = np.linalg.qr(rng.standard_normal((n, min(m, n))))
    return u * ratio ** np.arange(min(m, n)) @ v.T


@FEW
@given(
    m=st.integers(1, 200),
    n=st.integers(1, 40),
    n_chunks=st.integers(1, 9),
    n_power_iter=st.integers(0, 2),
    data=st.data(),
)
def test_svd_equals_numpy(m, n, n_chunks, n_power_iter, data):
    k = data.draw(st.integers(1, min(m, n, 6)))
    matrix = decaying(m, n, 0.3, seed=m * n)
    x = da.from_array(matrix, chunks=(max(1, m // n_chunks), n))
    u, s, v = dask.compute(*svd_workload.svd_rows(x, k, n_power_iter=n_power_iter, device="cpu"))
    exact = np.linalg.svd(matrix, compute_uv=False)
    assert (u.shape, s.shape, v.shape) == ((m, k), (k,), (k, n))
    np.testing.assert_allclose(s, exact[:k], rtol=1e-4)
    np.testing.assert_allclose(u.T @ u, np.eye(k), atol=1e-6)
    np.testing.assert_allclose(v @ v.T, np.eye(k), atol=1e-6)
    best = np.linalg.norm(exact[k:])
    assert np.linalg.norm(u * s @ v - matrix) <= 1.01 * best + 1e-6


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("n_power_iter", [0, 1])
def test_svd_finds_planted_values_in_integers(dtype, n_power_iter):
    shape = (5000, 60)
    x, expected = planted.matrix(shape, 10, chunks=((1200, 1300, 2500), (60,)), device="cpu")
    matrix = x.compute()
    assert (matrix.shape, matrix.dtype) == (shape, np.uint8)
    np.testing.assert_allclose(np.linalg.svd(matrix, compute_uv=False)[:10], expected)
    assert np.linalg.matrix_rank(matrix) == 10
    u, s, v = dask.compute(
        *svd_workload.svd_rows(x, 10, dtype=dtype, n_power_iter=n_power_iter, device="cpu")
    )
    checks = planted.check(s, v, u.T @ u, matrix[:50], u[:50], expected)
    assert all(c.ok for c in checks), checks
    assert not planted.check(1.01 * s, v, u.T @ u, matrix[:5], u[:5], expected)[0].ok


def test_svd_is_zero_past_the_rank():
    x, expected = planted.matrix((400, 30), 3, chunks=((200, 200), (30,)), device="cpu")
    u, s, v = dask.compute(*svd_workload.svd_rows(x, 5, device="cpu"))
    np.testing.assert_allclose(s, [*expected, 0, 0])
    assert not u[:, 3:].any()
    assert not v[3:].any()
    zero = dask.compute(*svd_workload.svd_rows(da.zeros((9, 4), chunks=(3, 4)), 2, device="cpu"))
    assert not any(part.any() for part in zero)


@pytest.mark.parametrize("n_chunks", [8, 20, 100])
@pytest.mark.parametrize("n_power_iter", [0, 2])
def test_svd_has_one_task_for_each_chunk_and_pass(n_chunks, n_power_iter):
    x, _ = planted.matrix((9 * n_chunks, 30), 2, chunks=((9,) * n_chunks, (30,)))
    u, s, v = svd_workload.svd_rows(x, 2, n_power_iter=n_power_iter)
    # Of each pass a tree and its end; two parts of the last end, and their names for the client.
    most = (1 + n_power_iter) * (n_chunks + tree(n_chunks, 8) + 1) + 2 * 2
    # x is not persisted here: read once, it is made in the task that reads it; else by its own
    assert count_tasks(s, v) <= most + (n_chunks if n_power_iter else 0)
    # u: a task for each chunk, and the client's concatenation.
    assert count_tasks(u, s, v) <= most + n_chunks + n_chunks + 1


def test_svd_reads_every_tile(monkeypatch):
    monkeypatch.setitem(svd_workload.TILE_NBYTES, "cpu", 7 * 40 * 8)
    matrix = decaying(300, 40, 0.3, seed=1)
    x = da.from_array(matrix, chunks=(101, 40))
    u, s, v = dask.compute(*svd_workload.svd_rows(x, 5, device="cpu"))
    np.testing.assert_allclose(s, 0.3 ** np.arange(5), rtol=1e-6)
    assert np.linalg.norm(u * s @ v - matrix) < 1.01 * 0.3**5 / math.sqrt(1 - 0.09)


def centred(tile):
    return tile - tile.mean(axis=1, keepdims=True)


@FEW
@given(
    m=st.integers(2, 60),
    n=st.integers(1, 130),
    short=st.integers(0, 10),
    decades=st.sampled_from([0, 1, 3]),
    dtype=st.sampled_from(["float32", "float64"]),
    seed=st.integers(0, 50),
    how=st.sampled_from([{}, {"n_power_iter": 1}]),
    prepare=st.sampled_from([None, centred]),
)
def test_svd_of_nearly_all_triplets(m, n, short, decades, dtype, seed, how, prepare):
    """As many random directions as columns are a badly conditioned basis."""
    k = max(1, min(m, n) - short)
    a = (np.random.default_rng(seed).random((m, n)) - 0.5) * np.logspace(0, -decades, n)
    x = da.from_array(a, chunks=(17, -1))
    exact = np.linalg.svd(a if prepare is None else prepare(a), compute_uv=False)[:k]
    how = how | {"dtype": dtype, "seed": seed, "prepare": prepare, "device": "cpu"}
    s = svd_workload.svd_rows(x, k, **how)[1].compute()
    # What one pass resolves, and the condition of a random matrix of twice as many columns as rows
    resolved = 6 * np.sqrt(64 * min(max(k + 10, 2 * m), n) * np.finfo(dtype).eps)
    np.testing.assert_allclose(s, exact, atol=resolved * exact[0])


@pytest.mark.parametrize("chunks", [(100, 0, 100), (0, 0, 200), (200, 0, 0)])
def test_svd_of_chunks_without_rows(chunks):
    """Filters leave them."""
    matrix = decaying(200, 6, 0.1, seed=1)
    x = da.from_array(matrix, chunks=(chunks, 6))
    u, s, _ = dask.compute(*svd_workload.svd_rows(x, 2, device="cpu"))
    np.testing.assert_allclose(s, [1, 0.1], rtol=1e-3)
    np.testing.assert_allclose(u.T @ u, np.eye(2), atol=1e-10)


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


@pytest.mark.parametrize(
    "make",
    [
        lambda seed: array_workload.tuned_sum((10,), 4, device="cpu", seed=seed),
        lambda seed: array_workload.build("mean", 64, device="cpu", seed=seed),
        lambda seed: write_genotypes("/never/there", (8, 8), chunks=(4, 8), n_slots=1, seed=seed),
    ],
)
def test_a_seed_is_checked_before_anything_is_made(make):
    with pytest.raises(WorkloadError, match="seed=-1 is not accepted"):
        make(-1)


def test_svd_rows_has_the_signs_of_dask():
    matrix = decaying(200, 30, 0.5, seed=3)
    x = da.from_array(matrix, chunks=(50, 30))
    u, _, v = dask.compute(*svd_workload.svd_rows(x, 4, device="cpu"))
    stock_u, _, stock_v = dask.compute(*da.linalg.svd(x))
    np.testing.assert_allclose(v, stock_v[:4], atol=1e-3)
    np.testing.assert_allclose(u, stock_u[:, :4], atol=1e-3)


def test_rows_are_prepared_tile_by_tile(monkeypatch):
    monkeypatch.setitem(svd_workload.TILE_NBYTES, "cpu", 64 * 30 * 8)
    matrix = np.random.default_rng(0).integers(0, 3, (400, 30), dtype=np.uint8)
    x = da.from_array(matrix, chunks=(150, 30))
    u, s, v = dask.compute(*svd_workload.svd_rows(x, 30, prepare=centred, device="cpu"))
    np.testing.assert_allclose(u * s @ v, centred(matrix), atol=1e-6)


@pytest.mark.parametrize(
    ("prepare", "what"),
    [
        (lambda tile: tile[::2], r"(float64|uint8) of shape \(10, 4\)"),
        (lambda tile: tile.mean(1, keepdims=True), r"float64 of shape \(20, 1\)"),
        (lambda tile: tile * (1 + 1j), r"complex128 of shape \(20, 4\)"),
        (lambda tile: tile.astype(str), r"<U\d+ of shape \(20, 4\)"),
        (lambda tile: None, "NoneType"),
    ],
)
@pytest.mark.parametrize("dtype", ["float64", "uint8"])
def test_what_prepare_returns_is_checked(prepare, what, dtype):
    """Rows were left out, repeated or made real, without a word."""
    x = da.from_array(np.arange(80).reshape(20, 4).astype(dtype), chunks=(20, -1))
    with pytest.raises(WorkloadError, match=f"prepare returned {what}: it has to be real"):
        svd_workload.svd_rows(x, 2, prepare=prepare, device="cpu")[1].compute()


@pytest.mark.parametrize("dtype", ["float32", "int16", "bool"])
def test_prepare_may_return_any_real_numbers(dtype):
    matrix = np.random.default_rng(0).integers(0, 2, (60, 5)).astype("uint8")
    x = da.from_array(matrix, chunks=(20, -1))
    s = svd_workload.svd_rows(x, 2, prepare=lambda tile: tile.astype(dtype), device="cpu")[1]
    exact = np.linalg.svd(matrix.astype(float), compute_uv=False)[:2]
    np.testing.assert_allclose(s.compute(), exact, rtol=1e-6)


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
        (da.zeros((9, 4), chunks=(3, 4)), 1, {"oversample": -1}, "oversample=-1 is not accepted"),
        (da.zeros((9, 4), chunks=(3, 4)), 1, {"seed": -1}, "seed=-1 is not accepted: a whole"),
        (da.zeros((9, 4), chunks=(3, 4)), 1, {"n_power_iter": 0.5}, "n_power_iter=0.5 is not acc"),
        (da.zeros((9, 4), chunks=(3, 4)), 2.5, {}, "k=2.5 is not accepted: a whole number"),
        (da.zeros((9, 4), chunks=(3, 4)), "2", {}, "k='2' is not accepted: a whole number"),
        (da.zeros((9, 4), chunks=(3, 4)), 1, {"dtype": "float16"}, "float32 or float64"),
        (da.zeros((9, 4), chunks=(3, 4)), 1, {"packed_columns": 13}, "13 packed columns are 4 co"),
        (da.zeros((9, 4), chunks=(3, 4)), 1, {"packed_columns": 4.0}, "packed_columns=4.0 is not"),
        (da.zeros((9, 4), chunks=(3, 4)), True, {}, "k=True is not accepted: a whole number"),
        (np.zeros((9, 4)), 1, {}, r"x is ndarray, not a dask array: x = da\.from_array"),
    ],
)
def test_svd_errors_come_before_computing(x, k, options, match):
    with pytest.raises(WorkloadError, match=match):
        svd_workload.svd_rows(x, k, device="cpu", **options)


X = da.ones((9, 4), chunks=(3, 4), dtype="uint8")


@pytest.mark.parametrize(
    "make",
    [
        lambda device: svd_workload.svd_rows(X, 2, device=device),
        lambda device: svd_workload.stock(X, 2, device=device),
        lambda device: array_workload.tuned_sum((2, 2), 4, device=device),
        lambda device: array_workload.stock_sum(4, device=device),
        lambda device: array_workload.build("mean", 64, device),
        lambda device: open_rows("/not/there", device=device, n_slots=1),
        lambda device: count_variants(X, device=device).compute(),
    ],
)
def test_another_device_is_named(make):
    """The array was computed on the CPU."""
    with pytest.raises(WorkloadError, match=r"""device='gpu' is not accepted: "cuda" or "cpu\""""):
        make("gpu")


@pytest.mark.parametrize("part", [0, 1])
def test_numpy_chunks_are_no_cupy_arrays(part):
    lazy = svd_workload.svd_rows(X, 2, device="cuda")[part]
    with pytest.raises(WorkloadError, match=r"a chunk is ndarray.*x\.map_blocks\(cupy\.asarray\)"):
        lazy.compute()


def test_svd_wants_known_chunk_sizes():
    x = da.ones((9, 4), chunks=(3, 4))
    with pytest.raises(WorkloadError, match="compute_chunk_sizes"):
        svd_workload.svd_rows(x[x[:, 0] > 0], 1, device="cpu")


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
    matrix = np.random.default_rng(0).integers(0, 4, (40_000, 1000), dtype=np.uint8)
    x = da.from_array(matrix, chunks=(20_000, 1000))
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


def test_packed_svd_of_prepared_rows():
    values = np.random.default_rng(0).integers(0, 4, (300, 30), dtype=np.uint8)
    x = da.from_array(values, chunks=(100, 30))
    how = {"prepare": centred, "device": "cpu"}
    u, s, v = dask.compute(
        *svd_workload.svd_rows(packing.pack_array(x), 30, packed_columns=30, **how)
    )
    np.testing.assert_allclose(u * s @ v, centred(values), atol=1e-6)


def test_planted_packed_matrix_has_the_values_that_it_says():
    x, expected = planted.matrix(
        (900, 33), 5, chunks=((400, 500), (33,)), device="cpu", packed=True
    )
    values = packing.unpack(x.compute(), 33)
    np.testing.assert_allclose(np.linalg.svd(values, compute_uv=False)[:5], expected)
    assert np.linalg.matrix_rank(values) == 5
    assert set(np.unique(values)) <= {0, 1, 3}


def test_planted_errors():
    with pytest.raises(WorkloadError, match="1 to 4 non-zero"):
        planted.matrix((9, 4), 5, chunks=((9,), (4,)))


@pytest.mark.parametrize("rank", [1, 2, 10, 40, 64])
def test_planted_values_are_distinct_and_well_conditioned(rank):
    _, s = planted.matrix((500 * rank, rank), rank, chunks=((500 * rank,), (rank,)))
    assert (s[:-1] > 1.0001 * s[1:]).all()
    assert s[-1] > s[0] / 50


def test_svd_stock_agrees():
    x, expected = planted.matrix((3000, 40), 4, chunks=((1500,) * 2, (20,) * 2), device="cpu")
    _, s, _ = dask.compute(*svd_workload.stock(x, 4, device="cpu"))
    np.testing.assert_allclose(s, expected, rtol=1e-3)
    with pytest.raises(WorkloadError, match="k=41"):
        svd_workload.stock(x, 41, device="cpu")


# --- clients without GPU, without CuPy ------------------------------------------------------------

BUILD_ALL = """
from hpcdask.workloads import array, count_tasks, planted, svd
x = array.tuned_sum((4,) * 100, 8, device="cuda")
assert count_tasks(x) > 100
m, s = planted.matrix((10_000_000, 20_000), 10, chunks=((100_000,) * 100, (20_000,)), device="cuda")
for q in 0, 1:
    u, s, v = svd.svd_rows(m, 10, n_power_iter=q, device="cuda")
    assert count_tasks(u, s, v) > 200
    assert (u.shape, v.shape) == ((10_000_000, 10), (10, 20_000))
"""


def run_python(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@needs("cupy")
def test_cuda_graphs_need_no_gpu_on_the_client():
    """CuPy is installed, and every CUDA call fails."""
    code = """
    import os
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import cupy
    try:
        cupy.empty((0, 0))
    except cupy.cuda.runtime.CUDARuntimeError:
        pass
    else:
        raise SystemExit("this CUDA call should have failed")
    """
    run_python(textwrap.dedent(code) + BUILD_ALL)


def test_cuda_graphs_need_no_cupy_on_the_client():
    code = """
    import sys
    class NoCuPy:
        def find_spec(self, name, *_):
            if name.split(".")[0] == "cupy":
                raise ImportError("no cupy")
    sys.meta_path.insert(0, NoCuPy())
    """
    imports = "\nassert not [m for m in sys.modules if m.startswith('hpcdask.bench')]"
    run_python(textwrap.dedent(code) + BUILD_ALL + imports)


def test_missing_cupy_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(WorkloadError, match=r'pip install "hpcdask\[cuda13\]"'):
        array_module("cuda")
    with pytest.raises(WorkloadError, match="a GPU of the client: CuPy is missing"):
        client_cupy()
    with pytest.raises(WorkloadError, match="hpcdask"):
        array_workload.tuned_sum((2,), 2, device="cuda").compute()


# --- what a scheduler is sent ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster():
    from distributed import Client, LocalCluster

    with (
        LocalCluster(
            n_workers=2, threads_per_worker=1, processes=False, dashboard_address=":0"
        ) as local,
        Client(local) as client,
    ):
        yield client


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("array", 100 + 2 + 1 + 1),
        ("usv", 20 + 3 + 1 + 1 + 2 * 2 + 20 + 1),
        ("sv, power", 2 * (20 + 3 + 1 + 1) + 2 * 2),
    ],
)
def test_the_count_is_what_the_scheduler_runs(cluster, what, expected):
    from distributed import wait
    from distributed.diagnostics.plugin import SchedulerPlugin

    class Counter(SchedulerPlugin):
        n = 0

        def transition(self, key, start, finish, *args, **kwargs):
            self.n += start == "processing" and finish == "memory"

    if what == "array":
        collections = [array_workload.tuned_sum((2,) * 100, 10, device="cpu")]
    else:
        x, _ = planted.matrix((2000, 60), 10, chunks=((100,) * 20, (60,)), device="cpu")
        x = x.persist(scheduler=cluster)
        wait(x)
        triplets = svd_workload.svd_rows(x, 10, device="cpu", n_power_iter=int("power" in what))
        collections = [triplets["usv".index(name)] for name in what.split(",")[0]]
    counter = Counter()
    scheduler = cluster.cluster.scheduler
    scheduler.add_plugin(counter, name="counter")
    cluster.gather(cluster.compute(collections))
    scheduler.remove_plugin("counter")
    assert counter.n == count_tasks(*collections)
    assert counter.n == expected
