"""One SLURM for the tests of this folder."""

from collections.abc import Iterator

import pytest

from desk import Desk, sit_down
from launching import unavailable
from slurm_site import SlurmSite, missing_programs


@pytest.fixture(scope="session")
def site() -> Iterator[SlurmSite]:
    """A SLURM of two nodes with two stand-in GPUs each."""
    if missing := missing_programs():
        unavailable(f"SLURM is not installed, missing: {' '.join(missing)}")
    with SlurmSite(nodes=2) as site:
        yield site


@pytest.fixture
def desk(site: SlurmSite, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    """At the end of the test no job, process or key may remain."""
    with sit_down(site, monkeypatch) as desk:
        yield desk
