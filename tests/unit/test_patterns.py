"""The array patterns: answers as NumPy's, exact task counts, clients without GPU or CuPy."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys

import dask
import dask.array as da
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcdask.workloads import WorkloadError, count_tasks
from hpcdask.workloads import array as patterns
from hpcdask.workloads.array_blocks import CPU_TILE_NBYTES, merge, slab

FEW = settings(max_examples=20, deadline=None)

each = pytest.mark.parametrize("name", patterns.NAMES)


@pytest.fixture(autouse=True)
def _synchronous():
    with dask.config.set(scheduler="synchronous"):
        yield


def by_numpy(name: str, x: np.ndarray) -> np.ndarray:
    match name:
        case "mean":
            return x.mean()
        case "std":
            return x.std()
        case "transpose":
            return (x + x.T).std()
        case "matmul":
            return (x @ x.T).mean()
        case "fft":
            return (abs(np.fft.rfft(x)) ** 2).mean(axis=0)
    neighbours = (np.roll(x, shift, axis) for shift in (1, -1) for axis in (0, 1))
    return ((x + sum(neighbours)) / 5).std()


def numbers(shape: tuple[int, int], seed: int, *chunk: int) -> np.ndarray:
    seeds = np.random.SeedSequence(seed, spawn_key=chunk)
    return 10 + np.random.Generator(np.random.SFC64(seeds)).standard_normal(shape)


def array(name: str, n: int, n_slots: int, seed: int, max_nbytes: int | None) -> np.ndarray:
    """What the tuned form computes on, as one array."""
    if name == "transpose":
        rows = patterns.grid(n, "cpu", n_slots, max_nbytes)
        return np.block(
            [[numbers((a, b), seed, i, j) for j, b in enumerate(rows)] for i, a in enumerate(rows)]
        )
    rows = patterns.slabs(n, "cpu", n_slots, max_nbytes)
    return np.concatenate([numbers((r, n), seed, i) for i, r in enumerate(rows)])


# --- answers --------------------------------------------------------------------------------------


@each
@FEW
@given(
    n=st.integers(patterns.LEAST_SIDE, 90),
    n_slots=st.integers(1, 5),
    n_rows=st.none() | st.integers(1, 90),
    seed=st.integers(0, 2**32),
)
def test_tuned_equals_numpy(name, n, n_slots, n_rows, seed):
    max_nbytes = n_rows and n_rows * n * 8
    found = patterns.build(name, n, "cpu", "tuned", n_slots, seed, max_nbytes=max_nbytes)
    result = found.compute()
    expected = by_numpy(name, array(name, n, n_slots, seed, max_nbytes))
    assert (found.shape, found.dtype) == (expected.shape, result.dtype)
    np.testing.assert_allclose(result, expected, rtol=1e-10)


@each
def test_tiles_of_large_chunks_line_up(name, monkeypatch):
    monkeypatch.setattr("hpcdask.workloads.array_blocks.CPU_TILE_NBYTES", 7 * 300 * 8)
    assert CPU_TILE_NBYTES > 7 * 300 * 8
    result = patterns.build(name, 300, "cpu", "tuned", 1, 5).compute()
    np.testing.assert_allclose(result, by_numpy(name, array(name, 300, 1, 5, None)), rtol=1e-10)


@each
@pytest.mark.parametrize("n", [60, 61])
def test_stock_equals_numpy(name, n):
    with dask.config.set({"array.chunk-size": "10kB"}):
        result = patterns.build(name, n, "cpu", "stock", seed=3).compute()
        x = da.random.default_rng(3).normal(10, 1, size=(n, n))
        assert x.npartitions > 1
    np.testing.assert_allclose(result, by_numpy(name, x.compute()), rtol=1e-10)


@each
@pytest.mark.parametrize("form", ["tuned", "stock"])
@pytest.mark.parametrize("n", [16, 17, 400])
def test_the_checks_pass(name, form, n):
    for seed in range(3):
        result = patterns.build(name, n, "cpu", form, 2, seed).compute()
        assert all(check.ok for check in patterns.check(name, result, n))


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("mean", lambda x: x[:200].sum() / x.size),
        ("std", lambda x: x.var() * 1.1),
        ("transpose", lambda x: (x + x).std()),
        ("matmul", lambda x: (x[:, :200] @ x[:, :200].T).mean()),
        ("fft", lambda x: np.repeat(by_numpy("fft", x[:, :200]), 2)[:201]),
        ("fft", lambda x: by_numpy("fft", x) * (np.arange(201) < 100)),
        ("stencil", lambda x: ((x + 2 * np.roll(x, 1, 0) + 2 * np.roll(x, 1, 1)) / 5).std()),
    ],
)
def test_the_checks_find_what_is_wrong(name, wrong):
    x = numbers((400, 400), 0, 0)
    assert all(check.ok for check in patterns.check(name, by_numpy(name, x), 400))
    assert not all(check.ok for check in patterns.check(name, wrong(x), 400))


@each
def test_it_is_reproducible_and_seeds_differ(name):
    first, again, other = (
        patterns.build(name, 50, "cpu", "tuned", 2, seed).compute() for seed in (1, 1, 2)
    )
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


@given(
    parts=st.lists(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=5), min_size=1, max_size=5)
)
@FEW
def test_moments_merge(parts):
    moments = [np.array([len(p), np.mean(p), len(p) * np.var(p)]) for p in parts]
    count, mean, squares = merge(*moments)
    everything = np.concatenate(parts)
    assert count == everything.size
    assert mean == pytest.approx(everything.mean(), rel=1e-12, abs=1e-9)
    assert squares == pytest.approx(everything.size * everything.var(), rel=1e-9, abs=1e-3)


# --- layout ---------------------------------------------------------------------------------------


def leaves(name: str, n_chunks: int) -> tuple[int, int]:
    """Dask tasks before the tree, and how many of them it merges."""
    match name:
        case "matmul":
            pairs = n_chunks * (n_chunks + 1) // 2
            return n_chunks + pairs, pairs
        case "stencil":
            return 3 * n_chunks, n_chunks
    return n_chunks, n_chunks


@pytest.mark.parametrize("name", [name for name in patterns.NAMES if name != "transpose"])
@pytest.mark.parametrize("n_chunks", [2, 8, 64, 65, 130])
def test_number_of_tasks(name, n_chunks):
    n = 2 * n_chunks if n_chunks > 8 else 16
    found = patterns.build(name, n, "cuda", max_nbytes=n // n_chunks * n * 8)
    assert len(patterns.slabs(n, "cuda", 1, n // n_chunks * n * 8)) == n_chunks
    before, merged = leaves(name, n_chunks)
    tree = 0
    while merged > 64:
        merged = math.ceil(merged / 64)
        tree += merged
    # The last but one merges what is left, and the last is the name the client asked for.
    assert count_tasks(found) == before + tree + 2


@pytest.mark.parametrize(("n_slots", "parts"), [(1, 3), (2, 4), (8, 8), (32, 16)])
def test_number_of_tasks_of_transpose(n_slots, parts):
    assert len(patterns.grid(1000, "cuda", n_slots)) == parts
    cells = parts * (parts + 1) // 2
    assert count_tasks(patterns.build("transpose", 1000, "cuda", "tuned", n_slots)) == (
        cells + (math.ceil(cells / 64) if cells > 64 else 0) + 2
    )


def test_reference_sizes_give_every_slot_the_same_number_of_chunks():
    # 80 GB
    assert len(patterns.slabs(100_000, "cuda", 8)) == 40
    assert max(patterns.slabs(100_000, "cuda", 8)) * 100_000 * 8 <= 2_000_000_000
    assert patterns.grid(100_000, "cuda", 8) == (12_500,) * 8
    assert len(patterns.slabs(11_180, "cpu", 2)) == 8


@FEW
@given(n=st.integers(16, 10**6), n_slots=st.integers(1, 64), edge=st.integers(1, 10**5))
def test_the_grid_covers_the_side_and_keeps_its_bound(n, n_slots, edge):
    max_nbytes = 8 * max(edge, n // 200) ** 2
    rows = patterns.grid(n, "cuda", n_slots, max_nbytes)
    assert sum(rows) == n
    assert min(rows) >= 1
    assert max(rows) ** 2 * 8 <= max_nbytes


def test_stencil_sends_two_rows_not_slabs():
    """No Dask task of the stencil reads two slabs."""
    graph = dict(patterns.build("stencil", 80, "cpu", max_nbytes=6400).__dask_graph__())
    slabs = {key for key in graph if key[0].startswith("slab-")}
    assert len(slabs) == 8
    assert max(len(slabs & task.dependencies) for task in graph.values()) == 1


def test_symmetric_products_are_computed_once():
    graph = dict(patterns.build("matmul", 80, "cpu", max_nbytes=6400).__dask_graph__())
    slabs = [key for key in graph if key[0].startswith("slab-")]
    products = [task.dependencies for key, task in graph.items() if key[0].startswith("product-")]
    pairs = itertools.combinations_with_replacement(slabs, 2)
    assert sorted(map(sorted, products)) == sorted(sorted({a, b}) for a, b in pairs)


def test_a_chunk_of_cpu_numbers_does_not_depend_on_tiles(monkeypatch):
    whole = slab(50, 3, n=40, seed=1, device="cpu")
    monkeypatch.setattr("hpcdask.workloads.array_blocks.CPU_TILE_NBYTES", 1)
    assert np.array_equal(slab(50, 3, n=40, seed=1, device="cpu"), whole)


# --- work -----------------------------------------------------------------------------------------


def test_work():
    assert patterns.work("std", 1000) == {"memory": 16e6, "random": 1e6}
    assert patterns.work("matmul", 1000, 4) == {
        "memory": 16e6,
        "random": 1e6,
        "matrix_float64": 1.001e9,
        "link": 8e6,
    }
    assert patterns.work("matmul", 1000)["link"] == 0
    for name in patterns.NAMES:
        assert set(patterns.work(name, 16)) >= {"memory", "random"}


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "options", "match"),
    [
        (("median", 100), {}, "unknown pattern 'median': mean, std, transpose"),
        (("mean", 15), {}, "side of 15 is too small: the least is 16, 2048 B"),
        (("mean", 100, "cpu", "best"), {}, "unknown form 'best': tuned or stock"),
        (("fft", 100), {"max_nbytes": 799}, "no room for a row of 100 .* 800 B .* side 99"),
        (("transpose", 100), {"max_nbytes": 7}, "8 B are the least"),
    ],
)
def test_errors_come_before_computing(arguments, options, match):
    with pytest.raises(WorkloadError, match=match):
        patterns.build(*arguments, **options)


def test_check_and_work_refuse_the_same():
    for function in (lambda: patterns.check("mean", 1, 3), lambda: patterns.work("mean", 3)):
        with pytest.raises(WorkloadError, match="too small"):
            function()


# --- clients without CuPy -------------------------------------------------------------------------

NO_CUPY = """
import sys
class NoCuPy:
    def find_spec(self, name, *_):
        if name.split(".")[0] == "cupy":
            raise ImportError("no cupy")
sys.meta_path.insert(0, NoCuPy())

from hpcdask.workloads import WorkloadError, count_tasks
from hpcdask.workloads import array as patterns
for name in patterns.NAMES:
    assert count_tasks(patterns.build(name, 100_000, "cuda", "tuned", 8)) > 30
    try:
        patterns.build(name, 100_000, "cuda", "stock")
    except WorkloadError as error:
        assert "use the tuned form" in str(error)
    else:
        raise SystemExit("the stock form should have been refused")
"""


def test_cuda_graphs_need_no_cupy_on_the_client():
    done = subprocess.run(
        [sys.executable, "-c", NO_CUPY], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
