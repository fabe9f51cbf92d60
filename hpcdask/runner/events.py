"""Events of a run in one queue, and the tasks that tell of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, NamedTuple


class Event(NamedTuple):
    """Something that happened: what, and the rank, number or code that belongs to it."""

    what: str
    value: Any = None


class Interrupted(Exception):
    """A signal came while the cluster was coming up."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class ProgramOver(Exception):
    """The program ended while the cluster was coming up."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Events:
    """The queue, and the tasks whose errors become events."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Event] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()

    def happened(self, what: str, value: Any = None) -> None:
        """Put an event at the end."""
        self._queue.put_nowait(Event(what, value))

    def later(self, seconds: float, what: str) -> None:
        """Put an event at the end after a while."""
        asyncio.get_running_loop().call_later(seconds, self.happened, what)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something beside; what it raises is the event ``broken``."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.happened("broken", error)

    async def get(self, deadline: float | None = None) -> Event:
        """The next one. Raises TimeoutError at a deadline of `time.monotonic`."""
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        async with asyncio.timeout(left):
            return await self._queue.get()
