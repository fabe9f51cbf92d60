"""States of a job in its queueing system and in its cluster."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class JobState(StrEnum):
    """State of a job in its queueing system, or as its cluster concludes it from the workers."""

    PENDING = "pending"  # the queue holds it; `reason` is the queue's
    REQUEUED = "requeued"  # pending again under the same id
    STARTING = "starting"  # only for its cluster: not all of its workers are connected yet
    RUNNING = "running"  # it has its nodes; for its cluster, all its workers are connected
    LOST = "lost"  # only for its cluster: workers that were connected are gone
    UNKNOWN = "unknown"  # the queue does not know how it is; its cluster: no query shows it
    COMPLETED = "completed"  # from here on it is over
    FAILED = "failed"
    CANCELLED = "cancelled"
    PREEMPTED = "preempted"
    TIMEOUT = "timeout"  # ended by its walltime


#: States of jobs that have no nodes yet, or nodes that still boot.
WAITING = frozenset({JobState.PENDING, JobState.REQUEUED})
#: States of jobs that the queue has done with.
OVER = frozenset(map(JobState, ("completed", "failed", "cancelled", "preempted", "timeout")))


@dataclass(frozen=True)
class QueueStatus:
    """Job as a query of the queue shows it.

    `id` may be that of an array's element, such as ``123_4``. A `state` in words that nobody knows
    is UNKNOWN. `reason`, why it waits or how it ended, and `nodes` are in the queue's words.

    `exit_code` is that of a job that is over, 128 + n after signal n; None if unknown. `restarts`
    counts how often the queue has started it again under the same id. `started` and `ends`, when it
    reaches its walltime, are unix times by the clock of this machine; None if unknown.

    A job that is `stuck` waits for an administrator, as the queue could not start it. `copies` are
    jobs that the queue has made in its place.
    """

    id: str
    state: JobState
    reason: str = ""
    exit_code: int | None = None
    restarts: int = 0
    started: float | None = None
    ends: float | None = None
    nodes: str = ""
    stuck: bool = False
    copies: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """Return the state with reason and exit code, such as ``pending (Resources)``."""
        reason = f" ({self.reason})" if self.reason else ""
        code = "" if self.exit_code is None else f", exit code {self.exit_code}"
        return f"{self.state}{reason}{code}"
