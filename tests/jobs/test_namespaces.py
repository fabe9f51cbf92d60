"""A login node and two nodes that share neither loopback nor /tmp, only a folder.

Each is a network namespace of its own, on two networks by interfaces whose names differ between the
login node and the nodes, and a mount namespace with a /tmp of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from clock import stretched
from launching import clean_environment, end, leftovers, unavailable, wait_for, walk

PROGRAM = Path(__file__).with_name("elsewhere.py")
TMP = Path("/tmp")
NAMES = ("login", "node1", "node2")
NETWORKS = {"slow": "198.18.77", "fast": "198.18.78"}


class Machines:
    """The namespaces and what they share.

    Attributes
    ----------
    shared
        A folder that all of them see.
    """

    def __init__(self) -> None:
        self.tag = uuid.uuid4().hex[:8]
        self.shared = Path(tempfile.mkdtemp(prefix="hpcdask-shared-", dir="/var/tmp"))
        self.marker = f"HPCDASK_TEST={uuid.uuid4().hex}"

    def start(self) -> None:
        """Make them, and connect them."""
        for name in ("switch", *NAMES):
            _ip("netns", "add", self._namespace(name))
            self._ip(name, "link", "set", "lo", "up")
        for network in NETWORKS:
            self._ip("switch", "link", "add", network, "type", "bridge")
            self._ip("switch", "link", "set", network, "up")
            for name in NAMES:
                port = f"{network}-{name}"
                own = f"login-{network}" if name == "login" else f"{network}0"
                peer = ("peer", "name", own, "netns", self._namespace(name))
                self._ip("switch", "link", "add", port, "type", "veth", *peer)
                self._ip("switch", "link", "set", port, "master", network, "up")
                self._ip(name, "address", "add", f"{self.address(name, network)}/24", "dev", own)
                self._ip(name, "link", "set", own, "up")

    def address(self, name: str, network: str) -> str:
        """Of a machine, on a network."""
        return f"{NETWORKS[network]}.{NAMES.index(name) + 1}"

    def command(self, name: str) -> list[str]:
        """What runs the command that follows it on this machine."""
        # A Python that lies below /tmp has to stay visible
        paths = {Path(path).resolve() for path in (sys.prefix, *sys.path) if path}
        paths = {path for path in paths if path.is_dir() and path.is_relative_to(TMP)}
        kept = [path for path in paths if not paths & set(path.parents)]
        lines = ["set -e", "mount --make-rprivate /", f"hostname {name}"]
        for number, path in enumerate(kept):
            held = self.shared / "held" / str(number)
            held.mkdir(parents=True, exist_ok=True)
            lines.append(f"mount --bind {shlex.quote(str(path))} {held}")
        lines.append(f"mount -t tmpfs tmpfs {TMP}")
        for number, path in enumerate(kept):
            quoted = shlex.quote(str(path))
            lines += [f"mkdir -p {quoted}", f"mount --bind {self.shared}/held/{number} {quoted}"]
        lines.append('exec "$@"')
        enter = ["ip", "netns", "exec", self._namespace(name), "unshare", "--mount", "--uts"]
        return [*enter, "sh", "-c", "; ".join(lines), "sh"]

    def start_on(self, name: str, *command: str, **environment: str) -> subprocess.Popen[str]:
        """Start a command on this machine."""
        key, value = self.marker.split("=")
        return subprocess.Popen(
            [*self.command(name), *command],
            env={**clean_environment(), "HOME": str(self.shared), key: value, **environment},
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def unplug(self, name: str) -> None:
        """Take a machine from both networks, as if it had lost its power."""
        for network in NETWORKS:
            self._ip("switch", "link", "set", f"{network}-{name}", "down")

    def close(self) -> None:
        """End their processes, and take them away."""
        end(leftovers(self.marker))
        for name in ("switch", *NAMES):
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "delete", self._namespace(name))
        shutil.rmtree(self.shared, ignore_errors=True)

    def _namespace(self, name: str) -> str:
        return f"hpcdask-{self.tag}-{name}"

    def _ip(self, name: str, *arguments: str) -> None:
        _ip("-n", self._namespace(name), *arguments)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture
def machines() -> Iterator[Machines]:
    if os.geteuid():
        pytest.skip("network namespaces: only root may make them")
    if missing := [name for name in ("ip", "unshare", "mount") if not shutil.which(name)]:
        unavailable(f"network namespaces: {' '.join(missing)} missing (iproute2, util-linux)")
    machines = Machines()
    try:
        try:
            machines.start()
        except subprocess.CalledProcessError as error:
            unavailable(f"network namespaces: {shlex.join(error.cmd)}: {error.stderr.strip()}")
        yield machines
    finally:
        machines.close()


def test_only_a_folder_and_a_network_are_shared(machines: Machines):
    clusters = machines.shared / "clusters"
    program = start_program(machines, clusters)
    out, err = program.communicate(timeout=600)
    assert program.returncode == 0, err
    seen = json.loads(out)

    workers = sorted(seen["workers"], key=lambda worker: worker["host"])
    assert host(seen["scheduler"]) == machines.address("login", "slow")
    assert [worker["host"] for worker in workers] == ["node1", "node2"]
    # Without `interface`, they would have the address by which they reach the scheduler
    expected = [machines.address(name, "fast") for name in ("node1", "node2")]
    assert [host(worker["address"]) for worker in workers] == expected
    assert [host(worker["nanny"]) for worker in workers] == expected
    assert not any(worker["sees the login node's /tmp"] for worker in workers)
    assert seen["total"] == sum(range(1_000_000))
    (fetched,) = (worker for worker in workers if worker["fetched from"])
    (other,) = (worker for worker in workers if worker is not fetched)
    assert fetched["fetched from"] == [other["address"]]
    assert [f"on node{n}: 1 worker" in log for n, log in enumerate(seen["logs"], 1)] == [True] * 2
    assert seen["states"] == ["completed"] * 2

    wait_for(lambda: not leftovers(machines.marker), 10, "all processes to end")
    assert not [path for path in walk(clusters) if path.suffix == ".pem"], "keys are left"


def start_program(machines: Machines, clusters: Path, **environment: str) -> subprocess.Popen[str]:
    nodes = [shlex.join(machines.command(name)) for name in ("node1", "node2")]
    command = (sys.executable, str(PROGRAM), str(clusters), *nodes)
    return machines.start_on("login", *command, **environment)


@pytest.mark.long
def test_a_node_that_is_lost_ends_a_gang(machines: Machines):
    """Nothing is closed: its connections just tell no more."""
    clusters = machines.shared / "clusters"
    clusters.mkdir(exist_ok=True)
    program = start_program(machines, clusters, GANG="1")

    def ready() -> bool:
        assert program.poll() is None, program.communicate()
        return len(list(clusters.glob("runs-*"))) == 2

    wait_for(ready, 180, "two ranks")
    start = time.time()
    machines.unplug("node2")
    text, name, at = json.loads(program.stdout.readline())
    assert name == "node2"
    assert "rank 1 of 2 failed on worker " in text
    assert "its node was lost" in text
    assert at - start < stretched(45)  # of which 30 s are distributed.comm.timeouts.tcp
    program.communicate(timeout=180)
    assert program.returncode == 0


def host(address: str) -> str:
    """That of a TLS address."""
    assert address.startswith("tls://")
    return address.removeprefix("tls://").rpartition(":")[0]
