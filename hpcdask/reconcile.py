"""What to submit, cancel, retire or give up, from what is wanted and seen: pure decisions.

A `Job` is what is known of one job. `observe` folds into it what a query of the queue showed and
which of its workers are connected; `record` counts in a `History` what that says about failures;
`plan` compares all jobs with the number that is wanted. The caller carries out the `Actions`, marks
the jobs (`cancelled`, `leaving`) and adds the new ones before it plans again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from .queues.job_state import OVER, PAUSED, WAITING, Seen, State
from .spec.job import worker_name

#: Fraction of the golden ratio: its multiples, modulo 1, spread evenly however many are taken.
GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class Job:
    """All that is known of one job. Times are unix times.

    A job that the queue starts again under the same id begins a new life: everything but its id,
    size, time of submission and restart count is as for a new job.

    Attributes
    ----------
    id
        As the queue calls it.
    size
        Workers it should have, on all its nodes together.
    submitted
        When it was submitted.
    state, reason, exit_code, restarts, nodes
        As in `Seen`, with what its workers tell.
    started, ends
        When it started and reaches its walltime. A queue that does not tell the start gets the time
        of the first sight.
    workers
        Names of its connected workers of its present life.
    held
        Bytes of results that its workers hold.
    arrived
        All its workers were connected at some time in its present life.
    arrived_at
        When that was first so.
    starting_since
        Since when it is seen to run and not suspended, by the clock of `observe`.
    incomplete_since
        Since when workers that were connected are gone.
    missed
        Queries in a row that did not show it.
    cancelled
        Set by the caller: the queue was asked to cancel it.
    leaving
        Set by the caller: its workers are retiring, before the walltime or because the job is too
        many. It no longer counts.
    expiring
        Its walltime is near: it no longer counts, so that its replacement is requested. Stays set,
        because a margin that shrinks with `held` must not bring it back.
    overdue
        It waited too long for workers that did not come, come back or, when leaving, go.
    """

    id: str
    size: int
    submitted: float
    state: State = State.PENDING
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


@dataclass(frozen=True)
class Policy:
    """How patient to be.

    Attributes
    ----------
    start_timeout_s
        For the workers of a job that the queue says runs.
    lost_after_s
        For workers that were connected and are gone: a nanny may start one again in this time.
    served_s
        A job whose workers stayed connected for this time, and that then ends by itself with exit
        code 0, has not died: its workers may have a lifetime.
    missed_max
        Queries in a row that must not show a job before it is over.
    failures_max
        Jobs in a row that fail to start before no more are submitted.
    deaths_max
        Jobs that may end against our will within `deaths_window_s` before no more are submitted.
        None is the larger of 10 and three times the wanted jobs.
    deaths_window_s
        See `deaths_max`.
    walltime_s
        Of the request, for jobs whose end the queue does not tell. None: they have no end.
    bandwidth
        Bytes per second at which results move between workers.
    margin_min_s
        Least time before the walltime at which workers retire. Schedulers warn up to 60 s early.
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


@dataclass(frozen=True)
class History:
    """What is remembered of jobs that went wrong.

    Attributes
    ----------
    failed_starts
        Jobs in a row that failed to start; an arrival makes it 0.
    failed
        The last of them.
    deaths
        Times at which jobs ended, or were given up, against our will; failed starts included.
    died
        The last of those.
    """

    failed_starts: int = 0
    failed: Job | None = None
    deaths: tuple[float, ...] = ()
    died: Job | None = None


@dataclass(frozen=True)
class Failure:
    """Why no more jobs are submitted.

    Attributes
    ----------
    kind
        "start": `count` jobs in a row failed to start. "budget": `count` jobs ended against our
        will within the policy's window.
    job
        The last of them.
    count
        See `kind`.
    """

    kind: Literal["start", "budget"]
    job: Job
    count: int


@dataclass(frozen=True)
class Actions:
    """What to do now.

    Attributes
    ----------
    submit
        Jobs to submit.
    cancel
        Ids of jobs to cancel.
    retire
        Ids of jobs whose workers hand over what they hold and end, all of them.
    failure
        Why nothing is submitted although jobs are missing.
    """

    submit: int = 0
    cancel: tuple[str, ...] = ()
    retire: tuple[str, ...] = ()
    failure: Failure | None = None


# Names of workers


def worker_names(cluster: str, job: Job) -> list[str]:
    """The names that the job's workers have or will have in its present life."""
    return [worker_name(cluster, job.id, job.restarts, number) for number in range(job.size)]


# What is known of one job


def observe(
    job: Job,
    seen: Seen | None,
    *,
    asked: bool,
    workers: Collection[str],
    held: int,
    now: float,
    policy: Policy = DEFAULT_POLICY,
) -> Job:
    """The job after a look at the queue and at its workers.

    Parameters
    ----------
    job
        As it was.
    seen
        How the query showed it; None if it did not.
    asked
        Whether there was a query. Without one, only the workers are new.
    workers
        Names of this job's connected workers, of earlier lives too.
    held
        Bytes of results that they hold.
    now
        Unix time.
    policy
        `missed_max`, the timeouts and what `retire_at` needs.

    Returns
    -------
    Job
        The same object if nothing is new. What the queue has done with stays over, unless the
        queue starts it again. Otherwise a connected worker tells more than the queue, which lags.
    """
    lives = {name: _restarts(name) for name in workers}
    newest = max(job.restarts, seen.restarts if seen else 0, *lives.values())
    if newest > job.restarts or _put_back(job, seen, job.restarts in lives.values()):
        job = Job(job.id, job.size, job.submitted, State.REQUEUED, restarts=newest)
    names = frozenset(name for name, life in lives.items() if life == job.restarts)
    if job.state in OVER:
        return _changed(job, workers=names, held=held)
    complete = len(names) >= job.size
    facts: dict[str, Any] = {
        "workers": names,
        "held": held,
        "arrived": job.arrived or complete,
        "arrived_at": now if complete and not job.arrived else job.arrived_at,
        "missed": (0 if seen else job.missed + 1) if asked else job.missed,
    }
    # An answer about an earlier life says only that the queue knows the job.
    answer = seen if asked and seen and seen.restarts == job.restarts else None
    if answer and answer.state in OVER:
        facts |= _times(job, answer)
        facts |= {"state": answer.state, "reason": answer.reason, "exit_code": answer.exit_code}
        return _changed(job, **facts)
    if asked and not seen and not names and facts["missed"] >= policy.missed_max:
        facts |= {"state": _vanished(job), "reason": "the queue no longer knows it"}
        return _changed(job, **facts)

    said = job.state
    if asked and not seen:
        said = State.UNKNOWN
    elif answer:
        again = job.restarts > 0 or job.state is State.REQUEUED
        said = State.REQUEUED if again and answer.state in WAITING else answer.state
        if answer.state is State.UNKNOWN:  # such as on a dead host: its workers have to show up
            said = State.STARTING
    state = _state(job, said, len(names))
    facts |= {"state": state, "reason": _reason(job, state, answer)}
    facts |= _clocks(job, state, answer, now)
    missing = facts["arrived"] and not complete
    facts["incomplete_since"] = _first(job.incomplete_since, now) if missing else None
    job = _changed(job, **facts)
    return _changed(job, expiring=_expires(job, now, policy), overdue=_is_overdue(job, now, policy))


def _restarts(name: str) -> int:
    return int(name.rsplit("-", 2)[1])


def _changed(job: Job, **facts: Any) -> Job:
    old = vars(job)
    for name, value in facts.items():
        if old[name] != value:
            return Job(**(old | facts))  # a third of the time of dataclasses.replace
    return job


def _first(value: float | None, other: float | None) -> float | None:
    return other if value is None else value


def _put_back(job: Job, seen: Seen | None, connected: bool) -> bool:
    """Whether the queue, which may not count restarts, holds a job again that had started."""
    if seen is None or seen.restarts < job.restarts or seen.state not in WAITING:
        return False
    if job.state in OVER:
        return seen.state is State.REQUEUED
    return job.starting_since is not None and not connected and not job.cancelled


def _vanished(job: Job) -> State:
    """How a job ended that no query shows any more: as we asked, or badly."""
    if job.cancelled:
        return State.CANCELLED
    return State.COMPLETED if job.leaving else State.FAILED


def _state(job: Job, said: State, connected: int) -> State:
    """The state of a job that is not over; `said` is the queue's last word."""
    if connected >= job.size:
        return State.RUNNING
    if said is State.UNKNOWN and not connected:
        return State.UNKNOWN
    if job.arrived:
        return State.RUNNING if job.leaving or job.cancelled else State.LOST
    return State.STARTING if connected else said


def _reason(job: Job, state: State, answer: Seen | None) -> str:
    if answer:
        return answer.reason if state in WAITING or answer.reason.startswith(PAUSED) else ""
    return job.reason if state is job.state else ""


def _times(job: Job, answer: Seen) -> dict[str, Any]:
    return {
        "started": _first(answer.started, job.started),
        "ends": _first(answer.ends, job.ends),
        "nodes": answer.nodes or job.nodes,
    }


def _clocks(job: Job, state: State, answer: Seen | None, now: float) -> dict[str, Any]:
    """Times and nodes of a job that is not over. Those of a waiting job are estimates at best."""
    if state in WAITING:
        return {}
    facts: dict[str, Any] = {}
    if answer and answer.state is State.STARTING:
        facts = _times(job, answer)
    if state is not State.UNKNOWN:
        facts["started"] = _first(facts.get("started", job.started), now)
        paused = answer is not None and answer.reason.startswith(PAUSED)
        facts["starting_since"] = now if paused else _first(job.starting_since, now)
    return facts


def _is_overdue(job: Job, now: float, policy: Policy) -> bool:
    if job.cancelled:
        return job.overdue
    if job.state is State.LOST or (job.leaving and job.arrived and not job.workers):
        since, patience_s = job.incomplete_since, policy.lost_after_s
    elif job.state is State.STARTING:
        since, patience_s = job.starting_since, policy.start_timeout_s
    else:
        return False
    return since is not None and now - since >= patience_s


# Walltime


def ends_at(job: Job, policy: Policy) -> float | None:
    """Unix time at which the job's walltime is over; None if it has none or waits."""
    if job.state in WAITING:
        return None
    if job.ends is not None or job.started is None or policy.walltime_s is None:
        return job.ends
    return job.started + policy.walltime_s


def margin_s(job: Job, policy: Policy) -> float:
    """Seconds before its walltime at which the job's workers retire at the latest.

    Twice the time to move what they hold, no less than `Policy.margin_min_s`, but at most a quarter
    of the walltime.
    """
    margin = max(policy.margin_min_s, 2 * job.held / policy.bandwidth)
    end = ends_at(job, policy)
    if end is None or job.started is None:
        walltime = policy.walltime_s
    else:
        walltime = end - job.started
    return margin if walltime is None else min(margin, max(0.0, walltime) / 4)


def retire_at(job: Job, policy: Policy) -> float | None:
    """Unix time at which the job's workers retire even if no replacement has come.

    Jobs that start together must not all retire together, so each does it up to half a margin
    early, depending on the numbers in its id. That needs no look at the other jobs, and so does not
    move when some of them are gone.
    """
    end = ends_at(job, policy)
    return None if end is None else end - margin_s(job, policy) * (1 + _share(job.id) / 2)


def _share(job_id: str) -> float:
    """A number in [0, 1) that is different, and evenly spread, for jobs with successive ids."""
    return sum(map(int, re.findall(r"\d+", job_id))) * GOLDEN % 1


def _expires(job: Job, now: float, policy: Policy) -> bool:
    """Whether its replacement is due: one more margin before it retires."""
    end = None if job.expiring else ends_at(job, policy)
    if end is None:
        return job.expiring
    left, margin = end - now, margin_s(job, policy)
    if left > 2.5 * margin:  # no stagger is longer, and few jobs get past this line
        return False
    return left <= margin * (2 + _share(job.id) / 2)


# What went wrong so far


def record(history: History, before: Job, after: Job, now: float, policy: Policy) -> History:
    """The history after a job went from `before` to `after`.

    A job that ends, or takes too long, before all its workers were connected is a failed start,
    unless somebody cancelled or preempted it. All ends that neither we nor the walltime
    brought about are deaths, unless the job has served; a job that is overdue is one before it
    ends.
    """
    if after.arrived and not (before.arrived and before.restarts == after.restarts):
        history = replace(history, failed_starts=0, failed=None)
    given_up = after.overdue and not before.overdue and not after.leaving
    ended = after.state in OVER and before.state not in OVER
    if not given_up and (not ended or after.cancelled or after.overdue):
        return history
    if after.leaving and not after.expiring:
        return history
    if after.arrived and (after.state is State.TIMEOUT or after.expiring) and not given_up:
        return history
    if not given_up and _served(after, now, policy):
        return history
    if not after.arrived and after.state not in (State.CANCELLED, State.PREEMPTED):
        history = replace(history, failed_starts=history.failed_starts + 1, failed=after)
    return replace(history, deaths=(*_recent(history, now, policy), now), died=after)


def _served(job: Job, now: float, policy: Policy) -> bool:
    """Whether a job ended in good order, as with a lifetime of its workers, and not at once."""
    if job.state is not State.COMPLETED or job.exit_code != 0 or job.arrived_at is None:
        return False
    left = now if job.incomplete_since is None else job.incomplete_since
    return left - job.arrived_at >= policy.served_s


def _recent(history: History, now: float, policy: Policy) -> tuple[float, ...]:
    return tuple(time for time in history.deaths if now - time < policy.deaths_window_s)


def _failure(history: History, wanted: int, now: float, policy: Policy) -> Failure | None:
    if history.failed and history.failed_starts >= policy.failures_max:
        return Failure("start", history.failed, history.failed_starts)
    most = max(10, 3 * wanted) if policy.deaths_max is None else policy.deaths_max
    deaths = len(_recent(history, now, policy))
    if history.died and deaths >= most:
        return Failure("budget", history.died, deaths)
    return None


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
    """What to submit, cancel and retire, so that `wanted` jobs run.

    Parameters
    ----------
    wanted
        Number of jobs. Those that wait or start count; those that leave, were cancelled or near
        their walltime do not.
    jobs
        All jobs by their ids. Those that are over may be left out if the queue said so; one that it
        forgot is cancelled, to be sure.
    history
        Decides whether more jobs may be submitted.
    closable
        Ids of jobs with connected workers in the order in which the scheduler would give them up. A
        job that has workers and is not here is not given up, except before its walltime.
    now
        Unix time.
    policy
        How patient to be.

    Returns
    -------
    Actions
        Every job is in it at most once, and never again once the caller has marked it.
    """
    present = [job for job in jobs.values() if not job.cancelled]
    # What the queue forgot might come back when nobody counts on it any more.
    hopeless = [
        job
        for job in present
        if (job.missed >= policy.missed_max if job.state in OVER else _is_overdue(job, now, policy))
    ]
    given_up = {job.id for job in hopeless}
    alive = [job for job in present if job.state not in OVER and job.id not in given_up]
    staying = [job for job in alive if not job.leaving]
    expiring: list[Job] = []
    counting: list[Job] = []
    for job in staying:
        (expiring if _expires(job, now, policy) else counting).append(job)
    running = sum(job.state is State.RUNNING for job in counting)

    missing = wanted - len(counting)
    failure = _failure(history, wanted, now, policy) if missing > 0 else None
    fewer = _fewer(-missing, counting, closable)
    handover = _hand_over(
        expiring, wanted - running, len(alive) - len(staying), wanted > 0, now, policy
    )
    ending = fewer + handover
    return Actions(
        submit=0 if failure else max(0, missing),
        cancel=tuple(job.id for job in hopeless + [job for job in ending if not job.workers]),
        retire=tuple(job.id for job in ending if job.workers),
        failure=failure,
    )


def is_paused(job: Job) -> bool:
    """Whether the queue has stopped the processes of a job that runs."""
    return job.reason.startswith(PAUSED)


def _age(job: Job) -> tuple[float, list[int], str]:
    return job.submitted, [int(number) for number in re.findall(r"\d+", job.id)], job.id


def _fewer(surplus: int, counting: Sequence[Job], closable: Sequence[str]) -> list[Job]:
    """The jobs to end when there are too many: waiting, then starting, then idle ones.

    Of those that have nodes, suspended ones go first. Jobs that are lost or unknown are left until
    it is clear what they are.
    """
    if surplus <= 0:
        return []
    idle = [job for job in counting if not job.workers]
    waiting = [job for job in idle if job.state in WAITING]
    starting = [job for job in idle if job.state is State.STARTING]
    by_id = {job.id: job for job in counting if job.workers}
    running = [by_id[name] for name in dict.fromkeys(closable) if name in by_id]
    return [
        *sorted(waiting, key=_age, reverse=True),
        *sorted(starting, key=lambda job: (is_paused(job), _age(job)), reverse=True),
        *sorted(running, key=is_paused, reverse=True),
    ][:surplus]


def _hand_over(
    expiring: Sequence[Job], needed: int, leaving: int, gently: bool, now: float, policy: Policy
) -> list[Job]:
    """The jobs to end before their walltime: those whose time has come, and replaced ones.

    Replacements may come all at once; `gently`, a quarter at a time leaves for them.
    """
    times = {job.id: retire_at(job, policy) or math.inf for job in expiring}
    due = [job for job in expiring if times[job.id] <= now and job.workers]
    others = [job for job in expiring if times[job.id] > now or not job.workers]
    most = len(others) - max(0, needed)
    if gently:
        at_once = math.ceil((len(expiring) + leaving) / 4)
        most = min(most, at_once - leaving - len(due))
    able = [job for job in others if job.workers or job.state is State.STARTING]
    able.sort(key=lambda job: (times[job.id], job.id))
    return due + able[: max(0, most)]
