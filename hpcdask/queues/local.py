"""Processes of this machine as jobs: for laptops, tests and single GPU boxes.

A job is a session of processes under coreutils' ``timeout``, which ends them at the walltime, and
kills what is left 5 s after a SIGTERM even when the one who sent it is gone by then. Its processes
carry its id, tag and GPUs in their environment, where the user's other programs find them. Pending
jobs exist only in the process that submitted them, where a thread starts them, and end with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import json
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from hpcdask.errors import Refused, UsageError
from hpcdask.process import home_folder, process_start
from hpcdask.security import private

from .base import Queue, Request
from .helpers import ended, pick, read
from .job_state import OVER, QueueState, QueueStatus
from .registry import requested_gpus
from .script import render

JOB, TAG, HOME = "HPCDASK_LOCAL_JOB", "HPCDASK_TAG", "HPCDASK_HOME"
#: Variable with the GPUs that a job was given, which its processes may not all see.
GPUS = "HPCDASK_LOCAL_GPUS"
#: Seconds between SIGTERM and SIGKILL, and between two looks at the jobs.
KILL_WAIT_S, LOOK_S = 5.0, 0.5
#: How the line of a script begins that says, in JSON, what the job asks for.
DIRECTIVE = "#HPCDASK "
_numbers = itertools.count()


@dataclass
class Entry:
    """Job that this process submitted; its `leader` is the process of ``timeout``."""

    status: QueueStatus
    script: str
    tag: str
    gpus: int
    folder: str
    leader: subprocess.Popen[bytes] | None = None
    cancelled: bool = False

    def cancel(self) -> None:
        """Take the end of the job for a cancellation; a pending one ends now."""
        self.cancelled = True
        if self.status.state is QueueState.PENDING:
            self.note(QueueState.CANCELLED, "cancelled")

    def note(self, state: QueueState, reason: str = "", **facts: Any) -> None:
        """Change the status."""
        self.status = replace(self.status, state=state, reason=reason, **facts)


class LocalQueue(Queue):
    """This machine as a queue, and a thread that starts its jobs and notes how they end.

    A job gets as many of the GPUs, given by UUID, as it requests for itself, or waits. With None
    they are not counted, and every job starts at once. A job gets SIGTERM after `walltime_s`, if
    that is given.
    """

    title = "this machine"
    jobqueue = ("local", "LocalJob")
    of_all_jobs = ("walltime",)
    is_local = True
    launchers = ()
    array_limit = ("", "", 1000)
    programs = ("bash", "timeout")
    advice = "nvidia-smi -L"
    job_id = f"${JOB}"

    def __init__(self, gpus: Iterable[str] | None = None, walltime_s: float | None = None) -> None:
        super().__init__()
        self.gpus = None if gpus is None else list(gpus)
        self.walltime_s = walltime_s
        self._entries: dict[str, Entry] = {}
        self._ending: dict[str, float] = {}  # since when, by the monotonic clock
        self._lock, self._watched = threading.Lock(), False

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

        if (seconds := parse_seconds(text, "walltime")) is None:
            raise UsageError(f"walltime: {text!r} is not a time. For no limit, leave walltime out")
        return timedelta(seconds=seconds)

    async def submit(self, script: str, count: int) -> list[str]:
        lines = (await read(script)).split("\n")
        line = next(line for line in lines if line.startswith(DIRECTIVE))
        asked = json.loads(line.removeprefix(DIRECTIVE))
        if self.gpus is not None and asked["gpus"] > len(self.gpus):
            raise Refused(
                f"a job asks for {asked['gpus']} GPUs, and this machine has {len(self.gpus)} to "
                f"give. Ask for fewer with gpus_per_job. Script kept at {script}"
            )
        submitter = f"{os.getpid()}.{process_start(os.getpid())}"
        ids = [f"{submitter}.{next(_numbers)}" for _ in range(count)]
        for job_id in ids:
            self._entries[job_id] = Entry(QueueStatus(job_id, QueueState.PENDING), script, **asked)
        await asyncio.to_thread(self._act)
        return ids

    async def query(self, ids: Collection[str]) -> dict[str, QueueStatus]:
        """Return the status of jobs; another process's job runs, or is not known."""
        found, node = await asyncio.to_thread(_living), os.uname().nodename
        running = {job: QueueStatus(job, QueueState.RUNNING, nodes=node) for job in found}
        known = {job: entry.status for job, entry in self._entries.items()}
        return pick(ids, running | known)

    async def cancel(self, ids: Collection[str]) -> None:
        """Send SIGTERM to the leaders of jobs, which kill what is left after 5 s."""
        await asyncio.to_thread(self._act, ids)

    async def tagged(self) -> dict[str, str]:
        """Return tags of jobs of this user and ``HPCDASK_HOME``, and of those that wait here."""
        found, home = await asyncio.to_thread(_living), home_folder()
        envs = {job_id: some[0].environ for job_id, some in found.items()}
        tags = {job_id: env[TAG] for job_id, env in envs.items() if env.get(HOME) == home}
        return tags | {entry.status.id: entry.tag for entry in self._live()}

    def _live(self) -> list[Entry]:
        return [entry for entry in self._entries.values() if entry.status.state not in OVER]

    # In threads

    def _act(self, cancelled: Collection[str] = ()) -> None:
        """Cancel jobs, start what can start, and look after the jobs from now on."""
        with self._lock:
            found = _living() if cancelled else {}
            for job_id in cancelled:
                if entry := self._entries.get(job_id):
                    entry.cancel()
                processes = found.get(job_id, [])
                leaders = [one for one in processes if one.name == "timeout"]
                _send(signal.SIGTERM, leaders or processes)
                self._ending.setdefault(job_id, time.monotonic())
            self._advance()
            if not self._watched:
                self._watched = True
                threading.Thread(target=self._watch, name="local jobs", daemon=True).start()

    def _watch(self) -> None:
        """Look after the jobs until all are over."""
        while self._watched:
            time.sleep(LOOK_S)
            with self._lock, contextlib.suppress(OSError):  # such as too many open files for now
                self._advance()
                self._watched = bool(self._ending or self._live())

    def _advance(self) -> None:
        """Collect what has ended, kill what should have, start what can start."""
        live = self._live()
        codes = {one.status.id: one.leader.poll() for one in live if one.leader}
        exited = {job_id: code for job_id, code in codes.items() if code is not None}
        for job_id in exited:
            self._ending.setdefault(job_id, time.monotonic())
        found = _living() if self._ending else {}
        self._ending = {job: since for job, since in self._ending.items() if job in found}
        for job, since in self._ending.items():
            if time.monotonic() - since > KILL_WAIT_S + 1:  # `timeout` was first, where it lives
                _send(signal.SIGKILL, found[job])
        for job_id in exited.keys() - found.keys():
            self._settle(self._entries[job_id], exited[job_id])
        if waiting := [entry for entry in live if entry.status.state is QueueState.PENDING]:
            self._start_all(waiting)

    def _settle(self, entry: Entry, code: int) -> None:
        """Note the end of a job whose processes are all gone; `code` is its leader's."""
        code = 128 - code if code < 0 else code
        state, reason = ended(code)
        if entry.cancelled:
            state, reason = QueueState.CANCELLED, "cancelled"
        elif time.time() >= (entry.status.ends or math.inf):
            state, reason = QueueState.TIMEOUT, f"walltime of {self.walltime_s:g} s"
        entry.note(state, reason, exit_code=code)

    def _start_all(self, waiting: Iterable[Entry]) -> None:
        """Start jobs for which there are GPUs: first come, first served."""
        with os.fdopen(private.open_lock(f"{private.node_folder('gpus')}/lock")) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # against other programs of this user
            living = itertools.chain(*_living().values())
            taken = {uuid for one in living for uuid in one.environ.get(GPUS, "").split(",")}
            gpus, short = self.gpus or [], ""
            free = [uuid for uuid in gpus if uuid not in taken]
            for entry in waiting:
                if self.gpus is not None and len(free) < entry.gpus:
                    some = f"{len(free)} of {len(gpus)} GPUs are free, not {entry.gpus}"
                    short = f"Resources: {some}"
                if short and entry.gpus:  # those that need no GPU never wait
                    entry.note(QueueState.PENDING, short)
                else:
                    self._start(entry, free[: entry.gpus])
                    free = free[entry.gpus :]

    def _start(self, entry: Entry, gpus: Sequence[str]) -> None:
        """Start a job on these GPUs."""
        job_id, now, limit = entry.status.id, time.time(), self.walltime_s
        own = {JOB: job_id, TAG: entry.tag, HOME: home_folder(), GPUS: ",".join(gpus)}
        own["SPT_NOENV"] = "1"  # setproctitle would write over the environment in /proc
        own |= {} if self.gpus is None else {"CUDA_VISIBLE_DEVICES": own[GPUS]}
        words = ["timeout", "--preserve-status", f"-k{KILL_WAIT_S:g}", f"{limit or 0:g}", "bash"]
        path = os.path.join(entry.folder, f"queue-{job_id}.log")
        try:
            with open(path, "ab", opener=lambda name, flags: os.open(name, flags, 0o600)) as output:
                entry.leader = leader = subprocess.Popen(
                    [*words, entry.script],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env={**os.environ, **own},
                    start_new_session=True,
                )
            # the kernel shows the environment a moment after a process was started
            environ = Path(f"/proc/{leader.pid}/environ")
            while leader.poll() is None and job_id.encode() not in environ.read_bytes():
                time.sleep(0.001)
        except OSError as error:
            entry.note(QueueState.FAILED, f"it cannot be started: {error}")
        else:
            ends, node = now + limit if limit else None, os.uname().nodename
            entry.note(QueueState.RUNNING, started=now, ends=ends, nodes=node)


class Living(NamedTuple):
    """Process of a job."""

    process: psutil.Process
    name: str
    environ: dict[str, str]


def _living() -> dict[str, list[Living]]:
    """Return the processes of this user's jobs on this machine, by their jobs' ids."""
    found: dict[str, list[Living]] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.uids().effective == os.geteuid():  # root could read everybody's
                environ = process.environ()
                if JOB in environ:
                    found.setdefault(environ[JOB], []).append(
                        Living(process, process.name(), environ)
                    )
    return found


def _send(number: int, processes: Iterable[Living]) -> None:
    for one in processes:
        with contextlib.suppress(psutil.Error):
            one.process.send_signal(number)
