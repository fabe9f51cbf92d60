"""Asks the queue how the jobs are, at most once per interval."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from hpcdask.queues.base import Queue
from hpcdask.queues.job_state import QueueStatus

from . import messages
from .state import ClusterState

#: Longest pause between two queries of a queue that does not answer.
BACK_OFF_S = 120.0


@dataclass
class QueuePoller:
    """Queries of the queue about the jobs of a cluster, of all its groups in one, one at a time.

    They are `interval_s` apart, or more while the queue does not answer. `wake` is called when
    there is an answer to `take`.
    """

    groups: Sequence[ClusterState]
    queue: Queue
    interval_s: float
    wake: Callable[[], None]
    _next: float = 0.0
    _failed: int = 0
    _queried: set[str] = field(default_factory=set)
    _query: asyncio.Task[dict[str, QueueStatus]] | None = None

    def live(self) -> list[str]:
        """Ids of the jobs that are not over."""
        return [job_id for state in self.groups for job_id in state.live()]

    def pause(self) -> float | None:
        """Seconds until the next query is due, below 0 if it is late; None while none is."""
        if self._query is None and self.live():
            return self._next - time.monotonic()
        return None

    def poll(self) -> None:
        """Begin a query if one is due."""
        pause = self.pause()
        if pause is not None and pause <= 0:
            ids = self.live()
            self._query = asyncio.create_task(self.ask(ids))
            self._query.add_done_callback(lambda _: self.wake())
            self._queried = set(ids)

    def take(self) -> tuple[set[str], dict[str, QueueStatus]]:
        """The ids that were asked for and the answer: none, if there is none yet, or at all."""
        if self._query is None or not self._query.done():
            return set(), {}
        query, self._query = self._query, None
        error = query.exception()
        self._failed = 0 if error is None else self._failed + 1
        pause = self.interval_s * 2 ** min(self._failed, 10)
        self._next = time.monotonic() + min(pause, max(BACK_OFF_S, self.interval_s))
        if error is None:
            self.groups[0].clear_warning("query")
            return self._queried, query.result()
        unknown = "What the jobs do is unknown until it answers"
        self.groups[0].warn("query", f"{messages.words(error)}. {unknown}")
        return set(), {}

    def postpone(self) -> None:
        """Postpone the next query by an interval: the jobs were just submitted."""
        self._next = max(self._next, time.monotonic() + self.interval_s)

    async def ask(self, ids: Collection[str]) -> dict[str, QueueStatus]:
        """Query the queue, and once more for the jobs that have left it."""
        seen = await self.queue.query(ids)
        gone = [job_id for job_id in ids if job_id not in seen]
        if gone:
            try:
                seen |= await self.queue.departed(gone)
                self.groups[0].clear_warning("accounting")
            except Exception as error:  # must not hide what the queue has shown
                unknown = "How jobs ended is not known without it"
                self.groups[0].warn("accounting", f"{messages.words(error)}. {unknown}")
        return seen

    def stop(self) -> list[asyncio.Task[dict[str, QueueStatus]]]:
        """Give up the query under way, and return it to be awaited."""
        if self._query is None:
            return []
        self._query.cancel()
        return [self._query]
