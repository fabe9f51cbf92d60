"""Runs with a scheduler file, for `hpcdask list`: each has a note in the home folder."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcdask.client import scheduler_file
from hpcdask.errors import HpcdaskError
from hpcdask.logs import plural
from hpcdask.process import home_folder
from hpcdask.queues.environment import job_id
from hpcdask.queues.job_state import OVER
from hpcdask.queues.registry import queue_class, system_of_job
from hpcdask.security import private
from hpcdask.spec.records import Record

from .folder import Owner

#: Seconds that a scheduler, and a command of a queueing system, have to answer.
ANSWER_S, QUEUE_S = 2.0, 4.0


@dataclass(frozen=True)
class RunNote(Record):
    """A run, whose rank 0 is `owner`; `queue` and `job` are empty outside of a job.

    `program` is the name of what runs, empty where it is not known. The next run with the same
    scheduler file replaces the note.
    """

    file: str
    address: str
    owner: Owner
    queue: str
    job: str
    created: float
    program: str = ""

    @classmethod
    def of_this(cls, file: str, address: str, program: str) -> RunNote:
        """Return the run of this process."""
        queue, job = system_of_job(os.environ) or "", (job_id() or "").partition(".r")[0]
        now = time.time()
        return cls(os.path.abspath(file), address, Owner.this(), queue, job, now, program)

    @property
    def path(self) -> Path:
        """Return the path of the note."""
        return folder() / f"{hashlib.sha256(os.fsencode(self.file)).hexdigest()[:16]}.json"

    def write(self) -> None:
        """Add the run to the list."""
        private.make_folders(str(folder()))
        private.write_private(str(self.path), json.dumps(self.to_json()))

    def remove(self) -> None:
        """Take the run off the list, unless a later run has its place."""
        if self in listed():
            private.remove(str(self.path))

    async def look(self) -> tuple[str, str]:
        """Return "running", or "dead" or "unknown" and why, as far as is seen from here."""
        lives = self.owner.lives()
        if lives is False:
            return "dead", f"its rank 0 (process {self.owner.pid} on {self.owner.host}) is gone"
        if lives is None:
            lives = await asyncio.to_thread(self._answers)
        if lives:
            return "running", ""
        if await asyncio.to_thread(self._lost_file):
            return "dead", f"{self.file} is gone, and nobody answers at {self.address}"
        if self.queue and self.job:
            with contextlib.suppress(HpcdaskError):
                queue: Any = queue_class(self.queue)()
                queue.timeout_s = QUEUE_S
                seen = (await queue.query([self.job])).get(self.job)
                if seen is None or seen.state in OVER:
                    return "dead", f"its job {self.job} is over"
        return "unknown", f"{self.address} is not reachable from here"

    def _lost_file(self) -> bool:
        """Return whether the scheduler file is gone from a folder that is seen from here."""
        return os.path.isdir(os.path.dirname(self.file)) and not os.path.lexists(self.file)

    def _answers(self) -> bool:
        """Return whether its scheduler can be reached from here."""
        where = scheduler_file.endpoint(self.address)
        with contextlib.suppress(OSError), socket.create_connection(where, timeout=ANSWER_S):
            return True
        return False

    async def clear(self) -> str:
        """Remove note, scheduler file and keys of a run that is dead, and return why it is."""
        state, why = await self.look()
        if state != "dead":
            return ""
        self.remove()
        scheduler_file.remove(self.file, self.address)
        return why

    async def row(self) -> dict[str, Any]:
        """Return the run as a row of `hpcdask list`."""
        (state, why), workers = await self.look(), None
        where = ", ".join(filter(None, [self.program, f"{self.file} on {self.owner.host}"]))
        if state == "running":
            with contextlib.suppress(HpcdaskError, KeyError):
                workers = len(scheduler_file.read(self.file)["hpcdask"]["doors"])
                where = f"{plural(workers, 'worker')}, {where}"
        notes = {"running": where, "dead": f"killed: {why}", "unknown": f"{why}; {where}"}
        return {
            "name": os.path.basename(self.file),
            "id": f"{self.owner.host}-{self.owner.pid}",
            "kind": "run",
            "state": state,
            "queue": self.queue,
            "jobs": 1 if self.job else 0,
            "since": self.created,
            "address": self.address,
            "why": notes[state],
            "host": self.owner.host,
            "file": self.file,
            "program": self.program,
            "workers": workers,
        }


def folder() -> Path:
    """Return the folder of the notes."""
    return Path(home_folder(), "runs")


def listed() -> list[RunNote]:
    """Return the runs that have a note, oldest first."""
    found = []
    for path in folder().glob("*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            found.append(RunNote.from_json(json.loads(private.read(str(path)))))
    return sorted(found, key=lambda one: one.created)
