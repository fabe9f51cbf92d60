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
import json
import math
import os
import re
import subprocess
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from hpcdask.errors import Refused
from hpcdask.process import home_folder
from hpcdask.security import private
from hpcdask.spec.parsing import parse_seconds

from .base import Queue, Request
from .helpers import ended, pick, read
from .job_state import OVER, JobState, QueueStatus

JOB, TAG, HOME = "HPCDASK_LOCAL_JOB", "HPCDASK_TAG", "HPCDASK_HOME"
#: Variable with the GPUs that a job was given, which its processes may not all see.
GPUS = "HPCDASK_LOCAL_GPUS"
#: Seconds between SIGTERM and SIGKILL, and between two looks at the jobs.
KILL_WAIT_S, LOOK_S = 5.0, 0.5
#: How the line of a script begins that says, in JSON, what the job asks for.
DIRECTIVE = "#HPCDASK "


@dataclass
class Entry:
    """Job that this process submitted; its `leader` is the process of ``timeout``.

    `exited` is when the leader was seen to have ended, by the monotonic clock.
    """

    status: QueueStatus
    script: str
    asked: Request
    leader: subprocess.Popen[bytes] | None = None
    cancelled: bool = False
    exited: float = 0.0

    def note(self, state: JobState, reason: str = "", **facts: Any) -> None:
        """Change the status."""
        self.status = replace(self.status, state=state, reason=reason, **facts)


class LocalQueue(Queue):
    """This machine as a queue; a thread per submission starts its jobs and notes how they end.

    A job gets as many of the GPUs, given by UUID, as it requests for itself, or waits. With None
    they are not counted, and every job starts at once. A job gets SIGTERM after `walltime_s`, if
    that is given.
    """

    title = "this machine"
    jobqueue = ("local", "LocalJob")
    is_local = True
    launchers = ()
    array_limit = ("", "", 1000)
    programs = ("bash", "timeout")
    job_id = f"${JOB}"

    def __init__(self, gpus: Iterable[str] | None = None, walltime_s: float | None = None) -> None:
        self.gpus = None if gpus is None else list(gpus)
        self.walltime_s = walltime_s
        self._entries: dict[str, Entry] = {}

    def with_directives(self, lines: list[str], job: Any, request: Request) -> list[str]:
        return [DIRECTIVE + json.dumps(asdict(request))]

    @classmethod
    def parse_walltime(cls, text: str) -> timedelta:
        """Read ``90s``, ``5min``, ``1h30m``, ``00:30:00`` or a number of seconds."""
        seconds = parse_seconds(text, "walltime")
        return timedelta.max if seconds is None else timedelta(seconds=seconds)

    async def submit(self, script: str, count: int) -> list[str]:
        asked = Request(**json.loads(re.findall(f"(?m)^{DIRECTIVE}(.*)", await read(script))[0]))
        if self.gpus is not None and asked.gpus > len(self.gpus):
            raise Refused(
                f"a job asks for {asked.gpus} GPUs, and this machine has {len(self.gpus)} to "
                f"give. Ask for fewer with gpus_per_job. Script kept at {script}"
            )
        ids = [f"{os.getpid()}.{os.urandom(4).hex()}" for _ in range(count)]
        new = [Entry(QueueStatus(one, JobState.PENDING), script, asked) for one in ids]
        self._entries |= {entry.status.id: entry for entry in new}
        await asyncio.to_thread(self._advance, new)
        threading.Thread(target=self._watch, args=(new,), name="local jobs", daemon=True).start()
        return ids

    async def query(self, ids: Collection[str]) -> dict[str, QueueStatus]:
        """Return the status of jobs; another process's job runs, or is not known."""
        found, node = await asyncio.to_thread(_living), os.uname().nodename
        jobs = {env[JOB] for _, env in found}
        running = {job: QueueStatus(job, JobState.RUNNING, nodes=node) for job in jobs}
        known = {job: entry.status for job, entry in self._entries.items()}
        return pick(ids, running | known)

    async def cancel(self, ids: Collection[str]) -> None:
        """Send SIGTERM to the processes of jobs; the leaders kill what is left after 5 s."""
        for entry in pick(ids, self._entries).values():
            entry.cancelled = True  # also for a thread that is starting it
            if entry.leader is None:
                entry.note(JobState.CANCELLED, "cancelled")
        for process, env in await asyncio.to_thread(_living):
            if env[JOB] in ids:
                with contextlib.suppress(psutil.Error):
                    process.terminate()
                    process.resume()  # what is stopped ends too

    async def tagged(self) -> dict[str, str]:
        """Return tags of jobs of this user and ``HPCDASK_HOME``, and of those that wait here."""
        found, home = await asyncio.to_thread(_living), home_folder()
        tags = {env[JOB]: env[TAG] for _, env in found if env.get(HOME) == home}
        mine = [one for one in self._entries.values() if one.status.state is JobState.PENDING]
        return tags | {entry.status.id: entry.asked.tag for entry in mine}

    # In threads

    def _watch(self, entries: Collection[Entry]) -> None:
        """Look after the jobs of a submission until all are over."""
        while live := [entry for entry in entries if entry.status.state not in OVER]:
            time.sleep(LOOK_S)
            with contextlib.suppress(OSError):  # such as too many open files for now
                self._advance(live)

    def _advance(self, live: Collection[Entry]) -> None:
        """Note what has ended, kill what has not 5 s after its leader, start what can start."""
        codes = [(one, one.leader.poll()) for one in live if one.leader]
        exits = [(entry, code) for entry, code in codes if code is not None]
        found, now = _living() if exits else [], time.monotonic()
        for entry, code in exits:
            entry.exited = entry.exited or now
            left = [process for process, env in found if env[JOB] == entry.status.id]
            if not left:
                self._settle(entry, code)
            elif now > entry.exited + KILL_WAIT_S:  # a worker's janitor has cleaned up by then
                for process in left:
                    with contextlib.suppress(psutil.Error):
                        process.kill()
        if waiting := [entry for entry in live if not entry.leader]:
            self._start(waiting)

    def _settle(self, entry: Entry, code: int) -> None:
        """Note the end of a job whose processes are all gone; `code` is its leader's."""
        code = 128 - code if code < 0 else code
        state, reason = ended(code)
        if entry.cancelled:
            state, reason = JobState.CANCELLED, "cancelled"
        elif time.time() >= (entry.status.ends or math.inf):
            state, reason = JobState.TIMEOUT, f"walltime of {self.walltime_s:g} s"
        entry.note(state, reason, exit_code=code)

    def _start(self, waiting: Iterable[Entry]) -> None:
        """Start jobs for which there are GPUs, in the order in which they came."""
        with os.fdopen(private.open_lock(f"{private.node_folder('gpus')}/lock")) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # against other programs of this user
            taken = {uuid for _, env in _living() for uuid in env.get(GPUS, "").split(",")}
            free = [uuid for uuid in self.gpus or () if uuid not in taken]
            for entry in waiting:
                if entry.cancelled:
                    entry.note(JobState.CANCELLED, "cancelled")
                elif self.gpus is None or len(free) >= entry.asked.gpus:
                    self._launch(entry, free[: entry.asked.gpus])
                    free = free[entry.asked.gpus :]
                else:
                    some = f"{len(free)} of {len(self.gpus)} GPUs are free, not {entry.asked.gpus}"
                    entry.note(JobState.PENDING, f"Resources: {some}")

    def _launch(self, entry: Entry, gpus: Sequence[str]) -> None:
        """Start a job on these GPUs."""
        job_id, now, limit = entry.status.id, time.time(), self.walltime_s
        own = {JOB: job_id, TAG: entry.asked.tag, HOME: home_folder(), GPUS: ",".join(gpus)}
        own["SPT_NOENV"] = "1"  # setproctitle would write over the environment in /proc
        own |= {} if self.gpus is None else {"CUDA_VISIBLE_DEVICES": own[GPUS]}
        words = ["timeout", "--preserve-status", f"-k{KILL_WAIT_S:g}", f"{limit or 0:g}", "bash"]
        log = os.path.join(entry.asked.folder, f"queue-{job_id}.log")
        try:
            with open(log, "ab", opener=partial(os.open, mode=0o600)) as file:
                entry.leader = leader = subprocess.Popen(
                    [*words, entry.script],
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    env={**os.environ, **own},
                    start_new_session=True,
                )
            # the kernel shows the environment a moment after a process was started
            environ = Path(f"/proc/{leader.pid}/environ")
            while leader.poll() is None and job_id.encode() not in environ.read_bytes():
                time.sleep(0.001)
            if entry.cancelled:  # meanwhile
                leader.terminate()
        except OSError as error:
            entry.note(JobState.FAILED, f"it cannot be started: {error}")
        else:
            ends, node = now + limit if limit else None, os.uname().nodename
            entry.note(JobState.RUNNING, started=now, ends=ends, nodes=node)


def _living() -> list[tuple[psutil.Process, dict[str, str]]]:
    """Return the processes of this user's jobs on this machine, with their environments."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            # psutil takes 40 us to say that a process is another user's, stat 5
            if os.stat(f"/proc/{process.pid}").st_uid == os.geteuid():
                found.append((process, process.environ()))
    return [(process, env) for process, env in found if JOB in env]
