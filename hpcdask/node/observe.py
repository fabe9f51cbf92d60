"""Observation of a process, also a stuck one, by the stacks that it writes at a signal."""

from __future__ import annotations

import contextlib
import linecache
import os
import re
import time
from dataclasses import dataclass, field

from hpcdask.process import STACKS_SIGNAL, process_start, process_status, stacks_file
from hpcdask.spec.records import Record

#: Seconds over which it is seen how busy a process is, and that its stacks may take.
SAMPLE_S, WRITE_DEADLINE_S = 0.5, 3.0
#: How often it is looked at meanwhile.
LOOKS = 20
#: Seconds in which a file that grows no more is complete.
QUIET_S = 0.2
STOPPED = "Tt"


@dataclass(frozen=True)
class Frame(Record):
    """Line of a stack; `text` is the source, where it can be read."""

    function: str
    file: str
    line: int
    text: str = ""

    def __str__(self) -> str:
        return f"{self.function} ({self.file}:{self.line})"


@dataclass(frozen=True)
class ThreadView(Record):
    """Thread of Python, innermost frame first."""

    ident: int
    frames: list[Frame]


@dataclass(frozen=True)
class ProcessView(Record):
    """A process: its state as the kernel calls it, empty if it is gone; how many cores it uses.

    `busy` is the share of looks at which one of its threads ran or waited for a core: a full node
    gives little of one. `problem` tells why it has no threads.
    """

    pid: int
    state: str = ""
    cores: float = 0.0
    busy: float = 0.0
    threads: list[ThreadView] = field(default_factory=list)
    problem: str = ""


def observe(pid: int) -> ProcessView:
    """Look at a process of this node, for about a second."""
    began, before = time.monotonic(), _cpu_seconds(pid)
    if not process_start(pid):
        return ProcessView(pid)
    looks = [_wants_a_core(pid) for _ in range(LOOKS)]
    cores = (_cpu_seconds(pid) - before) / (time.monotonic() - began)
    state = (process_status(pid) or ["", ""])[1]
    try:
        threads, problem = _have_written(pid, state)
    except OSError:
        threads, problem = [], "it ended meanwhile"
    busy = sum(looks) / LOOKS
    return ProcessView(pid, state, round(max(0.0, cores), 2), busy, threads, problem)


def _wants_a_core(pid: int) -> bool:
    """Return whether one of its threads runs or could, at the end of a part of `SAMPLE_S`."""
    time.sleep(SAMPLE_S / LOOKS)
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "R":
                    return True
    return False


def _cpu_seconds(pid: int) -> float:
    status = process_status(pid)
    return sum(map(int, status[12:14])) / os.sysconf("SC_CLK_TCK") if status else 0.0


def _have_written(pid: int, state: str) -> tuple[list[ThreadView], str]:
    """Return stacks as the process itself writes them; none, and why, where it does not."""
    path = stacks_file(pid)
    if path is None:
        return [], "it does not write its stacks itself"
    if state in STOPPED:
        return [], "a stopped process cannot write its stacks"
    start = before = size = os.stat(path).st_size
    os.kill(pid, STACKS_SIGNAL)
    deadline = time.monotonic() + WRITE_DEADLINE_S
    while time.monotonic() < deadline and not start < before == size:
        time.sleep(QUIET_S)
        before, size = size, os.stat(path).st_size
    with open(path) as file:
        file.seek(start)
        threads = read_written(file.read())
    return threads, "" if threads else f"it has not written them within {WRITE_DEADLINE_S:g} s"


def read_written(text: str) -> list[ThreadView]:
    """Return the threads in what faulthandler has written."""
    threads: list[ThreadView] = []
    for written in text.splitlines():
        if head := re.match(r"(?:Current thread|Thread) 0x(\w+)", written):
            threads.append(ThreadView(int(head[1], 16), []))
        elif threads and (told := re.match(r'  File "(.*)", line (\d+) in (.*)', written)):
            file, line, function = told[1], int(told[2]), told[3].rpartition(".")[2]
            source = linecache.getline(file, line).strip()[:120] if os.path.isabs(file) else ""
            short = "/".join(file.split("/")[-3:])
            threads[-1].frames.append(Frame(function, short, line, source))
    return threads
