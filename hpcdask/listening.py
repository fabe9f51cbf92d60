"""What a stranger may cost a process that listens: connections, descriptors, lines of its log.

Whoever reaches a port can open connections, and say nothing or nonsense. tornado and asyncio accept
them all, wait for them without end, and, where no descriptor is left, try again at once and say so
each time. Here those that have not proved themselves are few and go after a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import resource
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any

from tornado.tcpserver import TCPServer

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
#: Seconds from tick to tick of `Untold`, which looks on every so manyth, or as soon as something
#: is odd; and those after which a connection may be closed where there are too many.
TICK_S = 0.1
LOOK_TICKS = 10
GRACE_TICKS = 5
#: Descriptors that are looked through where there is none left to list them with.
SEARCHED_DESCRIPTORS = 2**16
#: Bytes that a request for a connection of UCX has at most.
REQUEST_NBYTES = 2064
#: Of the kernel's ``struct tcp_info``: bytes up to the end of what is read, where the bytes that
#: were received and the segments with data that were sent lie, and two of its states.
_INFO_NBYTES, _RECEIVED_AT, _SENT_AT = 160, 128, 156
_STATE_CLOSE, _STATE_LISTEN = 7, 10
#: Of ``asm/socket.h``, and a classic BPF program that takes nothing in.
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
_NOTHING = ctypes.create_string_buffer(struct.pack("=HBBI", 6, 0, 0, 0), 8)
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


class Untold:
    """The connections to a port that UCX has accepted, and tells nobody of.

    It tells of one when it has read a whole request, for which it waits without end; and of one
    that sent more than a request can have it reads nothing more, but asks for it again and again.
    They are known by their port, and by that nothing was ever sent to them: UCX answers when it
    has told. A reset is the one thing after which it closes all of them. Where they use up the
    descriptors, the kernel drops what comes to the port for a moment, and others try again: UCX
    ends the process if it has no descriptor for a connection of somebody who asks properly.

    Parameters
    ----------
    port
        Where UCX listens.
    deadline_s
        Seconds after which such a connection is reset. A process that was busy or stopped for long
        counts `TICK_S`.
    """

    def __init__(self, port: int, deadline_s: float) -> None:
        self.limit = unproven_limit()
        self._port = port
        self._deadline_ticks = round(deadline_s / TICK_S)
        self._since: dict[int, int] = {}  # ticks, by the socket's inode
        self._ticks = self._lowest = 0
        self._busy = self._shut = False
        self._listener = -1
        self._connect = ctypes.CDLL(None).connect
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_soon(self._tick)

    def stop(self) -> None:
        """Reset those that are there, and look no more."""
        self._timer.cancel()
        self._look(deadline_ticks=0)

    def _tick(self) -> None:
        self._timer = self._loop.call_later(TICK_S, self._tick)
        self._ticks += 1
        lowest = _lowest_descriptor()
        if (
            self._busy
            or lowest is None
            or lowest > self._lowest + self.limit
            or self._ticks % LOOK_TICKS == 0
        ):
            soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            scarce = lowest is None or lowest > soft // DESCRIPTORS_PART
            self._look(0 if lowest is None else self._deadline_ticks, scarce)
            self._lowest = _lowest_descriptor() or self._lowest

    def _look(self, deadline_ticks: int, scarce: bool = False) -> None:
        """Reset those that waited for so long, and at once what cannot become a request.

        Where they are too many, only what looks like a request in part may wait, for a moment.
        """
        waiting = {number: one for number in _descriptors() if (one := self._untold(number))}
        self._since = {inode: self._since.get(inode, self._ticks) for inode, _ in waiting.values()}
        crowded = len(waiting) > self.limit
        self._shut_door(crowded and scarce)
        reset = 0
        for number, (inode, received) in waiting.items():
            spared = deadline_ticks
            if received > REQUEST_NBYTES:
                spared = 0
            elif crowded:
                spared = min(spared, GRACE_TICKS * (received > 0))
            if self._ticks - self._since[inode] >= spared:
                now = self._untold(number)
                if now and now[0] == inode:
                    # to AF_UNSPEC: this resets it, and leaves an error for UCX to find
                    reset += self._connect(number, bytes(16), 16) == 0
        self._busy = crowded or reset > 0
        if reset:
            logger.info("reset %d connections to the ucx port that asked for nothing", reset)

    def _shut_door(self, shut: bool) -> None:
        """Have the kernel drop what comes to the listener, or no longer."""
        if shut == self._shut or self._listener < 0:
            return
        # also a kernel may know no filters
        with contextlib.suppress(OSError), _borrowed(self._listener) as listener:
            program = struct.pack("@HP", 1, ctypes.addressof(_NOTHING))
            option = _SO_ATTACH_FILTER if shut else _SO_DETACH_FILTER
            listener.setsockopt(socket.SOL_SOCKET, option, program)
            self._shut = shut

    def _untold(self, number: int) -> tuple[int, int] | None:
        """Inode and received bytes of one of them."""
        try:
            with _borrowed(number) as sock:
                name = sock.getsockname()
                if not isinstance(name, tuple) or name[1] != self._port:
                    return None
                info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_NBYTES)
            (received,) = struct.unpack_from("=Q", info, _RECEIVED_AT)
            (sent,) = struct.unpack_from("=I", info, _SENT_AT)
            if info[0] == _STATE_LISTEN:
                self._listener = number
            if sent or info[0] in (_STATE_CLOSE, _STATE_LISTEN):
                return None
            return os.fstat(number).st_ino, received
        except (OSError, struct.error):  # closed meanwhile, no TCP, or an old kernel
            return None


@contextlib.contextmanager
def _borrowed(number: int) -> Iterator[socket.socket]:
    """A descriptor of others as a socket, if it is one.

    Not a copy of it: there may be no descriptor for one, and to close a copy of a file takes away
    the locks that this process has on the file.
    """
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, number)
    try:
        yield sock
    finally:
        sock.detach()


def _lowest_descriptor() -> int | None:
    """The lowest that is free, if one is."""
    try:
        number = os.eventfd(0)
    except OSError:
        return None
    os.close(number)
    return number


def _descriptors() -> Iterable[int]:
    """Those that may be open, without the one that lists them."""
    try:
        return [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return range(min(soft, SEARCHED_DESCRIPTORS))


class Acceptor:
    """Accepts connections, one per turn of the event loop, while there is room.

    Parameters
    ----------
    sock
        Listens, and does not block.
    room
        Waited for before each connection.
    handle
        Called with each connection and its address.
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
    """Accept the connections of a server of tornado's in its place.

    Its names are private; as of tornado 6.6.
    """
    for number, sock in server._sockets.items():
        server._handlers[number]()
        server._handlers[number] = Acceptor(sock, room, server._handle_connection).stop


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
