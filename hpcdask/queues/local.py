"""Processes of this machine as jobs: for laptops, tests and single GPU boxes.

A job is a session of processes under coreutils' ``timeout``, which ends them at the walltime, and
kills what is left 5 s after a SIGTERM even when the one who sent it is gone by then. Its processes
carry its id and tag in their environment, where the user's other programs find them.

Pending jobs exist only in the process that submitted them, and end with it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Concatenate, ParamSpec, TypeVar

from hpcdask.errors import QueueError, Refused, UsageError
from hpcdask.process import home_folder, process_start, signal_name
from hpcdask.upstream import dask_jobqueue

from . import local_processes
from .base import Queue, Request
from .job_state import OVER, QueueState, QueueStatus
from .registry import requested_gpus

#: Seconds between SIGTERM and SIGKILL.
KILL_WAIT_S = 5.0
#: How the line of a script begins that says, in JSON, what the job asks for.
DIRECTIVE = "#HPCDASK "
#: What ``timeout`` returns for a command that it ended.
TIMED_OUT = 124

P = ParamSpec("P")
T = TypeVar("T")
_numbers = itertools.count()


@dataclass
class Entry:
    """A job that this process submitted.

    `began` and `ended` are when its leader started and was seen to be gone, by the monotonic clock.
    """

    id: str
    script: str
    tag: str
    gpus: int
    folder: str
    state: QueueState = QueueState.PENDING
    reason: str = ""
    exit_code: int | None = None
    started: float | None = None
    began: float = 0.0
    ended: float | None = None
    leader: subprocess.Popen[bytes] | None = None
    held: list[str] = field(default_factory=list)

    def end(self, state: QueueState, reason: str = "", exit_code: int | None = None) -> None:
        """Record the job's end."""
        self.state, self.reason, self.exit_code = state, reason, exit_code


def locked_in_thread(
    method: Callable[Concatenate[LocalQueue, P], T],
) -> Callable[Concatenate[LocalQueue, P], Coroutine[Any, Any, T]]:
    """Run a method in a thread, one at a time."""

    async def run(self: LocalQueue, /, *args: P.args, **kwargs: P.kwargs) -> T:
        def locked() -> T:
            with self._lock:
                return method(self, *args, **kwargs)

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
    summary = """The same with processes of this machine as jobs: for laptops, tests, one GPU box.

    Cores and memory of a job default to this machine's, shared by its GPUs. Each job gets GPUs of
    its own; jobs that find none free are pending."""
    of_all_jobs = ("walltime",)
    is_local = True
    launchers = ()
    programs = ("bash", "timeout")
    advice = "nvidia-smi -L"
    job_id = f"${local_processes.JOB}"

    def __init__(
        self, gpus: Sequence[str] | None = None, *, walltime_s: float | None = None
    ) -> None:
        super().__init__()
        self.gpus = None if gpus is None else tuple(gpus)
        self.walltime_s = walltime_s
        self._entries: dict[str, Entry] = {}
        self._cancelled: dict[str, float] = {}  # when it was asked first
        self._lock = threading.Lock()

    def script(self, job: Any, request: Request, preamble: Sequence[str], command: str) -> str:
        """Return the job script, whose second line holds the request."""
        self.refuse_nodes(request)
        asked = {"tag": request.tag, "gpus": request.gpus, "folder": request.folder}
        prologue = filter(None, dask_jobqueue.prologue(job))
        first = job.shebang or "#!/usr/bin/env bash"
        return "\n".join([first, DIRECTIVE + json.dumps(asked), *preamble, *prologue, command, ""])

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
        """Return the largest number of jobs of one submission."""
        return 1000

    # In a thread, one at a time

    @locked_in_thread
    def submit(self, script: str, count: int) -> list[str]:
        """Start `count` jobs, or as many as there are GPUs for; the others wait.

        Raises Refused if a job asks for more GPUs than there are, and QueueError if the script does
        not say what it asks for.
        """
        asked = _read_directive(script)
        if self.gpus is not None and asked["gpus"] > len(self.gpus):
            raise Refused(
                f"a job asks for {asked['gpus']} GPUs, and this machine has {len(self.gpus)} to "
                f"give. Ask for fewer with gpus_per_job. Script kept at {script}"
            )
        submitter = f"{os.getpid()}.{process_start(os.getpid())}"
        ids = [f"{submitter}.{next(_numbers)}" for _ in range(count)]
        new = [Entry(job_id, script, **asked) for job_id in ids]
        self._entries |= dict(zip(ids, new, strict=True))
        self._advance()
        return ids

    @locked_in_thread
    def query(self, ids: Collection[str]) -> dict[str, QueueStatus]:
        """Return the jobs' status, after pending jobs for which there are GPUs were started."""
        found = self._advance()
        seen = {}
        for job_id in ids:
            if job_id in self._entries:
                seen[job_id] = self._show(self._entries[job_id])
            elif job_id in found:
                started = min(process.started for process in found[job_id])
                node = os.uname().nodename
                seen[job_id] = QueueStatus(job_id, QueueState.RUNNING, started=started, nodes=node)
        return seen

    @locked_in_thread
    def departed(self, ids: Collection[str]) -> dict[str, QueueStatus]:
        """Return jobs of a program that has ended, of which no process is left."""
        seen = {}
        for job_id in set(ids) - set(self._entries) - set(local_processes.living()):
            if job_id in self._cancelled:
                seen[job_id] = QueueStatus(job_id, QueueState.CANCELLED, "cancelled")
            elif not _submitter_lives(job_id):
                seen[job_id] = QueueStatus(
                    job_id, QueueState.COMPLETED, "how it ended is not known"
                )
        return seen

    @locked_in_thread
    def cancel(self, ids: Collection[str]) -> None:
        """Send SIGTERM; what is left of the job after 5 s gets SIGKILL."""
        found = local_processes.living()
        for job_id in ids:
            entry = self._entries.get(job_id)
            if entry and entry.state is QueueState.PENDING:
                entry.end(QueueState.CANCELLED, "cancelled")
            if not (entry and entry.state in OVER):
                self._cancelled.setdefault(job_id, time.monotonic())
                local_processes.terminate(found.get(job_id, ()))

    @locked_in_thread
    def tagged(self) -> dict[str, str]:
        """Return tags of jobs of this user and ``HPCDASK_HOME``, and of those that wait here."""
        home = home_folder()
        running = self._advance().items()
        tags = {job_id: found[0].tag for job_id, found in running if found[0].home == home}
        for job_id, entry in self._entries.items():
            if entry.state not in OVER:
                tags[job_id] = entry.tag
        return {job_id: tag for job_id, tag in tags.items() if tag}

    # With the lock

    def _advance(self) -> dict[str, list[local_processes.Process]]:
        """Collect what has ended, kill what should have, start what can start.

        Returns the processes that were found before anything was started.
        """
        now = time.monotonic()
        running = [entry for entry in self._entries.values() if entry.state is QueueState.RUNNING]
        for entry in running:
            assert entry.leader is not None
            if entry.ended is None and entry.leader.poll() is not None:
                entry.ended = now
        found = local_processes.living()
        for job_id, asked in self._cancelled.items():
            if now - asked > KILL_WAIT_S + 1:  # `timeout` was first, where it lives
                local_processes.kill(found.get(job_id, ()))
        for entry in running:
            if entry.ended is not None:
                self._settle(entry, found.get(entry.id, ()), now - entry.ended)
        self._start_pending()
        return found

    def _settle(
        self, entry: Entry, left: Sequence[local_processes.Process], since_s: float
    ) -> None:
        """End a job without its leader as soon as its other processes are gone."""
        if left:
            entry.reason = f"ending: {len(left)} of its processes are left"
            if since_s > KILL_WAIT_S:
                local_processes.kill(left)
            return
        assert entry.leader is not None
        assert entry.ended is not None
        code: int = entry.leader.returncode
        lasted = entry.ended - entry.began
        exit_code = code if code >= 0 else 128 - code
        how = "" if code > 0 else f"killed by {signal_name(-code)}"
        if entry.id in self._cancelled:
            entry.end(QueueState.CANCELLED, "cancelled", exit_code)
        elif code == 0:
            entry.end(QueueState.COMPLETED, exit_code=0)
        elif self.walltime_s and lasted >= self.walltime_s and code in (TIMED_OUT, -signal.SIGKILL):
            code = signal.SIGTERM if code == TIMED_OUT else signal.SIGKILL
            entry.end(QueueState.TIMEOUT, f"walltime of {self.walltime_s:g} s", 128 + code)
        else:
            entry.end(QueueState.FAILED, how, exit_code)

    def _start_pending(self) -> None:
        """Start jobs first come, first served; those that need no GPU never wait."""
        short = ""
        for entry in self._entries.values():
            if entry.state is QueueState.PENDING:
                if not (short and entry.gpus):
                    short = self._start(entry) or short
                if entry.state is QueueState.PENDING:
                    entry.reason = short

    def _start(self, entry: Entry) -> str:
        """Start a job, or return what it waits for."""
        given: dict[str, str] = {}
        locks: list[int] = []
        try:
            if self.gpus is not None:
                locked = local_processes.lock_gpus(self.gpus, entry.gpus) if entry.gpus else []
                entry.held, locks = [uuid for uuid, _ in locked], [file for _, file in locked]
                given["CUDA_VISIBLE_DEVICES"] = ",".join(entry.held)
                if len(locked) < entry.gpus:
                    entry.held = []
                    free = f"{len(locked)} of {len(self.gpus)} GPUs are free, not {entry.gpus}"
                    taken = f"all {len(self.gpus)} GPUs are taken"
                    return f"Resources: {free if locked else taken}"
            entry.began = time.monotonic()  # before `timeout` begins to count
            entry.leader = self._run_job(entry, given, locks)
            entry.state, entry.reason, entry.started = QueueState.RUNNING, "", time.time()
        except (OSError, QueueError) as error:
            entry.end(QueueState.FAILED, f"it cannot be started: {error}")
        finally:
            for lock in locks:
                os.close(lock)  # the job has its own copy
        return ""

    def _run_job(
        self, entry: Entry, given: dict[str, str], locks: list[int]
    ) -> subprocess.Popen[bytes]:
        own = {local_processes.JOB: entry.id, local_processes.TAG: entry.tag}
        own[local_processes.HOME] = home_folder()
        environment = {**os.environ, **given, **own}
        environment["SPT_NOENV"] = "1"  # setproctitle would write over the environment in /proc
        path = os.path.join(entry.folder, f"queue-{entry.id}.log")
        limit = [f"--kill-after={KILL_WAIT_S:g}", f"{self.walltime_s or 0:g}"]
        with open(path, "ab", opener=_private) as output:
            return subprocess.Popen(
                ["timeout", *limit, "bash", entry.script],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                pass_fds=locks,
                start_new_session=True,
            )

    def _show(self, entry: Entry) -> QueueStatus:
        ends = entry.started + self.walltime_s if entry.started and self.walltime_s else None
        return QueueStatus(
            entry.id,
            entry.state,
            entry.reason,
            entry.exit_code,
            started=entry.started,
            ends=ends,
            nodes=os.uname().nodename if entry.started else "",
        )


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _read_directive(script: str) -> dict[str, Any]:
    """Read a script's request: its tag, GPUs and folder."""
    try:
        with open(script, newline="\n") as file:
            lines = [line for line in file if line.startswith(DIRECTIVE)]
        asked = json.loads(lines[0].removeprefix(DIRECTIVE))
        return {"tag": str(asked["tag"]), "gpus": int(asked["gpus"]), "folder": asked["folder"]}
    except (OSError, IndexError, ValueError, KeyError, TypeError) as error:
        raise QueueError(
            f"{script} is not a job script for {LocalQueue.title} ({error}): it needs the line "
            f"that LocalQueue.script writes, which begins with {DIRECTIVE.strip()}"
        ) from None


def _submitter_lives(job_id: str) -> bool:
    pid, _, rest = job_id.partition(".")
    start = rest.partition(".")[0]
    return pid.isdigit() and bool(start) and process_start(int(pid)) == start
