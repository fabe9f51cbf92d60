"""The logs of all jobs of a cluster as one: lines with time, node, worker and level, in order.

Lines that have no time of their own, such as what a program prints, stay behind the one before
them.
"""

from __future__ import annotations

import heapq
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from .folder import ClusterFolder

_STAMPED = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d{3}) - (.*)")
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
        clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.time))
        return " ".join([clock, self.node or "-", self.worker or "-", self.level or "-", self.text])

    def followed_by(self, text: str) -> LogLine:
        """Return the next line of the same file."""
        stamped = _STAMPED.fullmatch(text)
        if stamped is None:
            found = _OF_JOB.match(text)
            level = "ERROR" if text.startswith("hpcdask: error:") else ""
            return replace(self, node=found[1] if found else self.node, level=level, text=text)
        at = time.mktime(time.strptime(stamped[1], "%Y-%m-%d %H:%M:%S")) + int(stamped[2]) / 1000
        now = max(at, self.time)  # never before what stands above it
        if signed := _SIGNED.fullmatch(stamped[3]):
            return LogLine(now, *signed.groups())
        if plain := _PLAIN.fullmatch(stamped[3]):
            name, level, rest = plain.groups()
            return replace(self, time=now, level=level, text=f"{name} - {rest}")
        return replace(self, time=now, level="", text=stamped[3])


@dataclass
class LogFile:
    """A log that grows; `last` is its last line, before there are any what stands for it."""

    path: Path
    last: LogLine
    _offset: int = 0
    _rest: bytes = b""

    def read(self) -> list[LogLine]:
        """Return the whole lines that are new."""
        try:
            with self.path.open("rb") as file:  # a network's file shows them to who opens it anew
                file.seek(self._offset)
                content = file.read()
        except OSError:
            return []
        self._offset += len(content)
        *whole, self._rest = (self._rest + content).split(b"\n")
        lines = []
        for line in whole:
            self.last = self.last.followed_by(line.decode(errors="replace"))
            lines.append(self.last)
        return lines


@dataclass
class ClusterLogs:
    """All logs of a cluster's jobs."""

    folder: ClusterFolder
    _files: dict[Path, LogFile] = field(default_factory=dict)

    def read(self) -> list[LogLine]:
        """Return the lines that are new since the last call, merged in their order."""
        submitted = self.folder.submitted()
        for job_id, paths in self.folder.logs_of(submitted).items():
            for path in paths:
                if path not in self._files:
                    start = LogLine(submitted[job_id], "", f"job-{job_id}", "", "")
                    self._files[path] = LogFile(path, start)
        return merged(file.read() for file in self._files.values())


def merged(files: Iterable[list[LogLine]]) -> list[LogLine]:
    """Return the lines of several files in the order of their times; within a file as they are."""
    return list(heapq.merge(*files, key=lambda line: line.time))
