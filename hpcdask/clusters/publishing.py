"""Keeps in the cluster's folder how its jobs are, where `hpcdask jobs` reads it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from hpcdask.jobs.folder import ClusterFolder
from hpcdask.jobs.state import OVER, JobReport

from .job import Job
from .state import ClusterState

#: Seconds between two writings, as many workers may come at once.
PAUSE_S = 0.5


@dataclass
class JobPublisher:
    """Writes the reports of a cluster's jobs when they change, in a thread and one at a time."""

    groups: Sequence[ClusterState]
    folder: ClusterFolder
    _jobs: list[Job] = field(default_factory=list)
    _reports: list[JobReport] = field(default_factory=list)
    _doors: dict[str, str] = field(default_factory=dict)
    _task: asyncio.Task[None] | None = None

    def publish(self) -> None:
        """Begin to write if there is anything new, and do not wait for it."""
        jobs = [job for state in self.groups for job in state.jobs.values()]
        if jobs == self._jobs:  # most are the same objects
            return
        self._jobs = jobs
        reports = [job.report() for job in jobs if job.state not in OVER]
        doors = self._known_doors()
        if reports != self._reports or doors != self._doors:
            self._reports, self._doors = reports, doors
            if self._task is None or self._task.done():
                self._task = asyncio.create_task(self._write())

    def _known_doors(self) -> dict[str, str]:
        """The nannies of workers that are or were there, while their jobs are not over."""
        workers = self.groups[0].scheduler.workers.values()
        there = [(state, set(state.live())) for state in self.groups]
        doors = self._doors | {str(one.name): one.nanny or "" for one in workers}
        return {
            name: at
            for name, at in doors.items()
            if any(state.job_of(name) in live for state, live in there)
        }

    async def _write(self) -> None:
        written = None
        while written is not self._reports:
            written = self._reports
            try:
                await asyncio.to_thread(self.folder.write_reports, written)
                address = self.groups[0].scheduler.address
                await asyncio.to_thread(self.folder.write_doors, address, self._doors)
                self.groups[0].clear_warning("reports")
            except RuntimeError:  # at the end of Python there are no threads
                return
            except Exception as error:  # the jobs go on without
                if not self.groups[0].closing:
                    text = f"hpcdask jobs cannot be told of the jobs: {error}"
                    self.groups[0].warn("reports", text)
            await asyncio.sleep(PAUSE_S)

    async def forget(self) -> None:
        """Publish that no cluster watches these jobs any more: the queue's word counts."""
        with contextlib.suppress(OSError, RuntimeError):
            await asyncio.to_thread(self.folder.write_reports, [])

    def stop(self) -> list[asyncio.Task[None]]:
        """Give up what is under way, and return it to be awaited."""
        if self._task is None:
            return []
        self._task.cancel()
        return [self._task]
