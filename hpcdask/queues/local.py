"""Processes of this machine as jobs: for laptops, tests and single GPU boxes.

A job is a session of processes under coreutils' ``timeout``, which ends them at the walltime, and
kills what is left 5 s after a SIGTERM even when the one who sent it is gone by then. Its processes
carry its id, tag and GPUs in their environment, where the user's other programs find them. Pending
jobs exist only in the process that submitted them, and end with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import psutil

from hpcdask.errors import Refused, UsageError
from hpcdask.process import home_folder, process_start, signal_name
from hpcdask.security import private

from .base import Queue, Request
from .job_state import OVER, QueueState, QueueStatus
from .registry import requested_gpus
from .script import render

JOB, TAG, HOME = "HPCDASK_LOCAL_JOB", "HPCDASK_TAG", "HPCDASK_HOME"
#: Variable with the GPUs that a job was given, which its processes may not all see.
GPUS = "HPCDASK_LOCAL_GPUS"
#: Seconds between SIGTERM and SIGKILL.
KILL_WAIT_S = 5.0
#: How the line of a script begins that says, in JSON, what the job asks for.
DIRECTIVE = "#HPCDASK "
#: Exit code of ``timeout`` for a command that it ended.
TIMED_OUT = 124

#: Processes and their environments, by the jobs' ids.
Found = dict[str, list[tuple[psutil.Process, dict[str, str]]]]
T = TypeVar("T")
_numbers = itertools.count()


@dataclass
class Entry:
    """Job that this process submitted; its `leader` is the process of ``timeout``."""

    id: str
    script: str
    tag: str
    gpus: int
    folder: str
    state: QueueState = QueueState.PENDING
    reason: str = ""
    exit_code: int | None = None
    started: float | None = None
    leader: subprocess.Popen[bytes] | None = None
    cancelled: bool = False

    def end(self, state: QueueState, reason: str = "", exit_code: int | None = None) -> None:
        """Record the job's end."""
        self.state, self.reason, self.exit_code = state, reason, exit_code


def locked_in_thread(method: Callable[..., T]) -> Callable[..., Coroutine[Any, Any, T]]:
    """Run a method in a thread, one at a time."""

    async def run(self: LocalQueue, *args: Any) -> T:
        def locked() -> T:
            with self._lock:
                return method(self, *args)

        return await asyncio.to_thread(locked)

    return run


class LocalQueue(Queue):
    """This machine as a queue.

    A job gets as many of the GPUs, given by UUID, as it requests for itself, or waits. With None
    they are not counted, and every job starts at once. A job gets SIGTERM after `walltime_s`, if
    that is given.
    """

    title = "this machine"
    jobqueue = ("local", "LocalJob")
    of_all_jobs = ("walltime",)
    is_local = True
    launchers = ()
    programs = ("bash", "timeout")
    advice = "nvidia-smi -L"
    job_id = f"${JOB}"

    def __init__(
        self, gpus: Sequence[str] | None = None, *, walltime_s: float | None = None
    ) -> None:
        super().__init__()
        self.gpus = None if gpus is None else tuple(gpus)
        self.walltime_s = walltime_s
        self._entries: dict[str, Entry] = {}
        self._ending: dict[str, float] = {}  # since when, by the monotonic clock
        self._lock = threading.Lock()

    def script(self, job: Any, request: Request, preamble: Sequence[str], command: str) -> str:
        """Return the job script, whose second line holds the request."""
        self.refuse_nodes(request)
        asked = {"tag": request.tag, "gpus": request.gpus, "folder": request.folder}
        return render(job, [DIRECTIVE + json.dumps(asked)], preamble, command)

    @classmethod
    def requested_gpus(cls, directive: str, nodes: int = 1) -> int | None:
        """Read a request in the words of any system: this one has none of its own."""
        return requested_gpus(directive, nodes)

    @classmethod
    def parse_walltime(cls, text: str) -> timedelta:
        """Read ``90s``, ``5min``, ``1h30m``, ``00:30:00`` or a number of seconds."""
        from hpcdask.spec.parsing import parse_seconds

        seconds = parse_seconds(text, "walltime")
        if seconds is None:
            raise UsageError(f"walltime: {text!r} is not a time. For no limit, leave walltime out")
        return timedelta(seconds=seconds)

    async def limit(self) -> int:
        return 1000

    @locked_in_thread
    def submit(self, script: str, count: int) -> list[str]:
        """Start `count` jobs, or as many as there are GPUs for; the others wait."""
        with open(script, newline="\n") as file:
            line = next(line for line in file if line.startswith(DIRECTIVE))
        asked = json.loads(line.removeprefix(DIRECTIVE))
        if self.gpus is not None and asked["gpus"] > len(self.gpus):
            raise Refused(
                f"a job asks for {asked['gpus']} GPUs, and this machine has {len(self.gpus)} to "
                f"give. Ask for fewer with gpus_per_job. Script kept at {script}"
            )
        submitter = f"{os.getpid()}.{process_start(os.getpid())}"
        ids = [f"{submitter}.{next(_numbers)}" for _ in range(count)]
        self._entries |= {job_id: Entry(job_id, script, **asked) for job_id in ids}
        self._advance()
        return ids

    @locked_in_thread
    def query(self, ids: Collection[str]) -> dict[str, QueueStatus]:
        """Return the jobs' status, after pending jobs for which there are GPUs were started."""
        found, node, seen = self._advance(), os.uname().nodename, {}
        for job_id in ids:
            if (entry := self._entries.get(job_id)) is not None:
                at, limit = entry.started, self.walltime_s
                ends = at + limit if at and limit else None
                facts = (entry.state, entry.reason, entry.exit_code, 0, at, ends)
                seen[job_id] = QueueStatus(job_id, *facts, nodes=node if at else "")
            elif job_id in found:
                seen[job_id] = QueueStatus(job_id, QueueState.RUNNING, nodes=node)
        return seen

    @locked_in_thread
    def cancel(self, ids: Collection[str]) -> None:
        """Send SIGTERM to the leaders of jobs, which kill what is left after 5 s."""
        found = _living()
        for job_id in ids:
            if (entry := self._entries.get(job_id)) is not None:
                entry.cancelled = True
                if entry.state is QueueState.PENDING:
                    entry.end(QueueState.CANCELLED, "cancelled")
            self._ending.setdefault(job_id, time.monotonic())
            processes = [process for process, _ in found.get(job_id, ())]
            _send(signal.SIGTERM, list(filter(_leads, processes)) or processes)

    @locked_in_thread
    def tagged(self) -> dict[str, str]:
        """Return tags of jobs of this user and ``HPCDASK_HOME``, and of those that wait here."""
        running = {job_id: some[0][1] for job_id, some in self._advance().items()}
        home = home_folder()
        tags = {job_id: env[TAG] for job_id, env in running.items() if env.get(HOME) == home}
        live = [entry for entry in self._entries.values() if entry.state not in OVER]
        return tags | {entry.id: entry.tag for entry in live}

    # With the lock

    def _advance(self) -> Found:
        """Collect what has ended, kill what should have, start what can start.

        Returns the processes that were found before anything was started.
        """
        now, found = time.monotonic(), _living()
        for entry in self._entries.values():
            leader = entry.leader
            if entry.state is QueueState.RUNNING and leader and leader.poll() is not None:
                self._ending.setdefault(entry.id, now)
                if left := len(found.get(entry.id, ())):
                    entry.reason = f"ending: {left} of its processes are left"
                else:
                    self._settle(entry, leader.returncode)
        for job_id, since in self._ending.items():
            if now - since > KILL_WAIT_S + 1:  # `timeout` was first, where it lives
                _send(signal.SIGKILL, (process for process, _ in found.get(job_id, ())))
        if waiting := [one for one in self._entries.values() if one.state is QueueState.PENDING]:
            self._start_all(waiting)
        return found

    def _start_all(self, waiting: Iterable[Entry]) -> None:
        """Start jobs for which there are GPUs: first come, first served."""
        gpus, short = self.gpus or (), ""
        with gpus_locked():
            envs = [env for some in _living().values() for _, env in some]
            taken = {uuid for env in envs for uuid in env.get(GPUS, "").split(",")}
            for entry in waiting:
                free = [uuid for uuid in gpus if uuid not in taken]
                if self.gpus is not None and len(free) < entry.gpus:
                    some = f"{len(free)} of {len(gpus)} GPUs are free, not {entry.gpus}"
                    short = f"Resources: {some if free else f'all {len(gpus)} GPUs are taken'}"
                if short and entry.gpus:  # those that need no GPU never wait
                    entry.reason = short
                else:
                    given = free[: entry.gpus]
                    self._start(entry, given)
                    taken |= set(given)

    def _settle(self, entry: Entry, code: int) -> None:
        """End a job whose processes are all gone; `code` is its leader's."""
        lasted = time.time() - (entry.started or 0.0)
        if entry.cancelled:
            entry.end(QueueState.CANCELLED, "cancelled", 128 - code if code < 0 else code)
        elif self.walltime_s and lasted >= self.walltime_s and code in (TIMED_OUT, -signal.SIGKILL):
            number = signal.SIGTERM if code == TIMED_OUT else signal.SIGKILL
            entry.end(QueueState.TIMEOUT, f"walltime of {self.walltime_s:g} s", 128 + number)
        elif code < 0:
            entry.end(QueueState.FAILED, f"killed by {signal_name(-code)}", 128 - code)
        else:
            entry.end(QueueState.FAILED if code else QueueState.COMPLETED, "", code)

    def _start(self, entry: Entry, gpus: Sequence[str]) -> None:
        """Start a job on these GPUs."""
        own = {JOB: entry.id, TAG: entry.tag, HOME: home_folder(), GPUS: ",".join(gpus)}
        own["SPT_NOENV"] = "1"  # setproctitle would write over the environment in /proc
        if self.gpus is not None:
            own["CUDA_VISIBLE_DEVICES"] = own[GPUS]
        limit = [f"--kill-after={KILL_WAIT_S:g}", f"{self.walltime_s or 0:g}"]
        path = os.path.join(entry.folder, f"queue-{entry.id}.log")
        try:
            with open(path, "ab", opener=lambda name, flags: os.open(name, flags, 0o600)) as output:
                entry.started = time.time()
                entry.leader = subprocess.Popen(
                    ["timeout", *limit, "bash", entry.script],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env={**os.environ, **own},
                    start_new_session=True,
                )
            entry.state, entry.reason = QueueState.RUNNING, ""
            leader = psutil.Process(entry.leader.pid)
            # the kernel shows the environment a moment after a process was started
            while _environment(leader).get(JOB) != entry.id and entry.leader.poll() is None:
                time.sleep(0.001)
        except OSError as error:
            entry.end(QueueState.FAILED, f"it cannot be started: {error}")


def _living() -> Found:
    """Return the processes of this user's jobs on this machine."""
    found: Found = {}
    for process in psutil.process_iter():
        env = _environment(process)
        if JOB in env:
            found.setdefault(env[JOB], []).append((process, env))
    return found


def _environment(process: psutil.Process) -> dict[str, str]:
    """Return the environment of a process of this user; empty if the process is gone."""
    with contextlib.suppress(psutil.Error):
        if process.uids().effective == os.geteuid():  # root could read everybody's
            return process.environ()
    return {}


def _leads(process: psutil.Process) -> bool:
    """Return whether a process leads a session, as that of ``timeout`` does."""
    with contextlib.suppress(ProcessLookupError):
        return os.getsid(process.pid) == process.pid
    return False


def _send(number: int, processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)


@contextlib.contextmanager
def gpus_locked() -> Iterator[None]:
    """Keep other programs of this user from starting jobs on this machine."""
    file = private.open_lock(os.path.join(private.node_folder("gpus"), "lock"))
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)
