"""Pure decisions: what to submit, cancel, retire or give up, from what is wanted and seen.

The caller of `plan` marks the jobs (`cancelled`, `leaving`) and adds new ones before the next call.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from hpcdask.jobs.state import OVER, WAITING, JobState

from .job import Job, Policy, retire_at

#: Seconds for which the workers of a job stayed that has not died if it ends by itself with exit
#: code 0: its workers may have a lifetime.
SERVED_S = 60.0
#: Seconds within which deaths count together.
DEATHS_WINDOW_S = 3600.0


@dataclass(frozen=True)
class History:
    """Record of jobs that went wrong, of which `last` is the last."""

    failed_starts: int = 0  # in a row; an arrival makes it 0
    deaths: tuple[float, ...] = ()  # when jobs ended, or were given up, against our will
    last: Job | None = None


@dataclass(frozen=True)
class Failure:
    """Reason to submit no more jobs; `job` is the last of `count` that went wrong.

    "start": in a row, they failed to start. "budget": all that died within an hour.
    """

    kind: Literal["start", "budget"]
    job: Job
    count: int


@dataclass(frozen=True)
class Actions:
    """Next steps: how many jobs to submit, which to cancel, and which to let hand over and end.

    `failure` is why nothing is submitted although jobs are missing.
    """

    submit: int = 0
    cancel: tuple[str, ...] = ()
    retire: tuple[str, ...] = ()
    failure: Failure | None = None


# What went wrong so far


def record(history: History, before: Job, after: Job, now: float) -> History:
    """Return the history after a job went from `before` to `after`.

    A job that ends, or is given up, before all its workers were connected has failed to start,
    unless somebody cancelled or preempted it. Ends that neither the cluster, the walltime nor a
    preemption brought about are deaths.
    """
    if after.arrived and not (before.arrived and before.restarts == after.restarts):
        history = replace(history, failed_starts=0)
    given_up = after.overdue and not before.overdue and not after.leaving
    ended = after.state in OVER and before.state not in OVER
    if not given_up and (not ended or _in_order(after, now)):
        return history
    failed = history.failed_starts
    failed += not after.arrived and after.state is not JobState.CANCELLED
    return History(failed, (*_recent(history, now), now), after)


def _in_order(job: Job, now: float) -> bool:
    """Return whether a job has ended by the cluster, its walltime, a preemption or a lifetime."""
    if job.cancelled or job.overdue or (job.leaving and not job.expiring):
        return True
    if job.state is JobState.PREEMPTED or job.arrived_at is None:
        return job.state is JobState.PREEMPTED
    if job.state is JobState.COMPLETED and job.exit_code == 0:
        left = now if job.incomplete_since is None else job.incomplete_since
        return job.expiring or left - job.arrived_at >= SERVED_S
    return job.expiring or job.state is JobState.TIMEOUT


def _recent(history: History, now: float) -> tuple[float, ...]:
    return tuple(time for time in history.deaths if now - time < DEATHS_WINDOW_S)


def _failure(history: History, wanted: int, now: float, policy: Policy) -> Failure | None:
    most = max(10, 3 * wanted) if policy.deaths_max is None else policy.deaths_max
    deaths = len(_recent(history, now))
    if history.last and history.failed_starts >= policy.failures_max:
        return Failure("start", history.last, history.failed_starts)
    return Failure("budget", history.last, deaths) if history.last and deaths >= most else None


# What to do


def plan(
    wanted: int,
    jobs: Mapping[str, Job],
    history: History,
    *,
    closable: Sequence[str] = (),
    now: float,
    policy: Policy,
) -> Actions:
    """Return what to do so that `wanted` jobs run; each job is named once at most.

    Jobs that leave, were cancelled or near their walltime do not count. Of those with workers, only
    `closable` ones are given up before their walltime, in this order.
    """
    present = [job for job in jobs.values() if not job.cancelled]
    # what the queue forgot might come back when nobody counts on it any more
    forgotten = [job for job in present if job.state in OVER and job.missed >= policy.missed_max]
    hopeless = forgotten + [job for job in present if job.overdue and job.state not in OVER]
    counting = [job for job in present if job.counts and not job.overdue]
    running = sum(job.state is JobState.RUNNING for job in counting)

    missing = wanted - len(counting)
    failure = _failure(history, wanted, now, policy) if missing > 0 else None
    staying = [job for job in present if not (job.state in OVER or job.overdue or job.leaving)]
    expiring = [job for job in staying if job.expiring]
    ending = _fewer(-missing, counting, closable)
    ending += _hand_over(expiring, wanted - running, now, policy)
    return Actions(
        submit=0 if failure else max(0, missing),
        cancel=tuple(job.id for job in hopeless + [job for job in ending if not job.workers]),
        retire=tuple(job.id for job in ending if job.workers),
        failure=failure,
    )


def _fewer(surplus: int, counting: Sequence[Job], closable: Sequence[str]) -> list[Job]:
    """Return surplus jobs: waiting, starting, then idle ones, the youngest first; no lost ones."""
    idle = [job for job in reversed(counting) if not job.workers]
    waiting = [job for job in idle if job.state in WAITING]
    starting = [job for job in idle if job.state is JobState.STARTING]
    by_id = {job.id: job for job in counting if job.workers}
    running = [by_id[name] for name in closable if name in by_id]
    return [*waiting, *starting, *running][: max(0, surplus)]


def _hand_over(expiring: Sequence[Job], needed: int, now: float, policy: Policy) -> list[Job]:
    """Return the jobs to end before their walltime: those that are due, and replaced ones."""
    times = {job.id: retire_at(job, policy) or math.inf for job in expiring}
    due = [job for job in expiring if times[job.id] <= now and job.workers]
    others = [job for job in expiring if job not in due]
    able = [job for job in others if job.workers or job.state is JobState.STARTING]
    able.sort(key=lambda job: (times[job.id], job.id))
    return due + able[: max(0, len(others) - max(0, needed))]
