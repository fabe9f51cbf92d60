"""The link between rank 0 and every other rank, open for the whole run.

Each rank dials rank 0 once and keeps the connection. What it sees and who it is goes up, what it
shall do comes down, and its end tells at once that a rank is gone, however it died. Messages are
lines of JSON, never pickles; with TLS both sides prove that they hold the cluster's keys.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import ssl
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from distributed.comm.tcp import set_tcp_timeout
from tornado import netutil

from hpcdask.bootstrap import orders
from hpcdask.bootstrap.orders import LINE_LIMIT, Json, MessageStream
from hpcdask.bootstrap.ranks import Rank
from hpcdask.errors import LaunchError, UsageError
from hpcdask.logs import by_host, numbered
from hpcdask.node.placement import Inventory
from hpcdask.process import raise_descriptor_limit
from hpcdask.security.credentials import Credentials, to_security

from .protocol import Events, RankArrived, RankLost, RankReport
from .rendezvous import Rendezvous, RendezvousInfo

#: Seconds to dial one address of rank 0.
DIAL_DEADLINE_S = 5.0
#: Seconds that a launcher gets to reap its ranks: MPICH's waits for all of a node.
REAP_DEADLINE_S = 1.0
Arrived = Callable[[Json, MessageStream], Coroutine[Any, Any, None]]


class Listener:
    """Rank 0's port, which hands over each rank that knows the nonce, with its first message."""

    def __init__(self, nonce: str, arrived: Arrived) -> None:
        raise_descriptor_limit()
        self._nonce, self._arrived = nonce, arrived
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
        report = await channel.receive()  # a rank may first wait for its GPU's driver
        if report is None:
            channel.close()
            return
        await self._arrived(report, channel)

    def close(self) -> None:
        """Stop listening; connections stay."""
        for server in self._servers:
            server.close()


async def publish(
    rank: Rank,
    host: str,
    credentials: Credentials,
    rendezvous: Rendezvous,
    arrived: Arrived,
    others: Sequence[str] = (),
) -> tuple[Listener, int]:
    """Let the other ranks in, and tell them where; return the listener and its port.

    `others` are further addresses of this node, which are tried where `host` does not answer.
    """
    nonce = secrets.token_hex(16)
    listener = Listener(nonce, arrived)
    everywhere = "::" if ":" in host else "0.0.0.0"
    context = None
    if credentials:
        context = to_security(credentials).get_listen_args("scheduler")["ssl_context"]
    port = await listener.listen(everywhere if others else host, context)
    info = RendezvousInfo(host, port, rank.host, nonce, credentials, [*others])
    rendezvous.publish(info)
    return listener, port


class Link:
    """Rank 0's connections to the other ranks; their messages, arrivals and ends become events.

    `reports` is by rank, with rank 0's own.
    """

    def __init__(self, rank: Rank, events: Events) -> None:
        self.reports: dict[int, RankReport] = {}
        self._rank, self._events = rank, events
        self._channels: dict[int, MessageStream] = {}
        self._listener: Listener | None = None

    async def listen(self, host: str, credentials: Credentials, rendezvous: Rendezvous) -> None:
        """Accept the other ranks, and tell them where."""
        self._listener, _ = await publish(self._rank, host, credentials, rendezvous, self._serve)

    def close(self) -> None:
        """Accept no more ranks; connections stay."""
        if self._listener is not None:
            self._listener.close()

    async def _serve(self, message: Json, channel: MessageStream) -> None:
        """Note a rank by its report, and listen to it until it is gone."""
        report = RankReport.from_json(message)
        self.reports[report.rank] = report
        self._channels[report.rank] = channel
        self._events.put(RankArrived(report.rank))
        while (received := await channel.receive()) is not None:
            self._events.put(orders.read(received))
        del self._channels[report.rank]
        self._events.put(RankLost(report.rank))

    @property
    def complete(self) -> bool:
        """Return whether all ranks have arrived."""
        return len(self.reports) == self._rank.size

    @property
    def missing(self) -> list[int]:
        """Return the ranks that have not arrived."""
        return sorted(set(range(self._rank.size)) - set(self.reports))

    def too_late(self, timeout: float) -> LaunchError:
        """Return the error that says which ranks did not come."""
        there = by_host(report.host for report in self.reports.values())
        return LaunchError(
            f"{numbered('rank', self.missing)} of {self._rank.size} did not arrive within "
            f"{timeout:g} s (there are {there}). See what those ranks printed and whether they "
            f"reach {self._rank.host}, or allow more with --timeout"
        )

    def inventories(self) -> dict[int, Inventory]:
        """Return what each rank sees. Raises UsageError where one cannot take part."""
        found = {}
        for index, report in sorted(self.reports.items()):
            if report.inventory is None:
                where = f" ({self.name(index)})" if self._rank.size > 1 else ""
                raise UsageError(f"{report.error}{where}")
            found[index] = report.inventory
        return found

    def name(self, index: int) -> str:
        """Return the name of a rank for messages."""
        return f"rank {index} on {self.reports[index].host}"

    def send(self, index: int, message: orders.Message) -> None:
        """Send a message to a rank, if it is there."""
        if index in self._channels:
            self._channels[index].send(**message.to_json())

    def send_all(self, message: orders.Message) -> None:
        """Send a message to all other ranks."""
        for index in self._channels:
            self.send(index, message)

    async def wait_for_departure(self, seconds: float) -> None:
        """Wait until every other rank has left: a launcher reports the ranks that still live.

        Ranks of this node are awaited a little longer, until the launcher has reaped them.
        """
        deadline = time.monotonic() + seconds
        while self._channels and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        reports = self.reports.items()
        mates = [one.pid for index, one in reports if index and one.host == self._rank.host]
        deadline = time.monotonic() + REAP_DEADLINE_S
        while any(map(_exists, mates)) and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.005)  # /proc has no events


def _exists(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


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
    """Make the kernel end the connection of a node that vanished, as it does Dask's own."""
    sock = writer.get_extra_info("socket")
    set_tcp_timeout(SimpleNamespace(closed=writer.is_closing, socket=sock))
