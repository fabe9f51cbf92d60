"""States of jobs as their cluster concludes them, also for other processes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from hpcdask.queues import job_state
from hpcdask.queues.job_state import QueueStatus


class JobState(StrEnum):
    """Where a job is in its life, from what the queue says and which workers are connected."""

    PENDING = "pending"  # the queue holds it; `reason` is the queue's
    REQUEUED = "requeued"  # pending again under the same id
    STARTING = "starting"  # runs, and not all of its workers are connected yet
    RUNNING = "running"  # all its workers are connected
    LOST = "lost"  # runs for the queue, but workers that were connected are gone
    UNKNOWN = "unknown"  # no query shows it; not over until several agree
    COMPLETED = "completed"  # from here on it is over
    FAILED = "failed"
    CANCELLED = "cancelled"
    PREEMPTED = "preempted"
    TIMEOUT = "timeout"  # ended by its walltime


#: States of jobs that are over, and of jobs without nodes.
OVER = frozenset(map(JobState, job_state.OVER))
WAITING = frozenset(map(JobState, job_state.WAITING))


@dataclass(frozen=True)
class JobReport:
    """Job that is not over, as its cluster sees it.

    `workers` are connected, of `size`. `since` is the unix time at which it started, or was
    submitted if it has not. None: unknown. `group` is empty in a cluster without groups.
    """

    id: str
    state: JobState
    reason: str
    workers: int | None
    size: int | None
    nodes: str
    since: float | None
    group: str = ""

    @classmethod
    def of_queue(cls, seen: QueueStatus, submitted: float | None, group: str) -> JobReport:
        """Return a job's state where only the queue tells of it."""
        since = seen.started or submitted
        state = JobState(seen.state)
        return cls(seen.id, state, seen.reason, None, None, seen.nodes, since, group)

    def contradicts(self, seen: QueueStatus) -> bool:
        """Return whether the queue says that the job has started or waits again since."""
        return (self.state in WAITING) != (seen.state in job_state.WAITING)


def counts(reports: Iterable[JobReport]) -> str:
    """Return how many jobs are in each state, such as ``2 pending (Resources), 6 running``."""
    found: Counter[str] = Counter()
    for job in reports:
        why = job.reason if job.state not in OVER else ""  # it waits, or is suspended
        state = f"{job.group} {job.state}".strip()
        found[f"{state} ({why})" if why else state] += 1
    return ", ".join(f"{count} {what}" for what, count in found.items())


def to_json(reports: Iterable[JobReport]) -> str:
    """The text that `from_json` reads."""
    return json.dumps([vars(report) for report in reports])


def from_json(text: str) -> dict[str, JobReport]:
    """Reports by the jobs' ids. Raises ValueError for what `to_json` has not made."""
    try:
        found = [JobReport(**{**row, "state": JobState(row["state"])}) for row in json.loads(text)]
    except (TypeError, KeyError) as error:
        raise ValueError(f"no reports of jobs: {error}") from None
    return {report.id: report for report in found}
