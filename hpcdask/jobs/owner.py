"""Owners of processes and folders, and the ends of logs."""

from __future__ import annotations

import os
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

from hpcdask.errors import UsageError
from hpcdask.process import process_start
from hpcdask.security.private import others_may_write, refuse_open
from hpcdask.spec.records import Record

#: How much of a log's end is read for its last lines.
TAIL_BYTES = 1 << 18


@dataclass(frozen=True)
class Owner(Record):
    """The process that holds a cluster.

    `space` is its process id namespace: a process id means something only within host and
    namespace. `start` is when it started, in the kernel's ticks.
    """

    host: str
    space: str
    pid: int
    start: str

    @classmethod
    def this(cls) -> Owner:
        """Return this process."""
        space = os.readlink("/proc/self/ns/pid")
        return cls(socket.gethostname(), space, os.getpid(), process_start(os.getpid()))

    def lives(self) -> bool | None:
        """Return whether it still runs; None if that cannot be seen from here."""
        here = Owner.this()
        if (self.host, self.space) != (here.host, here.space):
            return None
        return process_start(self.pid) == self.start


def check_owned(path: Path) -> None:
    """Raise UsageError for a folder in which others could replace files.

    It belongs to another user, or others may write in it or rename it.
    """
    status = path.stat()
    yours = f"name one of yours, such as {path}/$USER"
    if status.st_uid != os.geteuid():
        raise UsageError(f"{path} belongs to another user (uid {status.st_uid}): {yours}")
    if others_may_write(status):
        shared = status.st_mode & stat.S_ISVTX
        mend = yours if shared else f"chmod go-w {path}, or {yours}"
        raise UsageError(f"others may write in {path}: {mend}")
    try:
        refuse_open(str(path))
    except OSError as error:
        raise UsageError(f"{error.strerror}. Name another folder than {path}") from None


def read_end(path: Path, whole: bool) -> list[str]:
    """Return the last lines of a log, or all; none of a file that cannot be read."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if not whole:
                file.seek(max(0, size - TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
