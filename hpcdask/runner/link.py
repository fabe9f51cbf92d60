"""The link between rank 0 and every other rank, open for the whole run, and what it carries.

Rank 0 publishes a note in a file: address and credentials. Each other rank connects once and keeps
the connection, whose end tells at once that a rank is gone. Messages are lines of JSON; with TLS
both sides prove that they hold the cluster's keys. On rank 0 they become events in one queue, with
those of the scheduler's process.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import ssl
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import dask.config
from distributed.comm.tcp import set_tcp_timeout
from tornado import netutil

from hpcdask.bootstrap import orders
from hpcdask.bootstrap.environment import own_process
from hpcdask.bootstrap.orders import Json, Message
from hpcdask.bootstrap.ranks import Rank
from hpcdask.bootstrap.stream import LINE_LIMIT, MessageStream
from hpcdask.errors import HpcdaskError, LaunchError, UsageError
from hpcdask.logs import by_host, numbered
from hpcdask.node.placement import Inventory, WorkerPlacement
from hpcdask.process import raise_descriptor_limit
from hpcdask.security import private
from hpcdask.security.credentials import Credentials, to_security
from hpcdask.spec.records import Record

if TYPE_CHECKING:
    from hpcdask.node.host_agent import HostAgent

LOOPBACK = "127.0.0.1"
#: The file with the note.
NOTE = "note.json"
#: Seconds to connect to one address of rank 0.
DIAL_DEADLINE_S = 5.0
#: Seconds that a launcher gets to reap its ranks: MPICH's waits for all of a node.
REAP_DEADLINE_S = 1.0
Arrived = Callable[[Json, MessageStream], Coroutine[Any, Any, None]]
#: Messages, `Loss`, and whatever else happens to rank 0.
Events = asyncio.Queue[Message]


@dataclass(frozen=True)
class RankReport(Message):
    """Report of a rank: what it sees, or why it cannot take part: with `error` the rest is void."""

    rank: int
    host: str
    pid: int
    error: str = ""
    inventory: Inventory | None = None

    @classmethod
    def of(cls, agent: HostAgent, problem: HpcdaskError | None = None) -> RankReport:
        """Look at an agent's node, unless there is a problem already."""
        who = agent.rank.index, agent.host, own_process()
        if problem is None:
            try:
                return cls(*who, inventory=agent.look())
            except HpcdaskError as error:
                problem = error
        return cls(*who, error=str(problem))


@dataclass(frozen=True)
class StartWorkers(Message):
    scheduler: str
    placements: list[WorkerPlacement]


@dataclass(frozen=True)
class EndRun(Message):
    """Order to leave; workers get `seconds` to close."""

    seconds: float


@dataclass(frozen=True)
class Loss(Message):
    """Loss of a `worker` of a `rank`, of a whole rank, or of the scheduler."""

    text: str
    rank: int | None = None
    worker: str = ""

    @classmethod
    def of_worker(cls, rank: Rank, worker: str, error: str) -> Loss:
        """Return the loss of a worker that did not start."""
        text = (
            f"a worker of rank {rank.index} on {rank.host} did not start: {error.rstrip('.')}. "
            f"See its lines above, and hpcdask doctor there"
        )
        return cls(text, rank.index, worker)


@dataclass(frozen=True)
class EndSoon(Message):
    """Order to log no more, and to tell what the GPUs did."""


@dataclass(frozen=True)
class SchedulerStarted(Message):
    """Addresses of scheduler and dashboard, or the reason why there are none."""

    address: str = ""
    dashboard_host: str = ""
    dashboard_port: int = 0
    error: str = ""


@dataclass(frozen=True)
class WorkersChanged(Message):
    """Names of workers that came, with their nannies' addresses, or went."""

    came: dict[str, str]
    gone: list[str]


@dataclass(frozen=True)
class WorkerWarm(Message):
    found: dict[str, Any]


@dataclass(frozen=True)
class GpuUsageTold(Message):
    """Use of the GPUs, in lines for the user; none where none was sampled."""

    lines: list[str]


@dataclass(frozen=True)
class SchedulerClosed(Message):
    """End of the scheduler in good order."""


@dataclass(frozen=True)
class RendezvousInfo(Record):
    """Rank 0's note: addresses of its node, of which the first is tried first, and credentials."""

    address: str
    port: int
    host: str
    credentials: Credentials
    others: list[str] = field(default_factory=list)


class Rendezvous:
    """Rank 0's port, and its note in a private folder that is named after the launch.

    The launch's id is of this launch alone: an earlier life of a requeued job has another. For the
    ranks of one node the folder is in the temporary folder; else it is in the home folder, or where
    Dask's configuration has ``hpcdask.shared-directory``.
    """

    def __init__(self, rank: Rank) -> None:
        base = tempfile.gettempdir()
        if not rank.one_node:
            base = dask.config.get("hpcdask.shared-directory", None) or os.path.expanduser("~")
        launch = hashlib.sha256(rank.launch_id.encode()).hexdigest()[:16]
        self.folder = os.path.join(os.path.abspath(base), f".hpcdask-{os.geteuid()}-{launch}")
        self._rank = rank
        self._server: asyncio.Server | None = None

    async def open(
        self, arrived: Arrived, credentials: Credentials, host: str, others: Sequence[str] = ()
    ) -> int:
        """Listen, tell the other ranks where, and return the port; `others` are more addresses.

        Each rank that connects is handed to `arrived`, with its first message.
        """

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            channel = MessageStream(reader, writer)
            _notice_dead_peers(writer)
            report = await channel.receive()  # a rank may first wait for its GPU's driver
            if report is None:
                channel.close()
            else:
                await arrived(report, channel)

        raise_descriptor_limit()
        everywhere = "::" if ":" in host else "0.0.0.0"
        (sock,) = netutil.bind_sockets(0, address=everywhere if others else host)
        self._server = await asyncio.start_server(
            accept,
            sock=sock,
            ssl=to_security(credentials).get_listen_args("scheduler")["ssl_context"],
            limit=LINE_LIMIT,
            backlog=4096,
        )
        port = int(sock.getsockname()[1])
        self.publish(RendezvousInfo(host, port, self._rank.host, credentials, [*others]))
        return port

    def publish(self, info: RendezvousInfo) -> None:
        """Write the note, over that of a life that left one."""
        text = json.dumps(info.to_json())
        try:
            private.make_folder(self.folder)
            private.write_private(os.path.join(self.folder, NOTE), text)
        except OSError as error:
            raise LaunchError(
                f"the ranks cannot meet in {self.folder}: {error.strerror}. It must be a place "
                f"that all nodes share and you can write: set TMPDIR or HOME, or "
                f"hpcdask.shared-directory in Dask's configuration"
            ) from None

    def fetch(self) -> RendezvousInfo | None:
        """Return the note, or None while this launch has none."""
        with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):  # ESTALE, too
            os.listdir(os.path.dirname(self.folder))  # makes NFS look again
            text = private.read(os.path.join(self.folder, NOTE))
            return RendezvousInfo.from_json(json.loads(text))
        return None

    def close(self) -> None:
        """Stop listening and remove the note; connections stay."""
        if self._server is not None:
            self._server.close()
        private.remove(self.folder)


class Link:
    """Rank 0's connections to the others, whose messages, arrivals and ends become events."""

    def __init__(self, rank: Rank, events: Events) -> None:
        self.reports: dict[int, RankReport] = {}
        self._rank, self._events = rank, events
        self._channels: dict[int, MessageStream] = {}

    async def serve(self, message: Json, channel: MessageStream) -> None:
        """Note a rank by its report, and listen to it until it is gone."""
        report = orders.read(message)
        assert isinstance(report, RankReport)
        self._channels[report.rank] = channel
        self.note(report)
        async for received in channel:
            self._events.put_nowait(received)
        del self._channels[report.rank]
        what = f"rank {report.rank} on {report.host} is gone: it was killed or its node failed"
        self._events.put_nowait(Loss(what, report.rank))

    def note(self, report: RankReport) -> None:
        """Note the arrival of a rank."""
        self.reports[report.rank] = report
        self._events.put_nowait(report)

    @property
    def complete(self) -> bool:
        return len(self.reports) == self._rank.size

    def too_late(self, timeout: float) -> LaunchError:
        there = by_host(report.host for report in self.reports.values())
        missing = sorted(set(range(self._rank.size)) - set(self.reports))
        return LaunchError(
            f"{numbered('rank', missing)} of {self._rank.size} did not arrive within "
            f"{timeout:g} s (there are {there}). See what those ranks printed and whether they "
            f"reach {self._rank.host}, or allow more with --timeout"
        )

    def inventories(self) -> dict[int, Inventory]:
        """Return what each rank sees. Raises UsageError where one cannot take part."""
        found = {}
        for index, report in sorted(self.reports.items()):
            if report.inventory is None:
                where = f" (rank {index} on {report.host})" if self._rank.size > 1 else ""
                raise UsageError(f"{report.error}{where}")
            found[index] = report.inventory
        return found

    def send(self, index: int, message: Message) -> None:
        """Send a message to another rank that is there."""
        if index in self._channels:
            self._channels[index].send(message)

    async def wait_for_departure(self, seconds: float) -> None:
        """Wait until the others have left, and here were reaped: a launcher reports who lives."""
        deadline = time.monotonic() + seconds
        while self._channels and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        reports = self.reports.items()
        mates = [f"/proc/{r.pid}" for index, r in reports if index and r.host == self._rank.host]
        deadline = time.monotonic() + REAP_DEADLINE_S
        while any(map(os.path.exists, mates)) and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.005)  # /proc has no events


async def find_leader(
    rank: Rank, timeout: float
) -> tuple[RendezvousInfo, MessageStream, str, dict[str, str]]:
    """Read notes until one leads to rank 0, or raise LaunchError: it may be of an earlier life.

    Return the note, the connection, its address, and why other addresses of the note failed.
    """
    rendezvous = Rendezvous(rank)
    deadline = time.monotonic() + timeout
    heard: RendezvousInfo | None = None
    failed: dict[str, str] = {}
    pause = 0.02
    while time.monotonic() < deadline:
        if (info := rendezvous.fetch()) is not None:
            heard, failed = info, {}
            for address in (info.address, *info.others):
                try:
                    return info, await dial(info, address), address, failed
                except TimeoutError:
                    failed[address] = f"no answer in {DIAL_DEADLINE_S:g} s"
                except ssl.SSLError as error:
                    failed[address] = str(error)
                except OSError as error:  # whose own text is asyncio's, without a reason
                    failed[address] = os.strerror(error.errno or 0)
        await asyncio.sleep(pause)
        pause = min(pause * 1.1, 0.5)  # a shared file system has better things to do
    me = f"rank {rank.index} of {rank.size} on {rank.host}"
    if heard is None:
        raise LaunchError(
            f"{me} heard nothing of rank 0 within {timeout:g} s. See that rank 0 starts, or allow "
            f"more with --timeout"
        )
    tried = ", ".join(f"{address}:{heard.port}: {why}" for address, why in failed.items())
    raise LaunchError(
        f"{me} got no answer from rank 0 on {heard.host} within {timeout:g} s ({tried}): the note "
        f"is stale, or the network between the nodes is closed. --interface chooses another network"
    )


async def dial(info: RendezvousInfo, address: str) -> MessageStream:
    """Connect to rank 0. Raises OSError (ssl.SSLError and TimeoutError included)."""
    arguments = to_security(info.credentials).get_connection_args("worker")
    async with asyncio.timeout(DIAL_DEADLINE_S):
        reader, writer = await asyncio.open_connection(
            address, info.port, ssl=arguments["ssl_context"], limit=LINE_LIMIT
        )
    _notice_dead_peers(writer)
    return MessageStream(reader, writer)


def _notice_dead_peers(writer: asyncio.StreamWriter) -> None:
    """Make the kernel end the connection of a node that vanished, as it does Dask's own."""
    sock = writer.get_extra_info("socket")
    set_tcp_timeout(SimpleNamespace(closed=writer.is_closing, socket=sock))
