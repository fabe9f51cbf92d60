"""The line between rank 0 and every other rank, open for the whole run.

Each rank dials rank 0 once and keeps the connection. What it sees and who it is goes up, what it
shall do comes down, and its end tells at once that a rank is gone, however it died. Messages are
lines of JSON, never pickles; with TLS both sides prove that they hold the cluster's keys.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Coroutine
from typing import Any

from tornado.netutil import bind_sockets

from hpcdask.node.channel import LINE_LIMIT, Message, MessageStream
from hpcdask.security.listening import Acceptor, Unproven, prepare


class ControlServer:
    """Rank 0's side: listens, and hands over each rank that knows the nonce.

    The nonce is made anew for each launch. `arrived` gets the first message after it.
    """

    def __init__(
        self, nonce: str, arrived: Callable[[Message, MessageStream], Coroutine[Any, Any, None]]
    ) -> None:
        prepare()
        self._nonce = nonce
        self._arrived = arrived
        self._sockets: list[socket.socket] = []
        self._acceptors: list[Acceptor] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._unproven = Unproven()

    async def listen(self, host: str, context: ssl.SSLContext | None) -> int:
        """Listen on a free port of `host` and return its number."""
        self._sockets = bind_sockets(0, address=host, backlog=4096)

        def handle(sock: socket.socket, address: Any) -> None:
            task = asyncio.create_task(self._accept(sock, context))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        self._acceptors = [Acceptor(one, self._unproven.room, handle) for one in self._sockets]
        return int(self._sockets[0].getsockname()[1])

    async def _accept(self, sock: socket.socket, context: ssl.SSLContext | None) -> None:
        loop, me = asyncio.get_running_loop(), asyncio.current_task()
        assert me is not None
        reader = asyncio.StreamReader(limit=LINE_LIMIT)
        protocol = asyncio.StreamReaderProtocol(reader)
        transport: Any = None
        try:
            with self._unproven.watch(me.cancel):
                transport, _ = await loop.connect_accepted_socket(
                    lambda: protocol, sock, ssl=context
                )
                writer = asyncio.StreamWriter(transport, protocol, reader, loop)
                channel = MessageStream(reader, writer)
                shown = await channel.receive()
        except (OSError, asyncio.CancelledError):
            (transport or sock).close()
            return
        if shown is None or shown.get("nonce") != self._nonce:
            channel.close()
            return
        _notice_dead_peers(writer)
        report = await channel.receive()  # who it is: a rank may first wait for its GPU's driver
        if report is None:
            channel.close()
            return
        await self._arrived(report, channel)

    def close(self) -> None:
        """Stop listening; channels stay."""
        for acceptor, sock in zip(self._acceptors, self._sockets, strict=True):
            acceptor.stop()
            sock.close()
        self._acceptors, self._sockets = [], []


async def connect_to_leader(
    host: str, port: int, context: ssl.SSLContext | None, nonce: str
) -> MessageStream:
    """Connect to rank 0. Raises OSError (ssl.SSLError included) when that fails."""
    reader, writer = await asyncio.open_connection(host, port, ssl=context, limit=LINE_LIMIT)
    _notice_dead_peers(writer)
    channel = MessageStream(reader, writer)
    channel.send(nonce=nonce)
    return channel


def _notice_dead_peers(writer: asyncio.StreamWriter) -> None:
    """Have the kernel end the connection of a node that vanished, after about 10 s."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 4)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 10_000)
