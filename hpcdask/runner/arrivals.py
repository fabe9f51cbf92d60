"""The ranks that have arrived at rank 0: what each reported, and the line to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from dataclasses import dataclass, field

from hpcdask.bootstrap import orders
from hpcdask.bootstrap.channel import Message, MessageStream
from hpcdask.bootstrap.orders import Signal, read
from hpcdask.bootstrap.ranks import Rank
from hpcdask.comm.fabric import Fabric
from hpcdask.errors import LaunchError, UsageError
from hpcdask.logs import by_host, numbered
from hpcdask.node.inventory import Inventory
from hpcdask.security.credentials import Credentials
from hpcdask.spec.records import Record

from .control import ControlServer, open_to_ranks
from .events import Events
from .protocol import WorkerFailed
from .rendezvous import Rendezvous

#: Seconds that the other ranks get to leave.
LEAVE_DEADLINE_S = 3.0


@dataclass(frozen=True)
class RankReport(Record):
    """Report of a rank: what it sees, or why it cannot take part: with `error` the rest is void."""

    rank: int
    host: str
    pid: int
    error: str = ""
    inventory: Inventory | None = None
    fabric: Fabric = field(default_factory=Fabric)


class Arrivals:
    """Rank 0's book of the ranks; what they tell becomes events.

    `reports` is by rank, with rank 0's own.
    """

    def __init__(self, rank: Rank, events: Events) -> None:
        self.reports: dict[int, RankReport] = {}
        self._rank, self._events = rank, events
        self._channels: dict[int, MessageStream] = {}
        self._server: ControlServer | None = None

    async def listen(self, host: str, credentials: Credentials, rendezvous: Rendezvous) -> None:
        """Accept the other ranks, and tell them where."""
        self._server, _ = await open_to_ranks(
            self._rank, host, credentials, rendezvous, self.arrived
        )

    def close(self) -> None:
        """Accept no more ranks; the lines stay."""
        if self._server is not None:
            self._server.close()

    async def arrived(self, message: Message, channel: MessageStream) -> None:
        """Note a rank by its report, and listen to it until it is gone."""
        report = RankReport.from_json(message)
        index = report.rank
        self.reports[index] = report
        self._channels[index] = channel
        self._events.happened("arrived", index)
        while (told := await channel.receive()) is not None:
            match read(told):
                case Signal(number):
                    self._events.happened("signal", number)
                case WorkerFailed(name, error):
                    self._events.happened("failed", (index, name, error))
        self._events.happened("lost", index)

    @property
    def missing(self) -> list[int]:
        """Those that did not come."""
        return sorted(set(range(self._rank.size)) - set(self.reports))

    @property
    def complete(self) -> bool:
        """Return whether all came; asked at each arrival, so that counting comes first."""
        return len(self.reports) >= self._rank.size and not self.missing

    def too_late(self, timeout: float) -> LaunchError:
        """The error that says which ranks did not come."""
        there = by_host(report.host for report in self.reports.values())
        return LaunchError(
            f"{numbered('rank', self.missing)} of {self._rank.size} did not arrive within "
            f"{timeout:g} s (there are {there}). See what those ranks printed and whether they "
            f"reach {self._rank.host}, or allow more with --timeout"
        )

    def inventories(self) -> dict[int, Inventory]:
        """Return what each rank sees. Raises UsageError where one cannot take part."""
        found = []
        for index, report in sorted(self.reports.items()):
            if report.inventory is None:
                where = f" (rank {index} on {report.host})" if self._rank.size > 1 else ""
                raise UsageError(f"{report.error}{where}")
            found.append(report.inventory)
        return {one.rank: one for one in found}

    def name(self, index: int) -> str:
        """A rank, for messages."""
        return f"rank {index} on {self.reports[index].host}"

    def send(self, index: int, message: orders.Message) -> None:
        """Tell a rank something, if it is there."""
        if index in self._channels:
            self._channels[index].send(**message.to_json())

    def send_all(self, message: orders.Message) -> None:
        """Tell all others something."""
        for index in self._channels:
            self.send(index, message)

    def forget(self, index: int) -> None:
        """It is gone."""
        self._channels.pop(index, None)

    async def all_gone(self, more_s: float = 0.0) -> None:
        """Wait until every other rank has left: a launcher reports the ranks that still live."""
        there = set(self._channels)
        deadline = time.monotonic() + LEAVE_DEADLINE_S + more_s
        with contextlib.suppress(TimeoutError):
            while there:
                event = await self._events.get(deadline)
                if event.what == "lost":
                    there.discard(event.value)
        # Their sockets close a moment before the launcher reaps them, and it reports those
        # that it still has when this rank fails. /proc has no event for that.
        mates = [
            report.pid
            for index, report in self.reports.items()
            if index != 0 and report.host == self._rank.host
        ]
        deadline = time.monotonic() + LEAVE_DEADLINE_S
        while any(map(_exists, mates)) and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def _exists(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")
