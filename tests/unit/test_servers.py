"""Each process of ours that listens keeps strangers within the limits, as it is really started."""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from types import SimpleNamespace

import pytest
from distributed import Scheduler

from hpcdask.clusters.scheduler import ClusterScheduler, read_scheduler_options
from hpcdask.runner import leader, protocol
from hpcdask.security import listening
from hpcdask.spec.specs import RunSpec
from launching import wait_for
from strangers import closed

FEW = 1024
TOO_MANY = listening.UNPROVEN_LIMIT + 60

#: How each is made; all print their ports and end with their standard input.
START = """
import asyncio, json, sys
from distributed import Scheduler
from hpcdask.security import listening
from hpcdask.security.credentials import create_credentials, to_security

listening.DEADLINE_SWEEPS = 10**9
keys = to_security(create_credentials())
LOCAL = {"host": "127.0.0.1", "port": 0, "security": keys, "dashboard_address": "127.0.0.1:0"}

def tell(server):
    web = getattr(server, "http_server", None)
    print(json.dumps([server.port, web and web.port]), flush=True)

async def until_the_end():
    await asyncio.to_thread(sys.stdin.read)

async def cluster():
    from hpcdask.clusters.scheduler import ClusterScheduler, read_scheduler_options
    options = read_scheduler_options(None, "none", None, local=True)
    made = ClusterScheduler(Scheduler, options, None, local=True, say=print)
    made.save_keys(sys.argv[2])
    await made.start()
    tell(made.server)
    await until_the_end()
    await made.close()
    made.remove_scratch()

async def worker():
    from hpcdask.comm.peers import PeerWorker
    options = {"security": keys, "host": "127.0.0.1", "dashboard_address": "127.0.0.1:0"}
    async with Scheduler(**LOCAL) as there, PeerWorker(there.address, **options) as made:
        tell(made)
        await until_the_end()

async def nanny():
    from hpcdask.node.nanny import BoundNanny
    async with Scheduler(**LOCAL) as there:
        options = {"security": keys, "host": "127.0.0.1", "nthreads": 1}
        async with BoundNanny(there.address, env={}, **options) as made:
            tell(made)
            await until_the_end()

async def control_line():
    from hpcdask.runner.control import ControlServer
    made = ControlServer("nonce", None)
    context = keys.get_listen_args("scheduler")["ssl_context"]
    print(json.dumps([await made.listen("127.0.0.1", context), None]), flush=True)
    await until_the_end()
    made.close()

if __name__ == "__main__":
    asyncio.run(globals()[sys.argv[1]]())
"""
RUN = """
import socket, sys
from hpcdask.runner import scheduler
from hpcdask.security import listening
listening.DEADLINE_SWEEPS = 10**9
scheduler.main(socket.socket(fileno=int(sys.argv[1])))
"""


def few_descriptors() -> None:
    """Begin with what many sites give."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (FEW, hard))


def end(process: subprocess.Popen, ask: Callable[[], object]) -> None:
    """Have a process end, whatever the test found."""
    with contextlib.suppress(OSError):
        ask()
    try:
        process.wait(60)
    finally:
        process.kill()


@contextlib.contextmanager
def started(kind: str, folder: str) -> Iterator[tuple[subprocess.Popen, int, int | None]]:
    """A server in a process of its own, its port, and that of its pages."""
    if kind == "run":
        with run(folder) as found:
            yield found
        return
    with subprocess.Popen(
        [sys.executable, "-c", START, kind, f"{folder}/keys"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=few_descriptors,
    ) as process:
        try:
            yield process, *json.loads(process.stdout.readline())
        finally:
            end(process, process.stdin.close)


def line(message: protocol.Message) -> bytes:
    return json.dumps(message.to_json()).encode() + b"\n"


@contextlib.contextmanager
def run(folder: str) -> Iterator[tuple[subprocess.Popen, int, int]]:
    """The scheduler of a run, and what its rank does."""
    rank, theirs = socket.socketpair()
    order = protocol.StartScheduler("127.0.0.1", None, "tcp", {}, "127.0.0.1:0", folder)
    with rank, rank.makefile("r") as said:
        command = [sys.executable, "-c", RUN, str(theirs.fileno())]
        with subprocess.Popen(
            command, pass_fds=[theirs.fileno()], preexec_fn=few_descriptors
        ) as process:
            theirs.close()
            try:
                rank.sendall(line(order))
                while not isinstance(
                    told := protocol.read(json.loads(said.readline())), protocol.SchedulerStarted
                ):
                    assert not isinstance(told, protocol.SchedulerFailed), told
                yield process, int(told.address.rsplit(":", 1)[1]), told.dashboard_port
            finally:
                end(process, lambda: rank.sendall(line(protocol.CloseScheduler())))


def status_of(port: int, method: str, path: str, body: bytes | None = None) -> int:
    """The status of an answer; 0 without one."""
    page = HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        page.request(method, path, body)
        return page.getresponse().status
    except OSError:
        return 0
    finally:
        page.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "run",
        "worker",
        "control_line",
        *(pytest.param(kind, marks=pytest.mark.long) for kind in ("cluster", "nanny")),
    ],
)
def test_strangers_of_each_server_are_kept_within_limits(kind, tmp_path):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    hard = before[1]
    if hard != resource.RLIM_INFINITY and hard < 4 * TOO_MANY:
        pytest.skip(f"only {hard} descriptors are allowed here")
    with started(kind, str(tmp_path)) as (process, port, pages), contextlib.ExitStack() as stack:
        soft, _ = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        assert soft == hard or soft >= listening.ENOUGH_DESCRIPTORS
        listening.prepare()
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, before)
        silent = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
            for _ in range(TOO_MANY)
        ]
        room = TOO_MANY - listening.UNPROVEN_LIMIT
        start = time.monotonic()
        wait_for(lambda: closed(silent) >= room, 20, "the oldest to leave for the others")
        assert time.monotonic() - start < 50  # asyncio itself ends a handshake after a minute
        if pages is not None:
            assert status_of(pages, "GET", "/health") == 200
            status_of(pages, "GET", "/status")  # a scheduler's dashboard is there from then on
            assert status_of(pages, "GET", "/proxy/22/127.0.0.1/") == 404
            # a page that takes no POST says so, unless its body is too much already
            assert status_of(pages, "POST", "/health", bytes(1000)) == 405
            assert status_of(pages, "POST", "/health", bytes(200_000)) in (0, 400)


def test_a_cluster_of_one_machine_is_for_that_machine(tmp_path):
    with started("cluster", str(tmp_path)) as (_, port, pages):
        assert status_of(pages, "GET", "/health") == 200
        for one in (port, pages):
            socket.create_connection(("127.0.0.1", one), timeout=60).close()
            with pytest.raises(ConnectionRefusedError):  # as from the network
                socket.create_connection(("127.0.0.2", one), timeout=60)


def test_a_cluster_without_keys_says_what_that_means(tmp_path):
    said: list[str] = []
    options = read_scheduler_options(None, "none", None, local=True)
    made = ClusterScheduler(Scheduler, options, False, local=True, say=said.append)
    made.save_keys(str(tmp_path / "keys"))
    assert said == ["warning: security=False: any user who reaches a port of it runs code as you"]
    assert not (tmp_path / "keys").exists()


@pytest.mark.parametrize(
    ("host", "job", "expected"),
    [
        ("127.0.0.1", "7", "127.0.0.1:8787"),
        ("10.0.0.1", None, "127.0.0.1:8787"),
        ("10.0.0.1", "7", ":8787"),
    ],
    ids=["for its program", "where others may work", "in a job"],
)
def test_where_the_pages_of_a_run_are(monkeypatch, host, job, expected):
    told: list[protocol.StartScheduler] = []
    monkeypatch.setattr(leader, "job_id", lambda: job)
    rank_0 = SimpleNamespace(
        spec=RunSpec(),
        agent=SimpleNamespace(credentials={}, scratch=""),
        scheduler=SimpleNamespace(tell=told.append),
        _host=lambda: host,
    )
    leader.Leader._start_scheduler(rank_0, None)
    assert [order.dashboard for order in told] == [expected]
