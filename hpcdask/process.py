"""This process: startup marks, its start, its streams, its end."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import resource
import signal
import sys
import time
from typing import NoReturn

STARTED = "HPCDASK_STARTED"
#: Names a rank's descendants for its janitor: Linux shows it in ``/proc/PID/environ``.
MARKER = "HPCDASK_RANK_MARKER"
#: The signal at which a process writes its stacks; no launcher or library of the field uses it.
STACKS_SIGNAL = int(signal.SIGRTMAX) - 5
#: What the whole job may get: the rank ends its parts in good order.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
#: Of these, those that end a run, and those that mean something to the program only.
ENDING, PASSED_ON = SIGNALS[:3], SIGNALS[3:]
#: Seconds in which a launcher and a terminal may both send the first signal.
SAME_SIGNAL_S = 0.3
#: Seconds that a program gets after SIGTERM; queueing systems kill after 30.
TERM_DEADLINE_S = 25.0
#: More than a rank has open by then.
FILES = 4096
#: Descriptors that are enough; some systems allow a billion, and old programs try them all.
ENOUGH_DESCRIPTORS = 2**20
#: Events of this process, and earlier ones of the processes it was forked from, with the seconds
#: since the launch.
marks: list[tuple[float, str]] = []


def mark(event: str) -> None:
    """Record the time of an event."""
    marks.append((seconds_since_start(), event))


def process_status(pid: int) -> list[str]:
    """Return name, state, parent and so on of ``/proc/PID/stat``; nothing if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            head, _, fields = file.read().decode(errors="replace").rpartition(")")
    except OSError:
        return []
    return [head.partition("(")[2], *fields.split()]


def process_start(pid: int) -> str:
    """Return the start of a process in ticks, unique with its id; empty if it is gone."""
    status = process_status(pid)
    return status[20] if status and status[1] not in "ZX" else ""


def raise_descriptor_limit() -> None:
    """Raise this process's soft limit of open files to the hard one: connections count."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = ENOUGH_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, ENOUGH_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < enough:
        resource.setrlimit(resource.RLIMIT_NOFILE, (enough, hard))


def signal_name(number: int) -> str:
    """Return ``SIGKILL`` for 9; real-time signals have numbers only."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def detach_standard_streams() -> None:
    """Point the standard streams at /dev/null: launchers wait for their end."""
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    if null > 2:
        os.close(null)


def leave(code: int) -> NoReturn:
    """Write out the streams and end this process at once."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            if stream is not None:  # it was closed when this process started
                stream.flush()
    if "mpi4py.MPI" in sys.modules:
        # MPICH tells its launcher in a handler of exit() that this process ends in good order
        ctypes.CDLL(None).exit(code)
    os._exit(code)


def seconds_since_start() -> float:
    """Return the seconds since this rank was launched."""
    return time.time() - float(os.environ.get(STARTED, time.time()))


def umask() -> int:
    """Return the umask, which the C library only tells who sets it: other threads make files."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1], 8) for line in file if line.startswith("Umask:"))


def home_folder() -> str:
    """Return the folder of the clusters' folders: ``HPCDASK_HOME``, by default ``~/.hpcdask``."""
    return os.path.abspath(os.path.expanduser(os.environ.get("HPCDASK_HOME") or "~/.hpcdask"))


def owner_text(pid: int | None = None) -> str:
    """Return the text that names a process for good: host, namespace, id and start."""
    pid = os.getpid() if pid is None else pid
    space = os.readlink("/proc/self/ns/pid")
    return f"{os.uname().nodename} {space} {pid} {process_start(pid)}"


def owner_lives(owner: str) -> bool | None:
    """Return whether the process of an `owner_text` runs; None if that cannot be seen from here."""
    *there, pid, start = owner.split()
    return process_start(int(pid)) == start if there == owner_text().split()[:2] else None


def make_observable() -> None:
    """Write the stacks of this process into memory at a signal, where the kernel allows it."""
    if stacks_file(os.getpid()) is None:
        with contextlib.suppress(OSError):
            file = os.memfd_create(f"hpcdask-stacks-{os.getpid()}")
            faulthandler.register(STACKS_SIGNAL, file, all_threads=True, chain=False)


def stacks_file(pid: int) -> str | None:
    """Return the file in memory for the stacks of a process; a fork has its parent's, too."""
    folder = f"/proc/{pid}/fd"
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):
                if os.readlink(f"{folder}/{name}").startswith(f"/memfd:hpcdask-stacks-{pid} "):
                    return f"{folder}/{name}"
    return None
