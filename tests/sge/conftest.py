"""A Grid Engine for the tests of this folder."""

import socket
from collections.abc import Iterator

import pytest

from launching import unavailable
from sge_site import PRIVATE, SgeSite, is_missing


@pytest.fixture(scope="package")
def sge() -> Iterator[SgeSite]:
    """A Grid Engine of one host with eight slots and four GPUs."""
    if is_missing():
        unavailable(f"Grid Engine is not in {PRIVATE}: run tests/tools/install-queues.sh")
    name = socket.gethostname()
    try:
        socket.gethostbyname(name)
    except OSError:
        unavailable(f"Grid Engine needs an address for this machine's name: {name} in /etc/hosts")
    with SgeSite() as site:
        yield site
