"""Fixtures for tests that launch real programs."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from launching import Launcher, mpich_launcher, openmpi_launcher


@pytest.fixture(autouse=True)
def the_same_environment() -> Iterator[None]:
    """distributed's nannies leave their workers' variables in the process that starts them."""
    before = dict(os.environ)
    yield
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)


@contextmanager
def nothing_left(make: Callable[[], Launcher]) -> Iterator[Launcher]:
    launcher = make()
    try:
        yield launcher
    finally:
        launcher.close()


@pytest.fixture
def openmpi() -> Iterator[Launcher]:
    """Open MPI's mpirun; at the end of the test none of its processes may remain."""
    with nothing_left(openmpi_launcher) as launcher:
        yield launcher


@pytest.fixture
def mpich() -> Iterator[Launcher]:
    """MPICH's mpiexec; at the end of the test none of its processes may remain."""
    with nothing_left(mpich_launcher) as launcher:
        yield launcher


@pytest.fixture(params=["openmpi", "mpich"])
def mpi(request: pytest.FixtureRequest) -> Launcher:
    """Each of the two MPIs in turn."""
    return request.getfixturevalue(request.param)
