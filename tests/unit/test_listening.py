"""Strangers that flood a listener with connections: silent ones, nonsense, too many."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
from distributed import Nanny, Scheduler, rpc

from hpcdask.comm import peers
from hpcdask.node import channel
from hpcdask.runner import control
from hpcdask.security import listening
from hpcdask.security.credentials import create_credentials, to_security
from strangers import closed

FLOOD = 1500


@pytest.fixture(autouse=True)
def descriptors() -> Iterator[None]:
    """Both ends of a flood are in this process."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    listening.prepare()
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 3 * FLOOD:
        pytest.skip(f"only {soft} descriptors are allowed here")
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A minute of sweeps is over in a few seconds."""
    monkeypatch.setattr(listening, "SWEEP_S", 0.05)


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """What would be written to the log."""
    found: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    keep = Keep()
    names = ("", "distributed", *listening._LOGGERS)
    with contextlib.ExitStack() as stack:
        for name in names:
            log = logging.getLogger(name)
            for one in log.filters:
                if isinstance(one, listening.Seldom):
                    one._seen.clear()
            if log.handlers or not log.propagate or not name:
                log.addHandler(keep)
                stack.callback(log.removeHandler, keep)
        yield found


@contextlib.asynccontextmanager
async def flood(
    port: int, count: int = FLOOD, says: bytes = b""
) -> AsyncIterator[list[socket.socket]]:
    """Connections that prove nothing."""
    with contextlib.ExitStack() as stack:
        made = []
        for _ in range(count):
            sock = stack.enter_context(socket.socket())
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
            if says:
                sock.send(says)
            made.append(sock)
        yield made


async def until(condition: Callable[[], object], seconds: float = 60) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def secured(**options: object) -> Scheduler:
    keys = to_security(create_credentials())
    scheduler = await Scheduler(
        host="127.0.0.1",
        port=0,
        protocol="tls",
        security=keys,
        dashboard_address="127.0.0.1:0",
        dashboard=False,
        **options,
    )
    listening.guard(scheduler)
    return scheduler


async def identity(scheduler: Scheduler) -> str:
    """What a client with keys hears."""
    access = scheduler.security.get_connection_args("client")
    async with rpc(scheduler.address, connection_args=access) as there:
        return (await there.identity())["type"]


def test_who_has_keys_connects_in_spite_of_a_flood(hurry, lines):
    async def run() -> None:
        scheduler = await secured()
        unproven = scheduler.listeners[0].tcp_server.unproven
        async with scheduler:
            async with flood(scheduler.port) as strangers:
                assert await identity(scheduler) == "Scheduler"
                assert len(unproven) <= listening.UNPROVEN_LIMIT
                await until(lambda: closed(strangers) == FLOOD)
                await until(lambda: not len(unproven))
            assert await identity(scheduler) == "Scheduler"

    asyncio.run(run())
    assert len(lines) < 3 * listening.LINES_LIMIT, lines[:5]


def test_nonsense_gets_a_few_lines_of_the_log(lines):
    async def run() -> None:
        scheduler = await secured()
        async with scheduler:
            async with flood(scheduler.port, 200, b"GET / HTTP/1.1\r\n\r\n") as strangers:
                await until(lambda: closed(strangers) == 200)
            assert await identity(scheduler) == "Scheduler"

    asyncio.run(run())
    told = [line for line in lines if "TLS handshake failed" in line]
    assert 0 < len(told) <= listening.LINES_LIMIT
    assert "no more of this kind" in told[-1]
    assert len(lines) < 3 * listening.LINES_LIMIT, lines[:5]


hold = time.sleep  # the event loop's thread


def test_a_busy_process_is_no_stranger(monkeypatch):
    """Time in which this process turned its loop once is one sweep, however long it was."""

    monkeypatch.setattr(listening, "SWEEP_S", sweep := 0.01)

    async def run() -> int:
        unproven = listening.Unproven()
        ended = []
        with unproven.watch(lambda: ended.append(1)):
            hold(3 * sweep * listening.DEADLINE_SWEEPS)
            await asyncio.sleep(2 * sweep)
            assert not ended
            await until(lambda: ended)
        return len(ended)

    assert asyncio.run(run()) == 1


def test_a_rank_arrives_in_spite_of_a_flood(hurry):
    keys = to_security(create_credentials())

    async def run() -> None:
        reports = []

        async def arrived(report: channel.Message, channel: channel.MessageStream) -> None:
            reports.append(report)

        hub = control.ControlServer("nonce", arrived)
        server = keys.get_listen_args("scheduler")["ssl_context"]
        client = keys.get_connection_args("worker")["ssl_context"]
        port = await hub.listen("127.0.0.1", server)
        async with flood(port) as strangers:
            rank = await control.connect_to_leader("127.0.0.1", port, client, "nonce")
            rank.send(rank=1)
            await until(lambda: reports == [{"rank": 1}])
            await until(lambda: closed(strangers) == FLOOD)
        hub.close()
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", port), timeout=5)
        rank.close()

    asyncio.run(run())


def use_up(stack: contextlib.ExitStack) -> None:
    """All descriptors."""
    with contextlib.suppress(OSError):
        while True:
            stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))


def test_without_descriptors_it_waits(monkeypatch, lines):
    """Each attempt is followed by a pause; tornado and asyncio try again at once."""
    monkeypatch.setattr(listening, "PAUSE_S", 0.1)
    attempts = []

    async def room() -> None:
        attempts.append(1)

    async def run() -> None:
        accepted: list[socket.socket] = []
        with socket.create_server(("127.0.0.1", 0)) as sock, contextlib.ExitStack() as stack:
            sock.setblocking(False)
            acceptor = listening.Acceptor(sock, room, lambda one, _: accepted.append(one))
            await until(lambda: attempts)  # it waits for a connection
            client = stack.enter_context(socket.socket())
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (client.fileno() + 8, hard))
            try:
                use_up(stack)
                client.connect(sock.getsockname())
                await until(lambda: len(attempts) >= 5)
                failed = [line for line in lines if "no connection can be accepted" in line]
                assert not accepted
                assert len(failed) <= len(attempts) < 20
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            await until(lambda: accepted)
            acceptor.stop()
            accepted[0].close()

    asyncio.run(run())


def test_nannies_and_workers_are_guarded_and_the_place_of_the_limits_is_there():
    """tornado's and distributed's names that `hpcdask.security.listening` uses."""

    async def run() -> None:
        from hpcdask.node.nanny import BoundNanny

        scheduler = await secured()
        options = {"security": scheduler.security, "host": "127.0.0.1", "nthreads": 1}
        async with (
            scheduler,
            peers.PeerWorker(scheduler.address, **options) as worker,
            BoundNanny(scheduler.address, env={}, **options) as nanny,
        ):
            assert isinstance(nanny, Nanny)
            for server in (scheduler, worker, nanny):
                tcp_server = server.listeners[0].tcp_server
                assert tcp_server.unproven.limit == listening.UNPROVEN_LIMIT
                assert tcp_server._handlers.keys() == tcp_server._sockets.keys()
                for stop in tcp_server._handlers.values():
                    assert isinstance(stop.__self__, listening.Acceptor)
            assert not hasattr(nanny, "http_server")  # else it needs limits too

    asyncio.run(run())
