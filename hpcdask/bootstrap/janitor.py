"""Ends what a dead rank leaves behind."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from hpcdask import process
from hpcdask.security import private

#: Seconds after which a process that does not die (hung driver, file system) is left.
KILL_DEADLINE_S = 5.0


class Janitor:
    """Process of its own session that cleans up once this one is gone, however it ended."""

    def __init__(self, marker: str) -> None:
        """Fork the janitor. Call it before heavy imports and before any thread."""
        read_end, self._pipe = os.pipe()
        self._known = marker, os.getsid(0), process.owner_text()
        self._paths: list[str] = []
        if os.fork() == 0:
            try:
                os.close(self._pipe)
                _clean(_wait_for_end(read_end), *self._known)
            finally:
                os._exit(0)
        os.close(read_end)

    def remove_at_end(self, path: str) -> None:
        """Remove a file once this process is gone, and a folder once its descendants are."""
        self._paths.append(path)
        with contextlib.suppress(OSError):  # somebody has killed the janitor: the run goes on
            os.write(self._pipe, os.fsencode(path) + b"\0")

    def finish(self) -> None:
        """Do its work, before the end of this process: SLURM then ends the janitor too."""
        _clean(self._paths, *self._known)


def _wait_for_end(pipe: int) -> list[str]:
    """Wait until the process is gone whose janitor this is; return the paths to remove."""
    os.setsid()
    for number in process.SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    process.detach_standard_streams()
    os.closerange(3, pipe)  # MPICH leaves copies of the streams, and waits for their end
    os.closerange(pipe + 1, process.FILES)
    os.chdir("/")
    received = b""
    while chunk := os.read(pipe, 65536):
        received += chunk
    return [os.fsdecode(name) for name in received.split(b"\0")[:-1]]


def _clean(paths: Sequence[str], marker: str, session: int, owner: str) -> None:
    """Kill what is left of a rank, and remove its files and folders."""
    for path in paths:
        if not os.path.isdir(path) or os.path.islink(path):  # another cluster may take its name
            private.remove(path)
    deadline = time.monotonic() + KILL_DEADLINE_S
    while time.monotonic() < deadline and (victims := marked_processes(marker, session)):
        for victim in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
        time.sleep(0.01)
    for path in filter(os.path.isdir, paths):
        private.remove(path, owner)


def marked_processes(marker: str, session: int) -> list[int]:
    """Return the living processes of a session whose initial environment holds `marker`.

    The process that made the marker, and its janitor, are none of them.
    """
    needle = f"{process.MARKER}={marker}".encode()
    found = []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        try:
            if os.getsid(pid) != session:
                continue  # jobs that the program submitted, and tmux, have sessions of their own
            if needle not in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                continue
            if b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                continue  # it ends after the others, and unlinks their semaphores
        except OSError:
            continue
        if process.process_start(pid):  # else it is dead
            found.append(pid)
    return found
