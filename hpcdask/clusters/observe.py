"""Pure fold of the queue's answer and the connected workers into a job."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from hpcdask.jobs.state import OVER, WAITING, JobState
from hpcdask.queues import job_state
from hpcdask.queues.job_state import QueueState, QueueStatus

from .job import DEFAULT_POLICY, Job, Policy, expires

#: Seconds that workers which were connected may be gone: a nanny may start one again in this time.
LOST_AFTER_S = 60.0


def observe(
    job: Job,
    seen: QueueStatus | None,
    *,
    asked: bool,
    workers: Collection[str],
    held: int,
    now: float,
    policy: Policy = DEFAULT_POLICY,
) -> Job:
    """Return the job after a look at queue and workers; the same object if nothing is new.

    `asked` tells whether there was a query, and `seen` is None if it did not show the job.
    `workers` are its connected ones, of earlier lives too. They tell more than the queue, which
    lags, unless it has done with the job.
    """
    lives = {name: int(name.rsplit("-", 2)[1]) for name in workers}
    job = _in_its_present_life(job, seen, lives.values())
    names = frozenset(name for name, life in lives.items() if life == job.restarts)
    if job.state in OVER:
        return _changed(job, workers=names, held=held)
    complete = len(names) >= job.size
    facts: dict[str, Any] = {
        "workers": names,
        "held": held,
        "arrived_at": now if complete and not job.arrived else job.arrived_at,
        "missed": (0 if seen else job.missed + 1) if asked else job.missed,
    }
    # An answer about an earlier life says only that the queue knows the job.
    answer = seen if asked and seen and seen.restarts == job.restarts else None
    if answer and answer.state in job_state.OVER:
        facts |= {"state": JobState(answer.state), "reason": answer.reason}
        return _changed(job, **facts, **_times(job, answer), exit_code=answer.exit_code)
    if asked and not seen and not names and facts["missed"] >= policy.missed_max:
        asked_for = JobState.COMPLETED if job.leaving else JobState.FAILED
        end = JobState.CANCELLED if job.cancelled else asked_for
        return _changed(job, **facts, state=end, reason="the queue no longer knows it")
    facts["stuck"] = answer.stuck if answer else job.stuck
    state = _conclude(job, seen, answer, asked, len(names))
    reason = answer.reason if answer else job.reason if state is job.state else ""
    facts |= {"state": state, "reason": reason}
    facts |= _clocks(job, state, answer, now)
    since = _first(job.incomplete_since, now) if job.arrived and not complete else None
    job = _changed(job, **facts, incomplete_since=since)
    return _changed(job, expiring=expires(job, now, policy), overdue=is_overdue(job, now, policy))


def _in_its_present_life(job: Job, seen: QueueStatus | None, lives: Collection[int]) -> Job:
    """Return the job, or a new one with its id if the queue or a worker shows a restart."""
    newest = max(job.restarts, seen.restarts if seen else 0, *lives)
    if newest > job.restarts or _put_back(job, seen, job.restarts in lives):
        kept: dict[str, Any] = {"restarts": newest, "group": job.group}
        return Job(job.id, job.size, job.submitted, JobState.REQUEUED, **kept)
    return job


def _changed(job: Job, **facts: Any) -> Job:
    old = vars(job)
    for name, value in facts.items():
        if old[name] != value:
            return Job(**(old | facts))  # a third of the time of dataclasses.replace
    return job


def _first(value: float | None, other: float | None) -> float | None:
    return other if value is None else value


def _put_back(job: Job, seen: QueueStatus | None, connected: bool) -> bool:
    """Return whether the queue, which may not count restarts, holds a started job again."""
    if seen is None or seen.restarts < job.restarts or seen.state not in job_state.WAITING:
        return False
    if job.state in OVER:
        return seen.state is QueueState.REQUEUED
    return job.starting_since is not None and not connected and not job.cancelled


def _conclude(
    job: Job, seen: QueueStatus | None, answer: QueueStatus | None, asked: bool, connected: int
) -> JobState:
    """Return the state of a job that is not over: the queue's last word and its workers, folded.

    An `answer` is what the queue says of the job's present life.
    """
    if connected >= job.size:
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
    if said is JobState.UNKNOWN and not connected:
        return JobState.UNKNOWN
    if job.arrived:
        return JobState.RUNNING if job.leaving or job.cancelled else JobState.LOST
    return JobState.STARTING if connected else said


def _times(job: Job, answer: QueueStatus) -> dict[str, Any]:
    return {
        "started": _first(answer.started, job.started),
        "ends": _first(answer.ends, job.ends),
        "nodes": answer.nodes or job.nodes,
    }


def _clocks(job: Job, state: JobState, answer: QueueStatus | None, now: float) -> dict[str, Any]:
    """Return times and nodes of a job that is not over; a waiting job's are estimates at best."""
    if state in WAITING:
        return {}
    facts: dict[str, Any] = {}
    if answer and answer.state is QueueState.RUNNING:
        facts = _times(job, answer)
    if state is not JobState.UNKNOWN:
        facts["started"] = _first(facts.get("started", job.started), now)
        facts["starting_since"] = _first(job.starting_since, now)
    return facts


def is_overdue(job: Job, now: float, policy: Policy) -> bool:
    """Return whether workers did not connect, return or leave in time, or the job is stuck."""
    if job.cancelled:
        return job.overdue
    if job.stuck:
        return True
    if job.state is JobState.LOST or (job.leaving and job.arrived and not job.workers):
        since, patience_s = job.incomplete_since, LOST_AFTER_S
    elif job.state is JobState.STARTING:
        since, patience_s = job.starting_since, policy.start_timeout_s
    else:
        return False
    return since is not None and now - since >= patience_s
