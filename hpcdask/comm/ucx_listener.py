"""Connections that UCX has accepted and tells nobody of: few of them wait, and not for long."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import resource
import socket
import struct
from collections.abc import Iterable, Iterator

logger = logging.getLogger("distributed.hpcdask.listening")
#: Connections that may be unproven at a time; never more than this part of the descriptors.
UNPROVEN_LIMIT = 512
DESCRIPTORS_PART = 4

#: Seconds from tick to tick of `SilentConnections`, which looks on every so manyth, or as soon as
#: something is odd; and ticks after which a connection may be closed where there are too many.
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


def unproven_limit() -> int:
    """Connections to a port that may be unproven at a time."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = UNPROVEN_LIMIT if soft == resource.RLIM_INFINITY else soft // DESCRIPTORS_PART
    return max(1, min(UNPROVEN_LIMIT, few))


class SilentConnections:
    """The connections to a port that UCX has accepted, and tells nobody of.

    It tells of one when it has read a whole request, for which it waits without end; and of one
    that sent more than a request can have it reads nothing more, but asks for it again and again.
    They are known by their port, and by that nothing was ever sent to them: UCX answers when it has
    told. A reset is the one thing after which it closes all of them. Where they use up the
    descriptors, the kernel drops what comes to the port for a moment, and others try again: UCX
    ends the process if it has no descriptor for a connection of somebody who asks properly.

    They are reset after ``deadline_s``, in which a process that was busy or stopped for long counts
    `TICK_S`.
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
