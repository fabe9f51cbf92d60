"""A SLURM for the tests of this folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from launching import unavailable
from slurm_login import Login, login
from slurm_site import SlurmSite, missing_programs


@pytest.fixture(scope="session")
def slurm() -> Iterator[SlurmSite]:
    """A SLURM of four nodes with two stand-in GPUs each, idle at the start of each test."""
    require_slurm()
    with SlurmSite() as site:
        yield site


@pytest.fixture(scope="session")
def slurm_accounting() -> Iterator[SlurmSite]:
    """A SLURM of two nodes with accounting, idle at the start of each test."""
    require_slurm(accounting=True)
    with SlurmSite(nodes=2, accounting=True) as site:
        yield site


@pytest.fixture(scope="session")
def slurm_programs() -> None:
    """For tests that start a site of their own."""
    require_slurm()


@pytest.fixture
def user(slurm: SlurmSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Login]:
    """At the end, no job of a cluster, no process, no key may be left, and no log readable."""
    with login(slurm, tmp_path, monkeypatch) as user:
        yield user


def require_slurm(accounting: bool = False) -> None:
    if missing := missing_programs(accounting):
        hint = "apt-get install slurmctld slurmd slurm-client munge"
        if accounting:
            hint += " slurmdbd mariadb-server-core mariadb-client-core"
        unavailable(f"SLURM is not installed, missing: {' '.join(missing)} ({hint})")
