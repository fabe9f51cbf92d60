"""Jobs and GPUs that the processes of one user on one machine share.

Nothing here depends on the process that started a job: a job's processes carry its id in their
environment, and hold the locks of its GPUs open themselves.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import psutil

from hpcdask.errors import QueueError
from hpcdask.process import process_status
from hpcdask.security import private

JOB = "HPCDASK_LOCAL_JOB"
TAG = "HPCDASK_TAG"
HOME = "HPCDASK_HOME"


@dataclass(frozen=True)
class Process:
    """Living process of a job; `session` is its session leader's id, `started` a unix time.

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
            with open(f"/proc/{entry}/environ", "rb") as file:
                content = file.read()
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
    for uuid in uuids:
        path = os.path.join(folder, uuid.replace("/", "_"))
        if len(locked) < count and (file := _lock(path)) is not None:
            locked.append((uuid, file))
    return locked


def _lock(path: str) -> int | None:
    file = private.open_lock(path)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return file
    except BlockingIOError:
        os.close(file)
        return None
