"""The array patterns: answers as NumPy's, and checks that find what is wrong."""

from __future__ import annotations

import dask
import dask.array as da
import numpy as np
import pytest

from hpcdask.workloads import array as patterns
from hpcdask.workloads import plain_array

each = pytest.mark.parametrize("name", plain_array.NAMES)


@pytest.fixture(autouse=True)
def _synchronous():
    with dask.config.set(scheduler="synchronous"):
        yield


def by_numpy(name: str, x: np.ndarray) -> np.ndarray:
    match name:
        case "sum":
            return (x + 1)[::2, ::2].sum()
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


@each
@pytest.mark.parametrize("n", [60, 61])
def test_it_equals_numpy(name, n):
    with dask.config.set({"array.chunk-size": "10kB"}):
        result = patterns.build(name, n, "cpu", seed=3).compute()
        x = da.random.default_rng(3).normal(10, 1, size=(n, n))
        assert x.npartitions > 1
    np.testing.assert_allclose(result, by_numpy(name, x.compute()), rtol=1e-10)


@each
@pytest.mark.parametrize("n", [16, 17, 400])
def test_the_checks_pass(name, n):
    for seed in range(3):
        result = patterns.build(name, n, "cpu", seed).compute()
        assert all(check.ok for check in patterns.check(name, result, n))


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("sum", lambda x: (x[:398] + 1)[::2, ::2].sum()),
        ("sum", lambda x: x[::2, ::2].sum()),
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
    x = np.random.default_rng(0).normal(10, 1, (400, 400))
    assert all(check.ok for check in patterns.check(name, by_numpy(name, x), 400))
    assert not all(check.ok for check in patterns.check(name, wrong(x), 400))
