"""What the processes of one user on one machine share: whose job and whose GPU is which.

Nothing here depends on the process that started a job: a job's processes carry its id in their
environment, and hold the locks of its GPUs open themselves.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import psutil

from hpcdask.errors import QueueError
from hpcdask.process import process_status
from hpcdask.security import private

JOB = "HPCDASK_LOCAL_JOB"
TAG = "HPCDASK_TAG"
HOME = "HPCDASK_HOME"
#: Looks at a process that seems to have no environment.
EXEC_LOOKS = 5
#: The kernel's PF_KTHREAD.
KERNEL_THREAD = 0x00200000


@dataclass(frozen=True)
class Process:
    """One living process of a job; `session` is its session leader's id, `started` a unix time.

    `home` is the usual base of the clusters of the one who submitted the job.
    """

    pid: int
    session: int
    tag: str
    home: str
    started: float


def living() -> dict[str, list[Process]]:
    """The jobs of this user that have processes on this machine, with these."""
    found: dict[str, list[Process]] = {}
    user = os.geteuid()
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            if os.stat(f"/proc/{entry}").st_uid != user:
                continue  # root could read everybody's
            content = _environment(entry)
            if JOB.encode() not in content:
                continue
            variables = dict(
                variable.split("=", 1)
                for variable in os.fsdecode(content).split("\0")
                if variable.partition("=")[0] in (JOB, TAG, HOME)
            )
        except OSError:
            continue  # gone meanwhile
        if variables.get(JOB) and (status := process_status(int(entry))):
            started = psutil.boot_time() + int(status[20]) / os.sysconf("SC_CLK_TCK")
            tag, home = variables.get(TAG, ""), variables.get(HOME, "")
            process = Process(int(entry), int(status[4]), tag, home, started)
            found.setdefault(variables[JOB], []).append(process)
    return found


def _environment(pid: str) -> bytes:
    """What a process was started with; empty for a zombie and for the kernel's own."""
    for _ in range(EXEC_LOOKS):
        if content := _read(f"/proc/{pid}/environ"):
            return content
        status = process_status(int(pid))
        if not status or status[1] in "ZX" or int(status[7]) & KERNEL_THREAD:
            break
        time.sleep(0.001)  # in the middle of an exec there is none for a moment
    return b""


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def terminate(processes: Sequence[Process]) -> None:
    """Ask a job to end: its leader, ``timeout``, tells the others; without it, each of them."""
    leaders = [process for process in processes if process.pid == process.session]
    _send(leaders or processes, signal.SIGTERM)


def kill(processes: Iterable[Process]) -> None:
    """Kill these processes."""
    _send(processes, signal.SIGKILL)


def _send(processes: Iterable[Process], number: int) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


def lock_folder() -> str:
    """Where the locks are: the same folder for all programs of this user on this machine."""
    return private.node_folder("gpus")


def lock_gpus(uuids: Sequence[str], count: int) -> list[tuple[str, int]]:
    """Lock up to `count` of these GPUs for a job; return UUIDs and the open files of their locks.

    A lock lasts until every copy of its file, in whatever process, is closed. Raises QueueError if
    there is no folder for the locks.
    """
    try:
        folder = lock_folder()
        private.make_folder(folder)
    except OSError as error:
        raise QueueError(
            f"the folder in which GPUs in use are noted cannot be made in /tmp: {error.strerror}"
        ) from None
    locked: list[tuple[str, int]] = []
    guard = _lock(os.path.join(folder, "all"))
    if guard is None:
        return []  # another program chooses just now; two that take half each would both wait
    try:
        for uuid in uuids:
            if len(locked) < count and (file := _lock(_path(uuid))) is not None:
                locked.append((uuid, file))
    finally:
        os.close(guard)
    return locked


def keep_locks(uuids: Iterable[str]) -> None:
    """Refresh the files of locks, for those who clean /tmp by age."""
    for uuid in uuids:
        with contextlib.suppress(OSError):
            os.utime(_path(uuid))


def _path(uuid: str) -> str:
    return os.path.join(lock_folder(), uuid.replace("/", "_"))


def _lock(path: str) -> int | None:
    file = private.open_lock(path)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return file
    except BlockingIOError:
        os.close(file)
        return None
