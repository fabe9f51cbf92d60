"""Reads all logs of a cluster or run as one, for hpcdask logs."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import ClassVar

from hpcdask.errors import SchedulerFileError, UsageError
from hpcdask.jobs.detached import named
from hpcdask.jobs.folder import ClusterFolder, list_clusters
from hpcdask.jobs.logs import ClusterLogs, LogLine, merged
from hpcdask.jobs.state import WAITING, counts
from hpcdask.node.nanny import LOGS

from .look import AT_ONCE, NODE_S, Target, find

#: Time, node, worker, level and text.
Record = tuple[float, str, str, str, str]
#: Stands for the scheduler among the names of workers.
SCHEDULER = "scheduler"


def reader_of(name: str | None, base: str | None) -> _Jobs | _Run:
    """Return the reader of the logs of a cluster by its name, or of a run by its file."""
    clusters = list_clusters(base)
    if exact := [one for one in clusters if one.name == name]:
        return _Jobs(exact[0])
    try:
        target = find(name, base)
    except UsageError:  # one that is over has logs, too
        if name and (ended := named(name, clusters)) is not None:
            return _Jobs(ended)
        raise
    living = [one for one in clusters if one.name == target.name]
    return _Jobs(living[0]) if living else _Run(target, name, base)


class _Jobs(ClusterLogs):
    """The logs of a cluster of jobs."""

    silent: ClassVar[list[str]] = []  # files, which all answer

    @property
    def of(self) -> str:
        """Whose logs they are."""
        return f"cluster {self.folder.name}"

    def waiting(self) -> str:
        """Return how many jobs wait, and for what; empty if none does."""
        return counts(job for job in self.folder.reports().values() if job.state in WAITING)

    def goes_on(self) -> bool:
        """Return whether there may be more."""
        return ClusterFolder.open(self.folder.path).lives() is not False


@dataclass
class _Door:
    """Position in a process's log: all until `since`, of later lines those `seen`."""

    since: float = 0.0
    seen: set[Record] = field(default_factory=set)

    def new(self, told: Iterable[Record], *, whole: bool) -> list[Record]:
        """Those that were not seen yet. An answer that is not `whole` is asked for again."""
        told = set(told)
        new = told - self.seen
        if whole:
            self.since = max((one[0] for one in told), default=self.since)
        self.seen = {one for one in self.seen | told if one[0] >= self.since}
        return sorted(new)


@dataclass
class _Run:
    """Logs that the processes of a run keep."""

    target: Target
    name: str | None
    base: str | None
    silent: list[str] = field(default_factory=list)
    _reached: int = 0
    _doors: defaultdict[str, _Door] = field(default_factory=lambda: defaultdict(_Door))

    @property
    def of(self) -> str:
        """Whose logs they are."""
        return self.target.name

    def waiting(self) -> str:
        """All ranks of a run are there."""
        return ""

    def goes_on(self) -> bool:
        """Return whether it is still there; workers that came meanwhile are asked, too."""
        with contextlib.suppress(SchedulerFileError, UsageError):
            self.target = find(self.name, self.base)
        return self._reached > 0

    def read(self) -> list[LogLine]:
        """Lines that are new, in order; `silent` has who does not answer."""
        records = asyncio.run(self._ask())
        return merged(_lines(*one) for one in sorted(records))

    async def _ask(self) -> list[Record]:
        from distributed.core import rpc

        room = asyncio.Semaphore(AT_ONCE)
        args = self.target.security.get_connection_args("client")

        async def ask(name: str, address: str) -> list[Record] | None:
            door = self._doors[address]
            with contextlib.suppress(Exception):
                async with room, asyncio.timeout(NODE_S), rpc(address, connection_args=args) as one:
                    if name == SCHEDULER:
                        lines = await one.get_logs(start=door.since, timestamps=True)
                        told = {"node": self.target.host, "lines": lines, "whole": True}
                    else:
                        told = await getattr(one, LOGS)(start=door.since)
                    records = [(at, told["node"], name, *rest) for at, *rest in told["lines"]]
                    return door.new(records, whole=told["whole"])
            return None

        doors = {SCHEDULER: self.target.address, **self.target.doors}
        answers = await asyncio.gather(*(ask(*one) for one in doors.items()))
        self.silent = [name for name, one in zip(doors, answers, strict=True) if one is None]
        self._reached = len(doors) - len(self.silent)
        return [record for answer in answers for record in answer or ()]


def _lines(at: float, node: str, worker: str, level: str, text: str) -> list[LogLine]:
    """A record, which may have several lines."""
    line = LogLine(at, node, worker, level, "")
    found = []
    for part in text.splitlines():
        line = line.followed_by(part)
        found.append(replace(line, time=at, level=level))
    return found
