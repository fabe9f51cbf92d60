"""Job and Policy."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hpcdask.jobs.state import WAITING, JobReport, JobState
from hpcdask.queues.job_state import STUCK
from hpcdask.spec.job import worker_name


@dataclass(frozen=True)
class Job:
    """Job, as the cluster knows it. Times are unix times.

    A job that the queue starts again under the same id counts as a new job.

    Attributes
    ----------
    id
        The queue's id.
    size
        How many workers the job should have.
    submitted
        When it was submitted.
    state
        What follows from the queue's answer and the connected workers.
    reason
        The queue's reason for the state.
    exit_code
        The exit code that the queue reports.
    restarts
        How often the queue has started it again.
    nodes
        The nodes on which it runs.
    started
        When it started, or was first seen running.
    ends
        When it reaches its walltime.
    workers
        Names of the workers that are connected.
    held
        Bytes of results that these workers hold.
    arrived
        Whether all its workers have been connected at one time.
    arrived_at
        When they first were.
    starting_since
        Since when it runs.
    incomplete_since
        Since when workers that were connected are gone.
    missed
        Successive queries that did not show it.
    cancelled
        The queue was asked to cancel it, so it no longer counts.
    leaving
        Its workers are retiring, so it no longer counts.
    expiring
        Its walltime is near, so it no longer counts, even if `held` shrinks.
    overdue
        Its workers did not connect, return or leave in time, or the queue failed to start it and
        holds it.
    group
        The group that it belongs to; empty in a cluster without groups.
    """

    id: str
    size: int
    submitted: float
    state: JobState = JobState.PENDING
    reason: str = ""
    exit_code: int | None = None
    restarts: int = 0
    started: float | None = None
    ends: float | None = None
    nodes: str = ""
    workers: frozenset[str] = frozenset()
    held: int = 0
    arrived: bool = False
    arrived_at: float | None = None
    starting_since: float | None = None
    incomplete_since: float | None = None
    missed: int = 0
    cancelled: bool = False
    leaving: bool = False
    expiring: bool = False
    overdue: bool = False
    group: str = ""

    @property
    def job_id(self) -> str:
        """The id, by the name that dask-jobqueue's jobs have for it."""
        return self.id

    def report(self) -> JobReport:
        """Return what other processes are told of the job."""
        since = self.started or self.submitted
        count = len(self.workers)
        size, nodes, group = self.size, self.nodes, self.group
        return JobReport(self.id, self.state, self.reason, count, size, nodes, since, group)


@dataclass(frozen=True)
class Policy:
    """Limits and patience of a cluster's control.

    A job that the queue says runs has `start_timeout_s` for its workers. Workers that were
    connected and are gone have `lost_after_s`: a nanny may start one again in this time. A job
    whose workers stayed connected for `served_s`, and that then ends by itself with exit code 0,
    has not died: its workers may have a lifetime.

    A job is over when `missed_max` queries in a row do not show it. No more jobs are submitted
    after `failures_max` in a row that fail to start, or `deaths_max` that end against our will
    within `deaths_window_s`; None is the larger of 10 and three times the wanted jobs.

    `walltime_s` is that of the request, for jobs whose end the queue does not tell; None: they have
    no end. Results move between workers at `bandwidth`, in bytes per second. Workers retire at
    least `margin_min_s` before the walltime: schedulers warn up to 60 s early.
    """

    start_timeout_s: float = 300.0
    lost_after_s: float = 60.0
    served_s: float = 60.0
    missed_max: int = 3
    failures_max: int = 3
    deaths_max: int | None = None
    deaths_window_s: float = 3600.0
    walltime_s: float | None = None
    bandwidth: float = 1e9
    margin_min_s: float = 120.0


DEFAULT_POLICY = Policy()


def worker_names(cluster: str, job: Job) -> list[str]:
    """The names that the job's workers have or will have in its present life."""
    return [worker_name(cluster, job.id, job.restarts, number) for number in range(job.size)]


def is_stuck(job: Job) -> bool:
    """Return whether the queue holds a job that it failed to start; a user's hold is not meant."""
    return bool(job.reason) and job.state in WAITING and _STUCK.search(job.reason) is not None


#: SLURM writes such a reason with spaces or underscores.
_STUCK = re.compile("|".join(STUCK).replace(" ", "[ _]"))
