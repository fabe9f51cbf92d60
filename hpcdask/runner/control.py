"""The line between rank 0 and every other rank, open for the whole run.

Each rank dials rank 0 once and keeps the connection. What it sees and who it is goes up, what it
shall do comes down, and its end tells at once that a rank is gone, however it died. Messages are
lines of JSON, never pickles; with TLS both sides prove that they hold the cluster's keys.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import ssl
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple

import dask.config
from dask.utils import parse_timedelta
from tornado import netutil

from hpcdask.bootstrap.channel import LINE_LIMIT, Message, MessageStream
from hpcdask.bootstrap.ranks import Rank
from hpcdask.errors import LaunchError
from hpcdask.node.preload import SILENCE
from hpcdask.process import raise_descriptor_limit
from hpcdask.security.credentials import Credentials, to_security

from .rendezvous import Rendezvous, RendezvousInfo

#: Seconds to dial one address of rank 0.
DIAL_DEADLINE_S = 5.0
Arrived = Callable[[Message, MessageStream], Coroutine[Any, Any, None]]


class ControlServer:
    """Rank 0's side: listens, and hands over each rank that knows the nonce.

    The nonce is made anew for each launch. `arrived` gets the first message after it.
    """

    def __init__(self, nonce: str, arrived: Arrived) -> None:
        raise_descriptor_limit()
        self._nonce = nonce
        self._arrived = arrived
        self._servers: list[asyncio.Server] = []

    async def listen(self, host: str, context: ssl.SSLContext | None) -> int:
        """Listen on a free port of `host` and return its number."""
        for sock in (sockets := netutil.bind_sockets(0, address=host)):
            server = await asyncio.start_server(
                self._accept, sock=sock, ssl=context, limit=LINE_LIMIT, backlog=4096
            )
            self._servers.append(server)
        return int(sockets[0].getsockname()[1])

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel = MessageStream(reader, writer)
        shown = await channel.receive()
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
        for server in self._servers:
            server.close()


async def open_to_ranks(
    rank: Rank,
    host: str,
    credentials: Credentials,
    rendezvous: Rendezvous,
    arrived: Arrived,
    others: Sequence[str] = (),
) -> tuple[ControlServer, int]:
    """Rank 0: let the other ranks in, and tell them where; returns the port, too.

    `others` are further addresses of this node, which are tried where `host` does not answer.
    """
    nonce = secrets.token_hex(16)
    server = ControlServer(nonce, arrived)
    everywhere = "::" if ":" in host else "0.0.0.0"
    context = None
    if credentials:
        context = to_security(credentials).get_listen_args("scheduler")["ssl_context"]
    port = await server.listen(everywhere if others else host, context)
    info = RendezvousInfo(host, port, rank.host, nonce, credentials, [*others])
    rendezvous.publish(info)
    return server, port


class Reached(NamedTuple):
    """Rank 0, reached at an address that its note names; `failed` says why not at others."""

    info: RendezvousInfo
    channel: MessageStream
    address: str
    failed: dict[str, str]


async def find_leader(
    rank: Rank,
    rendezvous: Rendezvous,
    timeout: float,
    unreachable: Callable[[RendezvousInfo, Mapping[str, str]], str],
    *,
    tls: bool = True,
) -> Reached:
    """Read notes until one leads to rank 0: a note may be left over from an earlier life.

    Raises LaunchError after `timeout` seconds; where there was a note, `unreachable` says what is
    wrong, by that and by address why it did not answer. With `tls`, a note has to have keys.
    """
    deadline = time.monotonic() + timeout
    heard: RendezvousInfo | None = None
    failed: dict[str, str] = {}
    pause = 0.02
    while time.monotonic() < deadline:
        info = rendezvous.fetch()
        if info is not None:
            if tls and not info.credentials:
                raise LaunchError(
                    "rank 0's note has no keys, though --no-tls is not among this rank's options: "
                    "give all ranks the same options"
                )
            heard, failed = info, {}
            for address in (info.address, *info.others):
                try:
                    return Reached(info, await _dial(info, address), address, failed)
                except TimeoutError:
                    failed[address] = f"no answer in {DIAL_DEADLINE_S:g} s"
                except OSError as error:
                    failed[address] = error.strerror or str(error)
                    if failed[address].startswith("Connect call failed"):  # asyncio's, no reason
                        failed[address] = os.strerror(error.errno or 0)
        await asyncio.sleep(pause)
        pause = min(pause * 1.1, 0.5)  # a shared file system has better things to do
    me = f"rank {rank.index} of {rank.size} on {rank.host}"
    if heard is None:
        raise LaunchError(
            f"{me} heard nothing of rank 0 within {timeout:g} s. See that rank 0 starts, or allow "
            f"more with --timeout"
        )
    raise LaunchError(f"{me} {unreachable(heard, failed)}")


async def _dial(info: RendezvousInfo, address: str) -> MessageStream:
    context = None
    if info.credentials:
        arguments = to_security(info.credentials).get_connection_args("worker")
        context = arguments["ssl_context"]
    async with asyncio.timeout(DIAL_DEADLINE_S):
        return await connect_to_leader(address, info.port, context, info.nonce)


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
    """Make the kernel end the connection of a node that vanished.

    The limit is Dask's ``distributed.comm.timeouts.tcp``, which holds for its own connections too.
    """
    seconds = parse_timedelta(dask.config.get("distributed.comm.timeouts.tcp", SILENCE))
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # the limit counts from the last probe that was answered, so few probes make short losses long
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, int(seconds // 10)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 10)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * seconds))
