"""What a stranger may cost a process that listens: connections, descriptors, lines of its log.

Whoever reaches a port can open connections, and say nothing or nonsense. tornado and asyncio accept
them all, wait for them without end, and, where no descriptor is left, try again at once and say so
each time. Here those that have not proved themselves are few and go after a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from tornado.tcpserver import TCPServer

from hpcdask.upstream import tornado as upstream

logger = logging.getLogger("distributed.hpcdask.listening")

#: Connections that may be unproven at a time; never more than this part of the descriptors.
UNPROVEN_LIMIT = 512
DESCRIPTORS_PART = 4
#: Sweeps, at least a second apart, after which an unproven connection is closed. A process that
#: was busy or stopped for long counts one: others' handshakes may have waited for it.
DEADLINE_SWEEPS = 30
#: Sweeps after which it may be closed to let in another.
GRACE_SWEEPS = 2
SWEEP_S = 1.0
#: Seconds between two attempts to accept when there is no descriptor.
PAUSE_S = 1.0
#: Descriptors that are enough; some systems allow a billion, and old programs try them all.
ENOUGH_DESCRIPTORS = 2**20
#: Lines of one kind that strangers can have written within so many seconds.
LINES_LIMIT = 20
LINES_S = 60.0
#: Loggers of lines that strangers cause.
_LOGGERS = (
    logger.name,
    "distributed.comm.tcp",
    "distributed.hpcdask.ucx",
    "tornado.access",
    "tornado.application",
    "tornado.general",
)


def prepare() -> None:
    """Raise this process's soft limit of open files to the hard one, and spare its log."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = ENOUGH_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, ENOUGH_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < enough:
        resource.setrlimit(resource.RLIMIT_NOFILE, (enough, hard))
    for name in _LOGGERS:
        log = logging.getLogger(name)
        if not any(isinstance(known, Seldom) for known in log.filters):
            log.addFilter(Seldom())


class Seldom(logging.Filter):
    """Lets a few lines of each kind through within a minute."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[str, tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to write it."""
        now, kind = time.monotonic(), str(record.msg)
        start, count = self._seen.get(kind, (now, 0))
        if now - start >= LINES_S:
            start, count = now, 0
        if len(self._seen) > 1000:  # messages that are all different
            self._seen.clear()
        self._seen[kind] = start, count + 1
        if count == LINES_LIMIT - 1:
            record.msg = f"{kind} (no more of this kind within {LINES_S:g} s)"
        return count < LINES_LIMIT


def unproven_limit() -> int:
    """Connections to a port that may be unproven at a time."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = UNPROVEN_LIMIT if soft == resource.RLIM_INFINITY else soft // DESCRIPTORS_PART
    return max(1, min(UNPROVEN_LIMIT, few))


class Unproven:
    """The connections of one listener that have not proved themselves."""

    def __init__(self) -> None:
        self.limit = unproven_limit()
        self._close: dict[object, tuple[int, Callable[[], object]]] = {}  # oldest first
        self._sweeps = 0
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._close)

    @contextlib.contextmanager
    def watch(self, close: Callable[[], object]) -> Iterator[None]:
        """Until the end of the block, a connection proves itself; `close` ends it."""
        key = object()
        self._close[key] = self._sweeps, close
        self._sweep_later()
        try:
            yield
        finally:
            self._close.pop(key, None)

    async def room(self) -> None:
        """Wait until another one may come. The oldest leave for it."""
        while len(self) >= self.limit:
            if not self._drop(GRACE_SWEEPS, at_most=1):
                await asyncio.sleep(SWEEP_S / 20)

    def _drop(self, sweeps: int, at_most: int | None = None) -> int:
        old = [key for key, (since, _) in self._close.items() if self._sweeps - since >= sweeps]
        for key in old[:at_most]:
            self._close.pop(key)[1]()
        return len(old[:at_most])

    def _sweep_later(self) -> None:
        if self._timer is None and self._close:
            self._timer = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)

    def _sweep(self) -> None:
        self._timer = None
        self._sweeps += 1
        if closed := self._drop(DEADLINE_SWEEPS):
            logger.info("closed %d connections that did not prove themselves", closed)
        self._sweep_later()


class Acceptor:
    """Accepts connections, one per turn of the event loop, while there is room.

    `sock` listens, and does not block. `room` is waited for before each connection; `handle` gets
    the connection and its address.
    """

    def __init__(
        self,
        sock: socket.socket,
        room: Callable[[], Awaitable[None]],
        handle: Callable[[socket.socket, Any], object],
    ) -> None:
        self._sock, self._room, self._handle = sock, room, handle
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._accept())

    async def _accept(self) -> None:
        while True:
            await self._room()
            try:
                connection, address = await self._loop.sock_accept(self._sock)
            except ConnectionAbortedError:
                continue
            except OSError as error:  # no descriptor is left, or no memory
                logger.warning("no connection can be accepted: %s", error.strerror)
                await asyncio.sleep(PAUSE_S)
                continue
            try:
                self._handle(connection, address)
            except Exception as error:  # such as one that is closed again already
                connection.close()
                logger.info("a connection from %s broke: %s", address, error)
            await asyncio.sleep(0)

    def stop(self) -> None:
        """Accept no more; the socket may be closed at once."""
        self._task.cancel()
        if not self._loop.is_closed() and self._sock.fileno() >= 0:
            # else it would be removed later, when another socket may have its number
            self._loop.remove_reader(self._sock)


def take_over(server: TCPServer, room: Callable[[], Awaitable[None]]) -> None:
    """Accept the connections of a server of tornado's in its place."""
    upstream.accept_by(server, lambda sock, handle: Acceptor(sock, room, handle))


def guard(server: Any) -> None:
    """Limit who connects to a scheduler, worker or nanny of distributed.

    As of distributed 2026.7, whose listeners have a `tcp_server`.
    """
    for listener in server.listeners:
        tcp_server = getattr(listener, "tcp_server", None)
        if tcp_server is None or hasattr(tcp_server, "unproven"):
            continue
        tcp_server.unproven = Unproven()
        tcp_server.handle_stream = _until_proved(tcp_server.unproven, tcp_server.handle_stream)
        take_over(tcp_server, tcp_server.unproven.room)


def _until_proved(
    unproven: Unproven, handle: Callable[[Any, Any], Awaitable[None]]
) -> Callable[[Any, Any], Awaitable[None]]:
    """distributed's handling of a new connection, which ends with both handshakes."""

    async def watched(stream: Any, address: Any) -> None:
        with unproven.watch(stream.close):
            await handle(stream, address)

    return watched
