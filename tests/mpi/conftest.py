"""Fixtures for tests that watch runs of `python -m hpcdask.run`."""

from collections.abc import Iterator

import pytest

from launching import mpich_launcher, openmpi_launcher
from running import Site, no_launcher

LAUNCHERS = {"openmpi": openmpi_launcher, "mpich": mpich_launcher, "alone": no_launcher}


@pytest.fixture
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    """Where a test's runs happen: under Open MPI, or what `under(...)` names."""
    with Site(LAUNCHERS[getattr(request, "param", "openmpi")]()) as site:
        yield site
