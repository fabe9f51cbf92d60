"""What strangers can cost the servers of a run and of a cluster, as they are really started."""

from __future__ import annotations

import contextlib
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import hpcdask
from hpcdask.clusters.scheduler import make_security
from hpcdask.process import raise_descriptor_limit
from launching import wait_for

FEW, STRANGERS = 1024, 1500


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    raise_descriptor_limit()
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < STRANGERS + FEW:
        pytest.skip(f"only {soft} descriptors are allowed here")
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[str]:
    """A run that begins with the descriptors that many sites give; the name of its file."""

    def few_descriptors() -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (FEW, hard))

    file = tmp_path / "scheduler.json"
    command = ["-m", "hpcdask.run", "--device", "cpu", "--scheduler-file", str(file)]
    with subprocess.Popen([sys.executable, *command], preexec_fn=few_descriptors) as process:
        try:
            wait_for(file.exists, 120, "the scheduler file")
            yield str(file)
        finally:
            process.terminate()
            process.wait(60)


def status_of(address: tuple[str, int], method: str, path: str, body: bytes | None = None) -> int:
    """Return the status of an answer; 0 without one."""
    page = HTTPConnection(*address, timeout=60)
    try:
        page.request(method, path, body)
        return page.getresponse().status
    except OSError:
        return 0
    finally:
        page.close()


def check_pages(host: str, port: int) -> None:
    """Assert that an HTTP server leads to no other, and takes small bodies only."""
    address = host, port
    assert status_of(address, "GET", "/health") == 200
    status_of(address, "GET", "/status")  # a scheduler's dashboard is there from then on
    assert status_of(address, "GET", "/proxy/22/127.0.0.1/") == 404
    # a page that takes no POST says so, unless its body is too much already
    assert status_of(address, "POST", "/health", bytes(1000)) == 405
    assert status_of(address, "POST", "/health", bytes(200_000)) in (0, 400)


@pytest.mark.slow
def test_silent_connections_keep_no_client_out_of_a_run(many_descriptors, run):
    with contextlib.ExitStack() as stack, hpcdask.connect(run) as client:
        client.wait_for_workers(1, timeout=120)
        address = urlsplit(client.scheduler.address)
        for _ in range(STRANGERS):
            stranger = socket.create_connection((address.hostname, address.port), timeout=60)
            stack.enter_context(stranger)
        with hpcdask.connect(run) as late:
            assert late.submit(sum, [1, 2]).result(timeout=60) == 3


@pytest.mark.slow
def test_pages_of_a_run(run):
    with hpcdask.connect(run) as client:
        client.wait_for_workers(1, timeout=120)
        info = client.scheduler_info()
        check_pages("127.0.0.1", info["services"]["dashboard"])
        worker = next(iter(info["workers"].values()))
        check_pages(worker["host"], worker["services"]["dashboard"])


def test_a_cluster_of_one_machine_is_for_that_machine(tmp_path):
    with hpcdask.LocalCUDAJobCluster(
        device="cpu", cores=1, memory="1GiB", shared_temp_directory=str(tmp_path)
    ) as cluster:
        ports = [urlsplit(one).port for one in (cluster.scheduler_address, cluster.dashboard_link)]
        check_pages("127.0.0.1", ports[1])
        for port in ports:
            socket.create_connection(("127.0.0.1", port), timeout=60).close()
            with pytest.raises(ConnectionRefusedError):  # as from the network
                socket.create_connection(("127.0.0.2", port), timeout=60)


def test_a_cluster_without_keys_says_what_that_means(tmp_path):
    said: list[str] = []
    make_security(False, str(tmp_path / "keys"), said.append)
    assert said == ["warning: security=False: any user who reaches a port of it runs code as you"]
    assert not (tmp_path / "keys").exists()
