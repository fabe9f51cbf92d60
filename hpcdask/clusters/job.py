"""Jobs as their cluster knows them: what a look at the queue and the workers makes of each."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from hpcdask.jobs.state import OVER, WAITING, JobReport, JobState
from hpcdask.queues import job_state
from hpcdask.queues.job_state import QueueState, QueueStatus
from hpcdask.spec.names import worker_name
from hpcdask.spec.records import Record

#: Bytes per second at which results move between workers.
BANDWIDTH = 1e9
#: Seconds before the walltime at which workers retire at least: schedulers warn up to 60 s early.
MARGIN_MIN_S = 120.0
#: Seconds that workers which were connected may be gone: a nanny may start one again in this time.
LOST_AFTER_S = 60.0


@dataclass(frozen=True)
class Job(Record):
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

    def __post_init__(self) -> None:
        object.__setattr__(self, "state", JobState(self.state))  # a text in JSON, and a list
        object.__setattr__(self, "workers", frozenset(self.workers))

    @property
    def arrived(self) -> bool:
        """Return whether all its workers have been connected at one time."""
        return self.arrived_at is not None

    @property
    def counts(self) -> bool:
        """Return whether the job is to stay; others come for those that expire."""
        ends = self.cancelled or self.leaving or self.expiring
        return not (ends or self.state in OVER)

    @property
    def job_id(self) -> str:
        """Return the id, by the name that dask-jobqueue's jobs have for it."""
        return self.id

    def report(self) -> JobReport:
        """Return what other processes are told of the job."""
        since, count = self.started or self.submitted, len(self.workers)
        state = (self.state, self.reason, count, self.size, self.nodes)
        return JobReport(self.id, *state, since, self.group)


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


def worker_names(cluster: str, job: Job) -> list[str]:
    """Return the names that the job's workers have or will have in its present life."""
    return [worker_name(cluster, job.id, job.restarts, number) for number in range(job.size)]


# The end of a job


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
    due = retire_at(job, policy)
    return job.expiring or (due is not None and due - now <= margin_s(job, policy))


def is_overdue(job: Job, now: float, policy: Policy) -> bool:
    """Return whether workers did not connect, return or leave in time, or the job is stuck."""
    if job.cancelled:
        return job.overdue
    since, patience_s = None, LOST_AFTER_S
    if job.state is JobState.LOST or (job.leaving and job.arrived and not job.workers):
        since = job.incomplete_since
    elif job.state is JobState.STARTING:
        since, patience_s = job.starting_since, policy.start_timeout_s
    return job.stuck or (since is not None and now - since >= patience_s)


# What a look shows


def observe(
    job: Job,
    seen: QueueStatus | None,
    *,
    asked: bool,
    workers: Collection[str],
    held: int,
    now: float,
    policy: Policy,
) -> Job:
    """Return the job after a look at queue and workers; the same object if nothing is new.

    `asked` tells whether there was a query, and `seen` is None if it did not show the job.
    `workers` are its connected ones, of earlier lives too. They tell more than the queue, which
    lags, unless it has done with the job.
    """
    lives = {name: int(name.rsplit("-", 2)[1]) for name in workers}
    newest = max(job.restarts, seen.restarts if seen else 0, *lives.values())
    if newest > job.restarts or _put_back(job, seen, job.restarts in lives.values()):
        again: dict[str, Any] = {"restarts": newest, "group": job.group}
        job = Job(job.id, job.size, job.submitted, JobState.REQUEUED, **again)
    names = frozenset(name for name, life in lives.items() if life == job.restarts)
    job = _changed(job, workers=names, held=held)
    if job.state in OVER:
        return job
    complete = len(names) >= job.size
    if complete and not job.arrived:
        job = _changed(job, arrived_at=now)
    if asked:
        job = _changed(job, missed=0 if seen else job.missed + 1)
    # An answer about an earlier life says only that the queue knows the job.
    answer = seen if asked and seen and seen.restarts == job.restarts else None
    if answer and answer.state in job_state.OVER:
        end = {"reason": answer.reason, "exit_code": answer.exit_code, **_times(job, answer)}
        return _changed(job, state=JobState(answer.state), **end)
    if asked and not names and job.missed >= policy.missed_max:
        state = JobState.COMPLETED if job.leaving else JobState.FAILED
        state = JobState.CANCELLED if job.cancelled else state
        return _changed(job, state=state, reason="the queue no longer knows it")
    state = _conclude(job, seen, answer, asked)
    reason = answer.reason if answer else job.reason if state is job.state else ""
    facts: dict[str, Any] = {"state": state, "reason": reason}
    if answer:
        facts["stuck"] = answer.stuck
    if state not in WAITING:  # a waiting job's times are estimates at best
        if answer and answer.state is QueueState.RUNNING:
            facts |= _times(job, answer)
        if state is not JobState.UNKNOWN:
            facts["started"] = _first(facts.get("started", job.started), now)
            facts["starting_since"] = _first(job.starting_since, now)
    gone = job.arrived and not complete
    facts["incomplete_since"] = _first(job.incomplete_since, now) if gone else None
    job = _changed(job, **facts)
    return _changed(job, expiring=expires(job, now, policy), overdue=is_overdue(job, now, policy))


def _changed(job: Job, **facts: Any) -> Job:
    return job if vars(job).items() >= facts.items() else replace(job, **facts)


def _first(value: float | None, other: float | None) -> float | None:
    return other if value is None else value


def _times(job: Job, answer: QueueStatus) -> dict[str, Any]:
    started, ends = _first(answer.started, job.started), _first(answer.ends, job.ends)
    return {"started": started, "ends": ends, "nodes": answer.nodes or job.nodes}


def _put_back(job: Job, seen: QueueStatus | None, connected: bool) -> bool:
    """Return whether the queue, which may not count restarts, holds a started job again."""
    if seen is None or seen.restarts < job.restarts or seen.state not in job_state.WAITING:
        return False
    if job.state in OVER:
        return seen.state is QueueState.REQUEUED
    return job.starting_since is not None and not connected and not job.cancelled


def _conclude(
    job: Job, seen: QueueStatus | None, answer: QueueStatus | None, asked: bool
) -> JobState:
    """Return the state of a job that is not over, by `answer` on its present life and workers."""
    if len(job.workers) >= job.size:
        return JobState.RUNNING
    if answer is None:
        said = JobState.UNKNOWN if asked and seen is None else job.state
    elif answer.state in job_state.WAITING:
        again = job.restarts > 0 or job.state is JobState.REQUEUED
        said = JobState.REQUEUED if again else JobState(answer.state)
    elif answer.state is QueueState.UNKNOWN and not answer.nodes and job.starting_since is None:
        said = JobState.UNKNOWN  # the queue has it; its word for the state is not known here
    else:  # unknown, such as on a dead host, as well: its workers have to show up
        said = JobState.STARTING
    if said is JobState.UNKNOWN and not job.workers:
        return JobState.UNKNOWN
    if job.arrived:
        return JobState.RUNNING if job.leaving or job.cancelled else JobState.LOST
    return JobState.STARTING if job.workers else said
