"""Reader of all logs of a cluster or run as one, for hpcdask logs."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

from hpcdask.errors import SchedulerFileError, UsageError
from hpcdask.jobs.detached import named
from hpcdask.jobs.folder import ClusterFolder, list_clusters
from hpcdask.jobs.logs import ClusterLogs, LogLine, merged
from hpcdask.jobs.state import counts
from hpcdask.logs import say
from hpcdask.node.nanny import LOGS
from hpcdask.queues.job_state import WAITING

from .look import SCHEDULER, WORKER, Request, Target, ask_all, find

#: Time, node, worker, level and text.
Record = tuple[float, str, str, str, str]


def reader_of(name: str | None, base: str | None) -> JobLogs | RunLogs:
    """Return the reader of the logs of a cluster, also of one that is over, or of a run."""
    clusters = list_clusters(base)
    try:
        target = find(name, base)
    except UsageError:
        if name and (ended := named(name, clusters)):
            return JobLogs(ended)
        raise
    if name is None:
        say(f"the logs of {target.name}")
    for folder in clusters:
        if folder.name == target.name:
            return JobLogs(folder)
    return RunLogs(target, name, base)


class JobLogs(ClusterLogs):
    """Logs of a cluster of jobs: files, of which none is `silent`."""

    silent: tuple[str, ...] = ()

    def waiting(self) -> str:
        """Return the number of jobs that wait, and for what; empty if none does."""
        return counts(job for job in self.folder.report().jobs if job.state in WAITING)

    def goes_on(self) -> bool:
        """Return whether there may be more."""
        return ClusterFolder.open(self.folder.path).lives() is not False


@dataclass
class RunLogs:
    """Logs that the processes of a run keep; `silent` are those that do not answer.

    Each was read entirely until `since`; of later records those are in `seen` that were returned.
    """

    target: Target
    word: str | None
    base: str | None
    silent: tuple[str, ...] = ()
    _since: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    _seen: defaultdict[str, set[Record]] = field(default_factory=lambda: defaultdict(set))

    def waiting(self) -> str:
        """Return nothing: all ranks of a run are there."""
        return ""

    def goes_on(self) -> bool:
        """Return whether the run is still there, and find the workers that came meanwhile."""
        is_reached = len(self.silent) < len(self.target.addresses)
        with contextlib.suppress(SchedulerFileError, UsageError):
            self.target = find(self.word, self.base)
        return is_reached

    def read(self) -> list[LogLine]:
        """Return the lines that are new, in order."""
        requests: dict[str, Request] = {
            name: (LOGS, {"start": self._since[name]}) for name in self.target.addresses
        }
        requests[SCHEDULER] = "get_logs", {"start": self._since[SCHEDULER], "timestamps": True}
        answers = asyncio.run(ask_all(self.target, requests))
        self.silent = tuple(name for name, (_, error) in answers.items() if error)
        told = {name: answer for name, (answer, error) in answers.items() if not error}
        if SCHEDULER in told:
            lines = told[SCHEDULER]
            told[SCHEDULER] = {"node": self.target.host, "lines": lines, "whole": True}
        new = set().union(*(self._new(name, **answer) for name, answer in told.items()))
        return merged(_lines(*record) for record in sorted(new))

    def _new(self, name: str, node: str, lines: Any, whole: bool) -> set[Record]:
        """Return the records that were not seen yet; ask again for those not `whole`."""
        worker, seen = name.removeprefix(WORKER), self._seen[name]
        records = {(at, node, worker, level, text) for at, level, text in lines}
        self._seen[name] = records if whole else seen | records
        if whole:
            self._since[name] = max((at for at, *_ in records), default=self._since[name])
        return records - seen


def _lines(at: float, node: str, worker: str, level: str, text: str) -> list[LogLine]:
    """Return the lines of a record."""
    start = LogLine(at, node, worker, level, "")
    _, *found = accumulate(text.splitlines(), LogLine.followed_by, initial=start)
    return [replace(line, time=at, level=level) for line in found]
