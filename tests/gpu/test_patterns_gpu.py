"""The array patterns with CuPy."""

from __future__ import annotations

import dask
import pytest

from hpcdask.workloads import array as patterns
from hpcdask.workloads import plain_array, to_host

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120), pytest.mark.usefixtures("gpus")]


@pytest.mark.parametrize("name", plain_array.NAMES)
def test_the_checks_pass(name: str) -> None:
    with dask.config.set(scheduler="synchronous"):
        result = to_host(patterns.build(name, 2000, "cuda").compute())
    checks = patterns.check(name, result, 2000)
    assert all(check.ok for check in checks), checks
