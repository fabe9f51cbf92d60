"""Whose a process or a folder is, and files that a crash does not lose."""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import socket
from dataclasses import dataclass
from pathlib import Path

from hpcdask.bootstrap import process_start
from hpcdask.errors import UsageError

#: How much of a log's end is read for its last lines.
TAIL_BYTES = 1 << 18


@dataclass(frozen=True)
class Owner:
    """The process that holds a cluster.

    Attributes
    ----------
    host, space
        Its host and process id namespace: a process id means something only within both.
    pid, start
        Its id, and when it started in the kernel's ticks.
    """

    host: str
    space: str
    pid: int
    start: str

    @classmethod
    def this(cls) -> Owner:
        """This process."""
        space = os.readlink("/proc/self/ns/pid")
        return cls(socket.gethostname(), space, os.getpid(), process_start(os.getpid()))

    def lives(self) -> bool | None:
        """Whether it still runs; None if that cannot be seen from here."""
        here = Owner.this()
        if (self.host, self.space) != (here.host, here.space):
            return None
        return process_start(self.pid) == self.start


def check_owned(path: Path) -> None:
    """Refuse a folder in which others could replace what is there.

    Raises
    ------
    UsageError
        It belongs to another user, or others may write in it.
    """
    status = path.stat()
    if status.st_uid != os.geteuid():
        raise UsageError(f"{path} belongs to another user (uid {status.st_uid}): name one of yours")
    others = 0o002 if _is_private_group(status.st_gid) else 0o022
    if status.st_mode & others:
        raise UsageError(f"others may write in {path}: chmod go-w {path}, or name another folder")


def _is_private_group(group: int) -> bool:
    """Whether it is the user's own, which many sites give to each: then its bits mean nothing."""
    try:
        return grp.getgrgid(group).gr_name == pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return False


def make_private(path: Path) -> None:
    """Make a folder and its missing parents, all 0700; those that exist stay as they are."""
    if not path.is_dir():
        make_private(path.parent)
        with contextlib.suppress(FileExistsError):
            path.mkdir(0o700)


def append(path: Path, text: str) -> None:
    """Append to a 0600 file, and see it on the disk."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(file, text.encode())
        os.fsync(file)
    finally:
        os.close(file)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read_end(path: Path, whole: bool) -> list[str]:
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if not whole:
                file.seek(max(0, size - TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
