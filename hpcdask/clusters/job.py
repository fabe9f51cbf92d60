"""Jobs of a cluster as values: what queue and workers show of each, and what to do about them.

All functions are pure. The caller of `plan` marks the jobs (`cancelled`, `leaving`) and adds new
ones before the next call.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hpcdask.jobs.state import JobReport
from hpcdask.queues.job_state import OVER, WAITING, JobState, QueueStatus
from hpcdask.spec.names import worker_name
from hpcdask.spec.records import Record

#: Bytes per second at which results move between workers.
BANDWIDTH = 1e9
#: Seconds before the walltime at which workers retire at least: schedulers warn up to 60 s early.
MARGIN_MIN_S = 120.0
#: Seconds that workers which were connected may be gone: a nanny may start one again in this time.
LOST_AFTER_S = 60.0
#: Seconds for which the workers of a job stayed that has not died if it ends by itself with exit
#: code 0: its workers may have a lifetime.
SERVED_S = 60.0
#: Seconds within which deaths count together.
DEATHS_WINDOW_S = 3600.0


#: Jobs that the queue was asked for; None for those that it does not show.
Answer = Mapping[str, QueueStatus | None]


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
    started: float | None = None  #: time at which it was first seen running
    ends: float | None = None  #: time at which it reaches its walltime, by the queue
    nodes: str = ""  #: nodes on which it runs
    workers: frozenset[str] = frozenset()  #: names of the workers that are connected
    held: int = 0  #: bytes of results that these workers hold
    arrived_at: float | None = None  #: time at which all its workers first were connected
    incomplete_since: float | None = None  #: time since which workers that were connected are gone
    missed: int = 0  #: successive queries that did not show it
    cancelled: bool = False  #: the queue was asked to cancel it, so it no longer counts
    leaving: bool = False  #: its workers are retiring, so it no longer counts
    expiring: bool = False  #: its walltime is near, so it no longer counts, even if `held` shrinks
    stuck: bool = False  #: the queue failed to start it, and holds it
    died: float | None = None  #: time at which it ended, or was given up, against our will
    group: str = ""  #: group that it belongs to; empty in a cluster without groups

    @property
    def is_over(self) -> bool:
        """Return whether the job has ended."""
        return self.state in OVER

    @property
    def counts(self) -> bool:
        """Return whether the job is to stay; others come for those that expire."""
        return not (self.is_over or self.cancelled or self.leaving or self.expiring)

    @property
    def job_id(self) -> str:
        """Return the id, by the name that dask-jobqueue's jobs have for it."""
        return self.id

    def worker_names(self, cluster: str) -> list[str]:
        """Return the names that its workers have or will have in its present life."""
        return [worker_name(cluster, self.id, self.restarts, number) for number in range(self.size)]

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
    whose end the queue does not tell.
    """

    start_timeout_s: float = 300.0
    missed_max: int = 3
    failures_max: int = 3
    deaths_max: int | None = None
    walltime_s: float = math.inf


# What a look shows


def observe(job: Job, answer: Answer, held: Mapping[str, int], now: float, policy: Policy) -> Job:
    """Return the job after a look at queue and workers; the same object if nothing is new.

    `held` is the bytes of results on each of its connected workers, by their names, of earlier
    lives too. Workers tell more than the queue, which lags, unless it has done with the job.
    """
    seen, asked = answer.get(job.id), job.id in answer
    lives = {name: int(name.rsplit("-", 2)[1]) for name in held}
    newest = max(job.restarts, seen.restarts if seen else 0, *lives.values())
    revived = job.is_over and bool(lives) and not job.workers  # the queue had forgotten it
    if newest > job.restarts or revived:
        again: dict[str, Any] = {"restarts": newest, "group": job.group}
        job = Job(job.id, job.size, job.submitted, JobState.REQUEUED, **again)
    names = frozenset(name for name, life in lives.items() if life == job.restarts)
    job = _changed(job, workers=names, held=sum(held.values()))
    if job.is_over:
        return job
    if len(names) >= job.size and job.arrived_at is None:
        job = _changed(job, arrived_at=now)
    if asked:
        job = _changed(job, missed=0 if seen else job.missed + 1)
    job = _advance(job, seen, asked, now, policy)
    return replace(job, died=now) if _dies(job, now, policy) else job


def _advance(job: Job, seen: QueueStatus | None, asked: bool, now: float, policy: Policy) -> Job:
    """Return a job that was not over, whose workers are known, after the queue's answer."""
    # An answer about an earlier life says only that the queue knows the job.
    known = seen if seen and seen.restarts == job.restarts else None
    facts: dict[str, Any] = {"reason": known.reason, "stuck": known.stuck} if known else {}
    if known and known.state not in WAITING:  # else they are estimates at best
        facts |= {"ends": known.ends or job.ends, "nodes": known.nodes or job.nodes}
    if known and known.state in OVER:
        return _changed(job, state=known.state, exit_code=known.exit_code, **facts)
    if asked and not job.workers and job.missed >= policy.missed_max:
        state = JobState.COMPLETED if job.leaving else JobState.FAILED
        state = JobState.CANCELLED if job.cancelled else state
        return _changed(job, state=state, reason="the queue no longer knows it")
    state = JobState.UNKNOWN if asked and not seen else job.state
    state = _conclude(job, state, known)
    if not known and state is not job.state:
        facts["reason"] = ""
    if state not in WAITING and state is not JobState.UNKNOWN:
        facts["started"] = job.started or now
    gone = job.arrived_at is not None and len(job.workers) < job.size
    facts["incomplete_since"] = (job.incomplete_since or now) if gone else None
    job = _changed(job, state=state, **facts)
    return _changed(job, expiring=expires(job, now, policy))


def _changed(job: Job, **facts: Any) -> Job:
    return job if vars(job).items() >= facts.items() else replace(job, **facts)


def _conclude(job: Job, said: JobState, known: QueueStatus | None) -> JobState:
    """Return the state of a job that is not over: `said` if workers and queue say no other."""
    if len(job.workers) >= job.size:
        return JobState.RUNNING
    if known and known.state in WAITING:
        said = JobState.REQUEUED if job.restarts else known.state
    elif known:  # on a host that may be dead, too: its workers have to show up
        has_nodes = known.state is JobState.RUNNING or known.nodes or job.started is not None
        said = JobState.STARTING if has_nodes else JobState.UNKNOWN
    if said is JobState.UNKNOWN and not job.workers:
        return said
    if job.arrived_at is not None:
        return JobState.RUNNING if job.leaving or job.cancelled else JobState.LOST
    return JobState.STARTING if job.workers else said


def is_overdue(job: Job, now: float, policy: Policy) -> bool:
    """Return whether a live job's workers did not connect, return or leave in time.

    A job that is stuck is overdue, too.
    """
    if job.is_over:
        return False
    since, patience_s = None, LOST_AFTER_S
    if job.state is JobState.LOST or (job.leaving and not job.workers):
        since = job.incomplete_since
    elif job.state is JobState.STARTING:
        since, patience_s = job.started, policy.start_timeout_s
    return job.stuck or (since is not None and now - since >= patience_s)


# The walltime


def ends_at(job: Job, policy: Policy) -> float:
    """Return the unix time of the walltime's end; infinite without one, or while the job waits."""
    if job.started is None:
        return math.inf
    return job.ends or job.started + policy.walltime_s


def margin_s(job: Job, policy: Policy) -> float:
    """Return the seconds before the walltime at which the job's workers retire at the latest.

    Twice the time to move their results, at least `MARGIN_MIN_S`, at most a quarter of the
    walltime.
    """
    walltime_s = ends_at(job, policy) - (job.started or 0)
    return min(max(MARGIN_MIN_S, 2 * job.held / BANDWIDTH), max(0.0, walltime_s) / 4)


def expires(job: Job, now: float, policy: Policy) -> bool:
    """Return whether the job's replacement is due: one more margin before the job retires."""
    return job.expiring or ends_at(job, policy) - now <= 2 * margin_s(job, policy)


# What went wrong


def _dies(job: Job, now: float, policy: Policy) -> bool:
    """Return whether a job has just ended, or is given up, against our will.

    It has not if the cluster, the walltime or a preemption brought the end about, or its workers
    have served their lifetime.
    """
    if job.died is not None or job.cancelled or (job.leaving and not job.expiring):
        return False
    if is_overdue(job, now, policy):
        return not job.leaving
    if not job.is_over or job.state is JobState.PREEMPTED:
        return False
    if job.arrived_at is None:
        return True
    served = (job.incomplete_since or now) - job.arrived_at >= SERVED_S
    by_itself = job.state is JobState.COMPLETED and job.exit_code == 0 and served
    return not (by_itself or job.expiring or job.state is JobState.TIMEOUT)


def went_wrong(jobs: Collection[Job], now: float) -> tuple[list[Job], list[Job]]:
    """Return the jobs that failed to start in a row, and those that died within an hour."""
    arrived = max((job.arrived_at or 0.0 for job in jobs), default=0.0)
    died = [(job, job.died) for job in jobs if job.died is not None]
    # somebody may have cancelled a job that waited; one that was given up is cancelled here
    bare = [(job, at) for job, at in died if job.cancelled or job.state is not JobState.CANCELLED]
    starts = [job for job, at in bare if at >= arrived and job.arrived_at is None]
    return starts, [job for job, at in died if now - at < DEATHS_WINDOW_S]


# What to do


@dataclass(frozen=True)
class Actions:
    """Next steps: how many jobs to submit, which to cancel, and which to let hand over and end.

    `failed`: nothing is submitted although jobs are missing, since too much went wrong.
    """

    submit: int = 0
    cancel: tuple[str, ...] = ()
    retire: tuple[str, ...] = ()
    failed: bool = False


def plan(
    wanted: int, jobs: Collection[Job], now: float, policy: Policy, idle: Sequence[str] = ()
) -> Actions:
    """Return what to do so that `wanted` jobs run; each job is named once at most.

    Jobs that leave, were cancelled or near their walltime do not count. Of those with workers, the
    `idle` ones are given up first, in this order.
    """
    present = [job for job in jobs if not job.cancelled]
    # what the queue forgot might come back when nobody counts on it any more
    forgotten = [job for job in present if job.is_over and job.missed >= policy.missed_max]
    late = {job.id for job in present if is_overdue(job, now, policy)}
    hopeless = forgotten + [job for job in present if job.id in late]
    staying = [job for job in present if not (job.is_over or job.leaving or job.id in late)]
    counting = [job for job in staying if not job.expiring]
    running = sum(job.state is JobState.RUNNING for job in counting)

    missing = wanted - len(counting)
    deaths_max = max(10, 3 * wanted) if policy.deaths_max is None else policy.deaths_max
    starts, died = went_wrong(jobs, now)
    too_many = len(died) >= deaths_max or len(starts) >= policy.failures_max
    ending = _fewer(-missing, counting, idle)
    expiring = [job for job in staying if job.expiring]
    ending += _hand_over(expiring, wanted - running, now, policy)
    return Actions(
        submit=0 if too_many else max(0, missing),
        cancel=tuple(job.id for job in hopeless + [job for job in ending if not job.workers]),
        retire=tuple(job.id for job in ending if job.workers),
        failed=too_many and missing > 0,
    )


def _fewer(surplus: int, counting: Sequence[Job], idle: Sequence[str]) -> list[Job]:
    """Return surplus jobs: waiting, starting, the youngest first, then idle ones; no lost ones."""
    empty = [job for job in reversed(counting) if not job.workers]
    waiting = [job for job in empty if job.state in WAITING]
    starting = [job for job in empty if job.state is JobState.STARTING]
    order = {job_id: number for number, job_id in enumerate(idle)}
    running = sorted(
        (job for job in counting if job.workers),
        key=lambda job: (order.get(job.id, len(order)), job.held),
    )
    return [*waiting, *starting, *running][: max(0, surplus)]


def _hand_over(expiring: Sequence[Job], needed: int, now: float, policy: Policy) -> list[Job]:
    """Return the jobs to end before their walltime: those that are due, and replaced ones."""
    held = [job for job in expiring if job.workers]
    due = [job for job in held if ends_at(job, policy) - now <= margin_s(job, policy)]
    others = [job for job in expiring if job not in due]
    able = [job for job in others if job.workers or job.state is JobState.STARTING]
    able.sort(key=lambda job: (ends_at(job, policy), job.id))
    return due + able[: max(0, len(others) - max(0, needed))]
