"""Fixtures for tests that launch real programs."""

import asyncio
import inspect
import os
import re
import signal
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from chaos.hosts import Hosts, missing
from launching import (
    describe,
    end,
    leftovers,
    unavailable,
    wait_for,
)
from queue_site import QueueSite
from strangers import open_folder  # noqa: F401 (a fixture)


def pytest_configure() -> None:
    """End by SIGTERM as by Ctrl-C: fixtures end what they started, such as a SLURM."""
    os.environ.pop("HPCDASK_HOME", None)  # see a_home_of_its_own
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` has it ignored


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with what takes long, so that no worker waits for another one at the end.

    What is the same under both MPIs is tested under Open MPI; MPICH's variant is `long`.
    """
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    names = {item.nodeid for item in items}
    for item in items:
        if re.sub(r"\bmpich\b", "openmpi", item.nodeid) in names - {item.nodeid}:
            item.add_marker(pytest.mark.long)


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine, in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(autouse=True, scope="module")
def the_same_environment_after_a_module() -> Iterator[None]:
    """As `the_same_environment`, for what a module's own fixtures start.

    A client whose scheduler was shut down leaves itself in dask's configuration.
    """
    with restored_environment():
        yield
    if dask := sys.modules.get("dask"):
        dask.config.config.pop("scheduler", None)


@pytest.fixture(autouse=True)
def the_same_environment() -> Iterator[None]:
    """distributed's nannies leave their workers' variables in the process that starts them."""
    with restored_environment():
        yield


@pytest.fixture(autouse=True)
def a_home_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: Any) -> None:
    """Clusters leave folders and links there, those of programs that a test starts as well.

    Local jobs of other tests and of the developer, which have another home, are not listed.
    """
    pip = os.path.expanduser("~/.config/pip/pip.conf")
    if os.path.exists(pip):
        monkeypatch.setenv("PIP_CONFIG_FILE", pip)
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))


@pytest.fixture(autouse=True)
def idle_at_the_end(request: pytest.FixtureRequest) -> Iterator[None]:
    """Cancel all jobs at the queueing systems that the test had."""
    yield
    for site in (request.node.funcargs or {}).values():
        if isinstance(site, QueueSite):
            site.cancel_all()


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    """Two hosts made of this one: network namespaces with names, addresses and a cable."""
    if why := missing():
        unavailable(why)
    with Hosts(tmp_path) as made:
        yield made


@contextmanager
def restored_environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture
def marker(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A variable of all processes that the test starts; at the end none of them may be left."""
    marker = f"HPCDASK_TEST={uuid.uuid4().hex}"
    monkeypatch.setenv(*marker.split("="))
    yield marker
    try:
        wait_for(lambda: not leftovers(marker), 30, "all to be gone")
    finally:
        left = leftovers(marker)
        lines = describe(left)
        end(left)
        assert not left, lines
