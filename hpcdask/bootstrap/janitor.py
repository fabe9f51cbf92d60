"""Ends what a dead rank leaves behind."""

from __future__ import annotations

import contextlib
import os
import signal
import time

from hpcdask.process import (
    FILES,
    MARKER,
    SIGNALS,
    detach_standard_streams,
    owner_text,
    process_start,
)
from hpcdask.security import private

#: Seconds after which the janitor leaves a process that does not die (hung driver, file system).
KILL_DEADLINE_S = 30.0


class Janitor:
    """Process in a session of its own that cleans up once this one is gone, however it ended.

    It kills what has the marker in its environment and is of this process's session: a job that
    the program submitted, or a terminal multiplexer that it started, is in another.
    """

    def __init__(self, pid: int, pipe: int) -> None:
        self.pid = pid
        self._pipe = pipe

    @classmethod
    def start(cls, marker: str) -> Janitor:
        """Fork the janitor. Call it before heavy imports and before any thread."""
        read_end, write_end = os.pipe()
        parent, owner = os.getpid(), owner_text()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(write_end)
                _watch(parent, owner, read_end, marker)
            finally:
                os._exit(0)
        os.close(read_end)
        return cls(pid, write_end)

    def remove_at_end(self, path: str) -> None:
        """Remove a file or folder when this process and its descendants are gone."""
        self._order(b"later ", path)

    def remove_at_once(self, path: str) -> None:
        """Remove a path when this process is gone: another cluster may take the name then."""
        self._order(b"now ", path)

    def forget(self, path: str) -> None:
        """Leave a path alone, whatever is there then."""
        self._order(b"never ", path)

    def _order(self, when: bytes, path: str) -> None:
        with contextlib.suppress(OSError):  # somebody has killed the janitor: the run goes on
            os.write(self._pipe, when + os.fsencode(path) + b"\0")


def _watch(parent: int, owner: str, pipe: int, marker: str) -> None:
    session = os.getsid(0)
    os.setsid()
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    detach_standard_streams(output=True)
    os.closerange(3, pipe)  # MPICH leaves copies of the streams, and waits for their end
    os.closerange(pipe + 1, FILES)
    os.chdir("/")
    received = b""
    while chunk := os.read(pipe, 65536):
        received += chunk
    orders: dict[str, bytes] = {}
    for entry in filter(None, received.split(b"\0")):
        order, _, name = entry.partition(b" ")
        orders[os.fsdecode(name)] = order  # the last order for a path holds
    for path, when in orders.items():
        if when == b"now":
            private.remove(path, owner)
    deadline = time.monotonic() + KILL_DEADLINE_S
    while time.monotonic() < deadline and (victims := marked_processes(marker, session, parent)):
        for victim in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
        time.sleep(0.01)
    for path, when in orders.items():
        if when == b"later":
            private.remove(path, owner)


def marked_processes(marker: str, session: int, besides: int) -> list[int]:
    """Return the living processes of a session whose initial environment holds `marker`.

    multiprocessing's resource tracker is left out: it ends by itself once the others are gone, and
    unlinks their semaphores on the way.
    """
    needle = f"{MARKER}={marker}".encode()
    found = []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        try:
            if pid in (besides, os.getpid()) or os.getsid(pid) != session:
                continue
            with open(f"/proc/{pid}/environ", "rb") as file:
                if needle not in file.read().split(b"\0"):
                    continue
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                if b"multiprocessing.resource_tracker" in file.read():
                    continue
        except OSError:
            continue
        if process_start(pid):  # else it is dead
            found.append(pid)
    return found
