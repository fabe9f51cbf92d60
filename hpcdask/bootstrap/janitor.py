"""Ends what a dead rank leaves behind."""

from __future__ import annotations

import contextlib
import os
import signal
import time

from hpcdask.process import FILES, SIGNALS, detach_standard_streams, owner_text, process_start
from hpcdask.security import private

MARKER = "HPCDASK_RANK_MARKER"
#: Seconds after which the janitor leaves a process that does not die (hung driver, file system).
KILL_DEADLINE_S = 30.0


class Janitor:
    """Handle on the janitor process of this rank."""

    def __init__(self, pid: int, pipe: int) -> None:
        self.pid = pid
        self._pipe = pipe

    @classmethod
    def start(cls) -> Janitor:
        """Fork the janitor. Call it before heavy imports and before any thread."""
        read_end, write_end = os.pipe()
        rank = os.getpid()
        owner = owner_text()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(write_end)
                _watch(rank, owner, read_end, os.environ[MARKER])
            finally:
                os._exit(0)
        os.close(read_end)
        return cls(pid, write_end)

    def remove_at_end(self, path: str) -> None:
        """Remove a file or folder when this rank and its processes are gone."""
        self._tell(b"later ", path)

    def remove_at_once(self, path: str) -> None:
        """Remove it when this rank is gone: another cluster may take the name then."""
        self._tell(b"now ", path)

    def forget(self, path: str) -> None:
        """Leave it alone, whatever it is then."""
        with contextlib.suppress(OSError):  # somebody has ended the janitor
            self._tell(b"never ", path)

    def _tell(self, when: bytes, path: str) -> None:
        os.write(self._pipe, when + os.fsencode(path) + b"\0")

    def dismiss(self) -> None:
        """End the janitor now, with all that this rank has forked."""
        os.close(self._pipe)
        os.waitpid(self.pid, 0)

    def release_in_child(self) -> None:
        """Drop a forked child's copy of the pipe, whose end tells that the rank is gone."""
        os.close(self._pipe)


def _watch(rank: int, owner: str, pipe: int, marker: str) -> None:
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
    told = {}
    for entry in filter(None, received.split(b"\0")):
        when, _, path = entry.partition(b" ")
        told[path] = when  # the last word on each holds
    for path, when in told.items():
        if when == b"now":
            private.remove(os.fsdecode(path), owner)
    deadline = time.monotonic() + KILL_DEADLINE_S
    while time.monotonic() < deadline and (
        victims := marked_processes(marker, besides={rank, os.getpid()})
    ):
        for victim in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
        time.sleep(0.01)
    for path, when in told.items():
        if when == b"later":
            private.remove(os.fsdecode(path), owner)


def marked_processes(marker: str, besides: set[int]) -> list[int]:
    """Living processes whose initial environment holds `marker`.

    multiprocessing's resource tracker is left out: it ends by itself once the
    others are gone, and unlinks their semaphores on the way.
    """
    needle = f"{MARKER}={marker}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) in besides:
            continue
        try:
            with open(f"/proc/{entry}/environ", "rb") as file:
                if needle not in file.read().split(b"\0"):
                    continue
            with open(f"/proc/{entry}/cmdline", "rb") as file:
                if b"multiprocessing.resource_tracker" in file.read():
                    continue
        except OSError:
            continue
        if process_start(int(entry)):  # else it is dead
            found.append(int(entry))
    return found
