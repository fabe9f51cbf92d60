"""Jobs as their cluster knows them, the limits of its control, and the times of their ends."""

from __future__ import annotations

from dataclasses import dataclass

from hpcdask.jobs.state import WAITING, JobReport, JobState
from hpcdask.spec.job import worker_name

#: Bytes per second at which results move between workers.
BANDWIDTH = 1e9
#: Seconds before the walltime at which workers retire at least: schedulers warn up to 60 s early.
MARGIN_MIN_S = 120.0


@dataclass(frozen=True)
class Job:
    """Job, as the cluster knows it. Times are unix times.

    A job that the queue starts again under the same id counts as a new job.
    """

    id: str  #: the queue's id
    size: int  #: workers that the job should have
    submitted: float  #: time of its submission
    state: JobState = JobState.PENDING  #: by the queue's answer and the connected workers
    reason: str = ""  #: the queue's reason for the state
    exit_code: int | None = None  #: exit code that the queue reports
    restarts: int = 0  #: starts by the queue after the first one
    started: float | None = None  #: time at which it started, or was first seen running
    ends: float | None = None  #: time at which it reaches its walltime
    nodes: str = ""  #: nodes on which it runs
    workers: frozenset[str] = frozenset()  #: names of the workers that are connected
    held: int = 0  #: bytes of results that these workers hold
    arrived_at: float | None = None  #: time at which all its workers first were connected
    starting_since: float | None = None  #: time since which it runs
    incomplete_since: float | None = None  #: time since which workers that were connected are gone
    missed: int = 0  #: successive queries that did not show it
    cancelled: bool = False  #: the queue was asked to cancel it, so it no longer counts
    leaving: bool = False  #: its workers are retiring, so it no longer counts
    expiring: bool = False  #: its walltime is near, so it no longer counts, even if `held` shrinks
    stuck: bool = False  #: the queue failed to start it, and holds it
    overdue: bool = False  #: workers did not connect, return or leave in time, or it is stuck
    group: str = ""  #: group that it belongs to; empty in a cluster without groups

    @property
    def arrived(self) -> bool:
        """Return whether all its workers have been connected at one time."""
        return self.arrived_at is not None

    @property
    def job_id(self) -> str:
        """Return the id, by the name that dask-jobqueue's jobs have for it."""
        return self.id

    def report(self) -> JobReport:
        """Return what other processes are told of the job."""
        since = self.started or self.submitted
        count = len(self.workers)
        size, nodes, group = self.size, self.nodes, self.group
        return JobReport(self.id, self.state, self.reason, count, size, nodes, since, group)


@dataclass(frozen=True)
class Policy:
    """Limits and patience of a group's control.

    A job that the queue says runs has `start_timeout_s` for its workers. A job is over when
    `missed_max` queries in a row do not show it. No more jobs are submitted after `failures_max` in
    a row that fail to start, or `deaths_max` that end against our will within an hour; None is the
    larger of 10 and three times the wanted jobs. `walltime_s` is that of the request, for jobs
    whose end the queue does not tell; None: they have no end.
    """

    start_timeout_s: float = 300.0
    missed_max: int = 3
    failures_max: int = 3
    deaths_max: int | None = None
    walltime_s: float | None = None


DEFAULT_POLICY = Policy()


def worker_names(cluster: str, job: Job) -> list[str]:
    """Return the names that the job's workers have or will have in its present life."""
    return [worker_name(cluster, job.id, job.restarts, number) for number in range(job.size)]


def ends_at(job: Job, policy: Policy) -> float | None:
    """Return the unix time of the walltime's end; None if there is none, or the job waits."""
    if job.state in WAITING:
        return None
    if job.ends is not None or job.started is None or policy.walltime_s is None:
        return job.ends
    return job.started + policy.walltime_s


def margin_s(job: Job, policy: Policy) -> float:
    """Return the seconds before the walltime at which the job's workers retire at the latest.

    Twice the time to move their results, at least `MARGIN_MIN_S`, at most a quarter of the
    walltime.
    """
    margin, end = max(MARGIN_MIN_S, 2 * job.held / BANDWIDTH), ends_at(job, policy)
    walltime = policy.walltime_s if end is None or job.started is None else end - job.started
    return margin if walltime is None else min(margin, max(0.0, walltime) / 4)


def retire_at(job: Job, policy: Policy) -> float | None:
    """Return the unix time at which the job's workers retire even without a replacement."""
    end = ends_at(job, policy)
    return None if end is None else end - margin_s(job, policy)


def expires(job: Job, now: float, policy: Policy) -> bool:
    """Return whether the job's replacement is due: one more margin before the job retires."""
    end = None if job.expiring else ends_at(job, policy)
    return job.expiring if end is None else end - now <= 2 * margin_s(job, policy)
