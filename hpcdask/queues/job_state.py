"""What a queue says of a job."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class QueueState(StrEnum):
    """Where a job is in its life."""

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


#: States of jobs that the queue has done with.
OVER = frozenset(
    {
        QueueState.COMPLETED,
        QueueState.FAILED,
        QueueState.CANCELLED,
        QueueState.PREEMPTED,
        QueueState.TIMEOUT,
    }
)
#: States of jobs that have no nodes yet, or nodes that still boot.
WAITING = frozenset({QueueState.PENDING, QueueState.REQUEUED})
#: How the reason of a job begins that runs for the queue, but whose processes are stopped.
PAUSED = ("suspended", "SUSPENDED", "STOPPED")


@dataclass(frozen=True)
class QueueStatus:
    """One job as a query of the queue shows it.

    Attributes
    ----------
    id
        The queue's id of the job or of the array's element, such as ``123`` or ``123_4``.
    state
        PENDING, REQUEUED, STARTING (the queue says that it runs), one of `OVER`, or UNKNOWN (the
        queue has the job and does not know how it is, or says so in unknown words).
    reason
        Why it waits or how it ended, in the queue's words; see also `PAUSED`.
    exit_code
        Of a job that is over and whose code is known; 128 + n after signal n.
    restarts
        How often the queue has started it again under the same id.
    started, ends
        Unix times at which it started and reaches its walltime; None if unknown.
    nodes
        The nodes it runs on, in the queue's words.
    """

    id: str
    state: QueueState
    reason: str = ""
    exit_code: int | None = None
    restarts: int = 0
    started: float | None = None
    ends: float | None = None
    nodes: str = ""
