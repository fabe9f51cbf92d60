"""Wanted and known jobs of a group, for those who act on them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

from distributed import Scheduler
from distributed.scheduler import WorkerState

from hpcdask.jobs.state import OVER, WAITING
from hpcdask.spec.job import parse_worker_name
from hpcdask.spec.tags import group_id

from .job import Job, Policy, worker_names


@dataclass(eq=False)
class ClusterState:
    """The jobs of one group of a cluster, over or not, of `size` workers each.

    A cluster without groups is one, whose name is empty. `resources` are those of each worker.
    `emptied`: the user asked for none, so nobody is left to hold results. `closing`: from now on,
    the end of a worker or a job is meant.
    """

    scheduler: Scheduler
    cluster: str
    _: KW_ONLY
    group: str = ""
    size: int
    resources: Mapping[str, float] = field(default_factory=dict)
    policy: Policy
    say: Callable[[str], None]
    jobs: dict[str, Job] = field(default_factory=dict)
    wanted: int = 0
    emptied: bool = False
    closing: bool = False
    _warned: set[str] = field(default_factory=set)

    @property
    def prefix(self) -> str:
        """Return the beginning of the names of the group's workers."""
        return group_id(self.cluster, self.group)

    def want(self, jobs: int) -> None:
        """Wish for this many jobs."""
        self.wanted = jobs
        self.emptied = jobs == 0

    def enter(self, job_id: str) -> None:
        """Add a job that was just submitted."""
        self.jobs[job_id] = Job(job_id, self.size, time.time(), group=self.group)

    def mark(self, job_id: str, **facts: Any) -> None:
        """Note something about a job."""
        self.jobs[job_id] = replace(self.jobs[job_id], **facts)

    def active(self) -> list[Job]:
        """Jobs that are there or asked for, and are to stay; others come for those that expire."""
        return [
            job
            for job in self.jobs.values()
            if job.state not in OVER and not (job.cancelled or job.leaving or job.expiring)
        ]

    def live(self) -> list[str]:
        """Ids of the jobs that are not over."""
        return [job.id for job in self.jobs.values() if job.state not in OVER]

    def names(self) -> list[str]:
        """A name for each worker that is there or asked for, and is to stay."""
        names = [name for job in self.active() for name in worker_names(self.prefix, job)]
        missing = self.wanted * self.size - len(names)
        return names + [f"{self.prefix}-unsubmitted-{number}" for number in range(missing)]

    def job_of(self, name: str) -> str | None:
        """Id of the job that a worker belongs to; None for other people's workers."""
        parsed = parse_worker_name(self.prefix, name)
        return None if parsed is None else parsed[0]

    def connected(self) -> dict[str, list[WorkerState]]:
        """Ids of jobs -> their workers that the scheduler has."""
        found: dict[str, list[WorkerState]] = {}
        for state in self.scheduler.workers.values():
            if job_id := self.job_of(str(state.name)):
                found.setdefault(job_id, []).append(state)
        return found

    def drop(self, names: Collection[str]) -> list[Job]:
        """Want less by the jobs of the named workers, and return those that are to end.

        A job with workers ends if all of them are named. Of others, Dask names any: their number
        counts, and the jobs that would start last go first.
        """
        counting = self.active()
        named = set(names) & set(self.names())
        jobs = []
        for job in counting:
            workers = set(worker_names(self.prefix, job))
            if job.workers and named >= workers:
                jobs.append(job)
                named -= workers
        absent = named.difference(*(job.workers for job in counting))
        surplus = len(absent) // self.size
        unsubmitted = max(0, self.wanted - len(counting))
        idle = [job for job in reversed(counting) if not job.workers]
        idle.sort(key=lambda job: job.state not in WAITING)
        jobs += idle[: max(0, surplus - unsubmitted)]
        self.wanted = len(counting) - len(jobs) + max(0, unsubmitted - surplus)
        return jobs

    def warn(self, subject: str, text: str) -> None:
        """Tell about a state of things once, until `clear_warning`."""
        if subject not in self._warned:
            self._warned.add(subject)
            self.say(f"warning: {text}")

    def clear_warning(self, *subjects: str) -> None:
        """These states of things are over; without any, all."""
        self._warned.difference_update(subjects or tuple(self._warned))
