"""An OAR for the tests of this folder."""

import shutil
from collections.abc import Iterator

import pytest

from launching import unavailable
from oar_site import PRIVATE, OarSite, is_missing


@pytest.fixture(scope="package")
def oar() -> Iterator[OarSite]:
    """An OAR of one node with eight cores and four GPUs."""
    if is_missing():
        unavailable(f"OAR is not in {PRIVATE}: run tests/tools/install-queues.sh")
    if not shutil.which("mariadb-install-db"):
        unavailable("OAR needs MariaDB: run tests/tools/install-programs.sh")
    with OarSite() as site:
        yield site
