"""States of a job in its queueing system."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class QueueState(StrEnum):
    """State of a job in its queueing system; `JobState` is what its cluster concludes."""

    PENDING = "pending"  # the queue holds it; `reason` is the queue's
    REQUEUED = "requeued"  # pending again under the same id
    RUNNING = "running"  # it has its nodes
    UNKNOWN = "unknown"  # the queue has it, and does not know how it is
    COMPLETED = "completed"  # from here on it is over
    FAILED = "failed"
    CANCELLED = "cancelled"
    PREEMPTED = "preempted"
    TIMEOUT = "timeout"  # ended by its walltime


#: States of jobs that have no nodes yet, or nodes that still boot.
WAITING = frozenset({QueueState.PENDING, QueueState.REQUEUED})
#: States of jobs that the queue has done with.
OVER = frozenset(QueueState) - WAITING - {QueueState.RUNNING, QueueState.UNKNOWN}


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
    state: QueueState
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
        """Return the state with its reason, such as ``pending (Resources)``."""
        return f"{self.state} ({self.reason})" if self.reason else str(self.state)
