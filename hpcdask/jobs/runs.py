"""Runs with a scheduler file, for `hpcdask list`: each file has a link in the home folder."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcdask.client import scheduler_file
from hpcdask.errors import HpcdaskError, SchedulerFileError
from hpcdask.logs import plural
from hpcdask.process import home_folder
from hpcdask.queues.job_state import OVER
from hpcdask.queues.registry import queue_class
from hpcdask.security import private

from .folder import Owner

#: Seconds that a scheduler, and a command of a queueing system, have to answer.
ANSWER_S, QUEUE_S = 2.0, 4.0


def enlist(file: str) -> None:
    """Add the run of a scheduler file to the list. Raises OSError."""
    path = link(file)
    private.make_folders(str(path.parent))
    with contextlib.suppress(FileExistsError):
        path.symlink_to(file)


def link(file: str) -> Path:
    """Return the path of the link to a scheduler file."""
    return Path(home_folder(), "runs", hashlib.sha256(os.fsencode(file)).hexdigest()[:16])


def listed() -> list[Run]:
    """Return the runs on the list, oldest first."""
    found = []
    for path in Path(home_folder(), "runs").glob("*"):
        with contextlib.suppress(OSError, SchedulerFileError, KeyError):
            content = scheduler_file.read(file := os.readlink(path))
            own = content["hpcdask"]
            job, workers = (own["job"] or "").partition(".r")[0], len(own.get("doors", ()))
            facts = Owner(own["owner"]), own["queue"], job, own["started"], own["program"], workers
            found.append(Run(file, content["address"], *facts))
    return sorted(found, key=lambda run: run.started)


@dataclass(frozen=True)
class Run:
    """A run with a scheduler file, whose rank 0 is `owner`.

    `queue` and `job` are empty outside of a job, and `program` where it is not known.
    """

    file: str
    address: str
    owner: Owner
    queue: str
    job: str
    started: float
    program: str
    workers: int

    async def look(self) -> tuple[str, str]:
        """Return "running", "dead" or "unknown", as far as is seen from here, and a text on it."""
        host, lives = self.owner.host, self.owner.lives()
        where = ", ".join(filter(None, [self.program, f"{self.file} on {host}"]))
        if lives is False:
            return "dead", f"killed: its rank 0 (process {self.owner.pid} on {host}) is gone"
        if lives is None:
            with contextlib.suppress(OSError):  # TimeoutError is one
                address = scheduler_file.endpoint(self.address)
                _, writer = await asyncio.wait_for(asyncio.open_connection(*address), ANSWER_S)
                writer.close()
                lives = True
        if lives:
            return "running", f"{plural(self.workers, 'worker')}, {where}"
        if self.queue:
            with contextlib.suppress(HpcdaskError):
                queue = queue_class(self.queue)()
                queue.timeout_s = QUEUE_S
                seen = (await queue.query([self.job])).get(self.job)
                if seen is None or seen.state in OVER:
                    return "dead", f"killed: its job {self.job} is over"
        return "unknown", f"{self.address} is not reachable from here; {where}"

    async def clear(self) -> str:
        """Remove scheduler file and keys of a run that is dead, and return why it is."""
        state, why = await self.look()
        if state != "dead":
            return ""
        private.remove(str(link(self.file)))
        scheduler_file.remove(self.file, self.address)
        return why

    async def row(self) -> dict[str, Any]:
        """Return the run as a row of `hpcdask list`."""
        state, why = await self.look()
        return {
            "name": os.path.basename(self.file),
            "id": f"{self.owner.host}-{self.owner.pid}",
            "kind": "run",
            "state": state,
            "queue": self.queue,
            "jobs": 1 if self.job else 0,
            "since": self.started,
            "address": self.address,
            "why": why,
            "host": self.owner.host,
            "file": self.file,
            "program": self.program,
            "workers": self.workers if state == "running" else None,
        }
