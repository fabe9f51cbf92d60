"""The logs of all jobs of a cluster as one: lines with time, node, worker and level, in order.

Lines that have no time of their own, such as what a program prints, stay behind the one before
them.
"""

from __future__ import annotations

import heapq
import re
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

from .folder import ClusterFolder

_STAMPED = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) - (.*)")
_SIGNED = re.compile(r"(\S+) - (\S+) - ([A-Z]+) - (\S+ - .*)")
_PLAIN = re.compile(r"(\S+) - ([A-Z]+) - (.*)")
_OF_JOB = re.compile(r"hpcdask: (?:error: )?job \S+ on ([^\s:]+):")


@dataclass(frozen=True)
class LogLine:
    """Line of a log. `time` is unix; node, worker (or its job) and level are empty if unknown."""

    time: float
    node: str
    worker: str
    level: str
    text: str

    def __str__(self) -> str:
        clock = str(datetime.fromtimestamp(int(self.time)))
        return " ".join([clock, self.node or "-", self.worker or "-", self.level or "-", self.text])

    def followed_by(self, text: str) -> LogLine:
        """Return the next line of the same file."""
        if (stamped := _STAMPED.fullmatch(text)) is None:
            found = _OF_JOB.match(text)
            level = "ERROR" if text.startswith("hpcdask: error:") else ""
            return replace(self, node=found[1] if found else self.node, level=level, text=text)
        now = max(self.time, datetime.fromisoformat(stamped[1]).timestamp())  # never earlier
        if signed := _SIGNED.fullmatch(stamped[2]):
            return LogLine(now, *signed.groups())
        if plain := _PLAIN.fullmatch(stamped[2]):
            return replace(self, time=now, level=plain[2], text=f"{plain[1]} - {plain[3]}")
        return replace(self, time=now, level="", text=stamped[2])


@dataclass
class GrowingFile:
    """A file that another machine writes."""

    path: Path
    _offset: int = 0

    def read(self) -> bytes:
        """Return what is new; a file of a network shows it only when it is opened anew."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                new = file.read()
        except OSError:
            return b""
        self._offset += len(new)
        return new


@dataclass
class _Log:
    """A job's log; `last` is its last line, before there are any what stands for it."""

    file: GrowingFile
    last: LogLine
    rest: bytes = b""

    def read(self) -> list[LogLine]:
        """Return the whole lines that are new."""
        *whole, self.rest = (self.rest + self.file.read()).split(b"\n")
        lines = []
        for line in whole:
            self.last = self.last.followed_by(line.decode(errors="replace"))
            lines.append(self.last)
        return lines


@dataclass
class ClusterLogs:
    """All logs of a cluster's jobs."""

    folder: ClusterFolder
    _logs: dict[Path, _Log] = field(default_factory=dict)

    def read(self) -> list[LogLine]:
        """Return the lines that are new since the last call, by their times."""
        submitted = self.folder.submitted()
        for job_id, paths in self.folder.logs_of(submitted).items():
            start = LogLine(submitted[job_id], "", f"job-{job_id}", "", "")
            for path in paths:
                self._logs.setdefault(path, _Log(GrowingFile(path), start))
        files = [log.read() for log in self._logs.values()]
        return list(heapq.merge(*files, key=lambda line: line.time))
