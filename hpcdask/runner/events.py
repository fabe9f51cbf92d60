"""Events of a run in one queue, and the tasks that tell of them.

Messages of other processes (`hpcdask.bootstrap.orders`, `hpcdask.runner.protocol`) are events, too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RankArrived:
    """Rank that has reported."""

    rank: int


@dataclass(frozen=True)
class RankLost:
    """Rank whose connection has ended."""

    rank: int


@dataclass(frozen=True)
class SchedulerLost:
    """End of the scheduler's process that nobody asked for."""


@dataclass(frozen=True)
class Broken:
    """Error of a task that runs beside."""

    error: BaseException


@dataclass(frozen=True)
class Elapsed:
    """End of a time, which belongs to ``program`` (to end), ``loss`` or ``no workers``."""

    what: str


class Events:
    """The queue, and the tasks whose errors become events."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[object] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()

    def put(self, event: object) -> None:
        """Put an event at the end."""
        self._queue.put_nowait(event)

    def put_later(self, seconds: float, what: str) -> None:
        """Put `Elapsed` at the end after a while."""
        asyncio.get_running_loop().call_later(seconds, self.put, Elapsed(what))

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine beside; what it raises becomes `Broken`."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.put(Broken(error))

    async def get(self, deadline: float | None = None) -> object:
        """Return the next event. Raises TimeoutError at a deadline of `time.monotonic`."""
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        async with asyncio.timeout(left):
            return await self._queue.get()
