"""Keeps in the cluster's folder how its jobs are, where `hpcdask jobs` reads it."""

from __future__ import annotations

import asyncio
import contextlib
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

    state: ClusterState
    folder: ClusterFolder
    _jobs: list[Job] = field(default_factory=list)
    _reports: list[JobReport] = field(default_factory=list)
    _task: asyncio.Task[None] | None = None

    def publish(self) -> None:
        """Begin to write if there is anything new, and do not wait for it."""
        jobs = list(self.state.jobs.values())
        if jobs == self._jobs:  # most are the same objects
            return
        self._jobs = jobs
        reports = [job.report() for job in jobs if job.state not in OVER]
        if reports != self._reports:
            self._reports = reports
            if self._task is None or self._task.done():
                self._task = asyncio.create_task(self._write())

    async def _write(self) -> None:
        written = None
        while written is not self._reports:
            written = self._reports
            try:
                await asyncio.to_thread(self.folder.write_reports, written)
                self.state.clear_warning("reports")
            except Exception as error:  # the jobs go on without
                if not self.state.closing:
                    self.state.warn("reports", f"hpcdask jobs cannot be told of the jobs: {error}")
            await asyncio.sleep(PAUSE_S)

    async def forget(self) -> None:
        """Have the queue's word count from now on, as nobody watches these jobs any more."""
        with contextlib.suppress(
            OSError, RuntimeError
        ):  # at the end of Python there are no threads
            await asyncio.to_thread(self.folder.write_reports, [])

    def stop(self) -> list[asyncio.Task[None]]:
        """Give up what is under way, and return it to be awaited."""
        if self._task is None:
            return []
        self._task.cancel()
        return [self._task]
