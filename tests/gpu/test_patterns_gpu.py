"""The array patterns with CuPy: the numbers that the kernels find are NumPy's."""

from __future__ import annotations

import itertools

import dask
import numpy as np
import pytest

from hpcdask.gpu.devices import Gpu
from hpcdask.workloads import array as patterns
from hpcdask.workloads import array_blocks as blocks
from hpcdask.workloads import to_host

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

N, ROWS, SEED = 301, (100, 100, 101), 4
each = pytest.mark.parametrize("name", patterns.NAMES)


@pytest.fixture(autouse=True)
def _on_a_gpu(gpus: list[Gpu]):
    with dask.config.set(scheduler="synchronous"):
        yield


def array(name: str) -> np.ndarray:
    if name != "transpose":
        slabs = (blocks.slab(r, i, n=N, seed=SEED, device="cuda") for i, r in enumerate(ROWS))
        return np.concatenate([to_host(slab) for slab in slabs])
    x = np.empty((N, N))
    starts = np.cumsum((0, *ROWS))
    for i, j in itertools.product(range(len(ROWS)), repeat=2):
        block = blocks._normals((ROWS[i], ROWS[j]), (i, j), SEED, "cuda")
        x[starts[i] : starts[i + 1], starts[j] : starts[j + 1]] = to_host(block)
    return x


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


@each
def test_tuned_equals_numpy(name: str) -> None:
    max_nbytes = 101 * 101 * 8 if name == "transpose" else 101 * N * 8
    result = patterns.build(name, N, "cuda", "tuned", 1, SEED, max_nbytes=max_nbytes).compute()
    assert type(result).__module__ == "numpy"
    np.testing.assert_allclose(result, by_numpy(name, array(name)), rtol=1e-9)


@each
@pytest.mark.parametrize("form", ["tuned", "stock"])
def test_the_checks_pass(name: str, form: str) -> None:
    result = to_host(patterns.build(name, 2000, "cuda", form, 2).compute())
    checks = patterns.check(name, result, 2000)
    assert all(check.ok for check in checks), checks
