"""Reader of all logs of a cluster or run as one, for hpcdask logs."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import ClassVar

from hpcdask.errors import SchedulerFileError, UsageError
from hpcdask.jobs.detached import named
from hpcdask.jobs.folder import ClusterFolder, list_clusters
from hpcdask.jobs.logs import ClusterLogs, LogLine, merged
from hpcdask.jobs.state import WAITING, counts
from hpcdask.node.nanny import LOGS

from .look import AT_ONCE, NODE_S, Target, ask, find

#: Time, node, worker, level and text.
Record = tuple[float, str, str, str, str]
#: Name of the scheduler among those of workers.
SCHEDULER = "scheduler"


def reader_of(name: str | None, base: str | None) -> _Jobs | _Run:
    """Return the reader of the logs of a cluster by its name, or of a run by its file."""
    clusters = list_clusters(base)
    if exact := [one for one in clusters if one.name == name]:
        return _Jobs(exact[0])
    try:
        target = find(name, base)
    except UsageError:  # a cluster that is over has logs, too
        if name and (ended := named(name, clusters)) is not None:
            return _Jobs(ended)
        raise
    living = [one for one in clusters if one.name == target.name]
    return _Jobs(living[0]) if living else _Run(target, name, base)


class _Jobs(ClusterLogs):
    """Logs of a cluster of jobs."""

    silent: ClassVar[list[str]] = []  # files, which all answer

    @property
    def of(self) -> str:
        """Name of the cluster."""
        return f"cluster {self.folder.name}"

    def waiting(self) -> str:
        """Return the number of jobs that wait, and for what; empty if none does."""
        return counts(job for job in self.folder.report().jobs if job.state in WAITING)

    def goes_on(self) -> bool:
        """Return whether there may be more."""
        return ClusterFolder.open(self.folder.path).lives() is not False


@dataclass
class _Log:
    """Log of a process: read entirely until `since`, and of later records those `seen`."""

    since: float = 0.0
    seen: set[Record] = field(default_factory=set)

    def new(self, records: set[Record], *, whole: bool) -> set[Record]:
        """Return the records that were not seen yet; ask again for those not `whole`."""
        new = records - self.seen
        if whole:
            self.since = max((one[0] for one in records), default=self.since)
        self.seen = {one for one in self.seen | records if one[0] >= self.since}
        return new


@dataclass
class _Run:
    """Logs that the processes of a run keep; `silent` are those that do not answer."""

    target: Target
    name: str | None
    base: str | None
    silent: list[str] = field(default_factory=list)
    _reached: int = 0
    _logs: defaultdict[str, _Log] = field(default_factory=lambda: defaultdict(_Log))

    @property
    def of(self) -> str:
        """Name of the run."""
        return self.target.name

    def waiting(self) -> str:
        """Return nothing: all ranks of a run are there."""
        return ""

    def goes_on(self) -> bool:
        """Return whether the run is still there, and find the workers that came meanwhile."""
        with contextlib.suppress(SchedulerFileError, UsageError):
            self.target = find(self.name, self.base)
        return self._reached > 0

    def read(self) -> list[LogLine]:
        """Return the lines that are new, in order."""
        return merged(_lines(*one) for one in sorted(asyncio.run(self._ask_all())))

    async def _ask_all(self) -> set[Record]:
        room = asyncio.Semaphore(AT_ONCE)
        processes = {SCHEDULER: self.target.address, **self.target.doors}
        answers = await asyncio.gather(*(self._ask(*one, room) for one in processes.items()))
        self.silent = [name for name, one in zip(processes, answers, strict=True) if one is None]
        self._reached = len(processes) - len(self.silent)
        return set().union(*filter(None, answers))

    async def _ask(self, name: str, address: str, room: asyncio.Semaphore) -> set[Record] | None:
        """Return the new records of a process; None if it does not answer."""
        log = self._logs[address]
        start = {"start": log.since}
        if name == SCHEDULER:
            start["timestamps"] = True
        operation = "get_logs" if name == SCHEDULER else LOGS
        answer, problem = await ask(self.target, address, NODE_S, room, operation, **start)
        if problem:
            return None
        if name == SCHEDULER:
            answer = {"node": self.target.host, "lines": answer, "whole": True}
        records = {(at, answer["node"], name, *rest) for at, *rest in answer["lines"]}
        return log.new(records, whole=answer["whole"])


def _lines(at: float, node: str, worker: str, level: str, text: str) -> list[LogLine]:
    """Return the lines of a record."""
    line = LogLine(at, node, worker, level, "")
    found = []
    for part in text.splitlines():
        line = line.followed_by(part)
        found.append(replace(line, time=at, level=level))
    return found
