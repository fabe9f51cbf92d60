"""A login node and a node that share a network and a folder, but no loopback and no /tmp."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.hosts import Hosts
from launching import clean_environment, wait_for, walk

PROGRAM = Path(__file__).with_name("elsewhere.py")


@pytest.fixture
def shared(marker: str) -> Iterator[Path]:
    """A folder that both see; at the end no process and no key may be left."""
    folder = Path(tempfile.mkdtemp(prefix="hpcdask-shared-", dir="/var/tmp"))
    (folder / "tmp").mkdir()
    try:
        yield folder
        assert not [path for path in walk(folder) if path.name.endswith("keys")]
    finally:
        shutil.rmtree(folder)


def start(hosts: Hosts, shared: Path, *what: str) -> subprocess.Popen[str]:
    """Start the program on the login node."""
    own = ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs tmpfs {shared}/tmp; exec "$@"', "sh"]
    node = shlex.join([*hosts.prefix(1), *own])
    command = [sys.executable, str(PROGRAM), str(shared), node, *hosts.links, *what]
    return subprocess.Popen(
        [*hosts.prefix(0), *command],
        env={**clean_environment(), "HOME": str(shared), "TMPDIR": f"{shared}/tmp"},
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_only_a_folder_and_a_network_are_shared(hosts: Hosts, shared: Path):
    program = start(hosts, shared)
    out, err = program.communicate(timeout=600)
    assert program.returncode == 0, err
    seen = json.loads(out)
    login, node = hosts.addresses
    workers = seen["workers"]
    assert host(seen["scheduler"]) == login
    assert [worker["host"] for worker in workers] == [hosts.names[1]] * 2
    assert [host(worker["address"]) for worker in workers] == [node] * 2
    assert [host(worker["nanny"]) for worker in workers] == [node] * 2
    assert not any(worker["sees the login node's files"] for worker in workers)
    assert seen["total"] == sum(range(1_000_000))
    (fetched,) = (worker for worker in workers if worker["fetched from"])
    (other,) = (worker for worker in workers if worker is not fetched)
    assert fetched["fetched from"] == [other["address"]]
    assert all(f"on {hosts.names[1]}: 1 worker" in log for log in seen["logs"])


@pytest.mark.long
def test_a_node_that_is_lost_ends_a_gang(hosts: Hosts, shared: Path):
    """Nothing is closed: its connections just tell no more."""
    program = start(hosts, shared, "gang")

    def ready() -> bool:
        assert program.poll() is None, program.communicate()
        return len(list(shared.glob("runs-*"))) == 2

    wait_for(ready, 180, "two ranks")
    hosts.join(up=False)
    text, name = json.loads(program.stdout.readline())
    assert name == hosts.names[1]
    assert " of 2 failed on worker " in text
    assert "its node was lost" in text
    program.communicate(timeout=180)
    assert program.returncode == 0


def host(address: str) -> str:
    """That of a TLS address."""
    assert address.startswith("tls://")
    return address.removeprefix("tls://").rpartition(":")[0]
