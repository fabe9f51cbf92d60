"""Reports of a cluster on its jobs, for other processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpcdask.logs import plural
from hpcdask.queues.job_state import OVER, WAITING, JobState, QueueStatus
from hpcdask.spec.records import Record

if TYPE_CHECKING:
    from hpcdask.queues.base import Queue


@dataclass(frozen=True)
class JobReport(Record):
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
        return cls(seen.id, seen.state, seen.reason, None, None, seen.nodes, since, group)


@dataclass(frozen=True)
class ClusterReport(Record):
    """State of a cluster as its own process tells others: `jobs` are those that are not over.

    `address` is the scheduler's, `doors` are the nannies' by the workers' names. `problem` says why
    workers do not come, if they do not.
    """

    jobs: tuple[JobReport, ...] = ()
    address: str = ""
    doors: dict[str, str] = field(default_factory=dict)
    problem: str = ""


def counts(reports: Iterable[JobReport]) -> str:
    """Return how many jobs are in each state, such as ``2 pending (Resources), 6 running``."""
    found: Counter[str] = Counter()
    for job in reports:
        why = job.reason if job.state not in OVER else ""  # it waits, or is suspended
        state = f"{job.group} {job.state}".strip()
        found[f"{state} ({why})" if why else state] += 1
    return ", ".join(f"{count} {what}" for what, count in found.items())


def lasting(jobs: Iterable[JobReport | QueueStatus], queue: type[Queue]) -> dict[str, str]:
    """Return a text on jobs that may never start, for each reason for which jobs wait."""
    reasons = Counter(job.reason for job in jobs if job.state in WAITING)
    found = {}
    for reason, count in reasons.items():
        if (advice := queue.lasting(reason)) is not None:
            text = f"{plural(count, 'job')} wait{'s' * (count == 1)}, and may never start: {reason}"
            found[reason] = ". ".join(filter(None, [text, advice]))
    return found
