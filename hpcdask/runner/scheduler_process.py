"""Rank 0's hold on the process that becomes the scheduler."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable
from typing import Any

from hpcdask.node.channel import MessageStream
from hpcdask.node.forking import ForkedProcess

from .events import Events


class SchedulerProcess:
    """Starts it, hears from it, and ends it.

    `events` hear ``scheduler`` when it has started or cannot, ``workers`` when these change, and
    ``scheduler-closed`` or ``scheduler-lost`` at its end. `warm` is told what a worker's first
    exchanges with its peers gave. `registered` has the names of its workers.
    """

    def __init__(
        self, process: ForkedProcess, events: Events, warm: Callable[[dict[str, Any]], None]
    ) -> None:
        self.registered: set[str] = set()
        self._process, self._events, self._warm = process, events, warm
        self._orders: MessageStream | None = None

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    async def open(self) -> None:
        """Open the line to it."""
        self._orders = await self._process.channel()

    def start(self, **order: Any) -> None:
        """Have it become the scheduler; see `scheduler.main` for what it takes."""
        assert self._orders is not None
        self._orders.send(**order)

    async def listen(self) -> None:
        """Turn what it tells into events, until its end."""
        assert self._orders is not None
        closed = False
        while (message := await self._orders.receive()) is not None:
            if "workers" in message:
                self.registered = set(message["workers"])
                self._events.happened("workers")
            elif "warm" in message:
                self._warm(message["warm"])
            elif message.get("closed"):
                closed = True
            else:
                self._events.happened("scheduler", message)
        self._events.happened("scheduler-closed" if closed else "scheduler-lost")

    def silence(self) -> None:
        """The run ends: what it would log of that is no news."""
        if self._orders is not None:
            self._orders.send(op="quiet")

    async def end(self) -> None:
        """Close it; after a second, by force."""
        if self._orders is not None:
            self._orders.send(op="close")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._process.wait()
        self._process.send_signal(signal.SIGKILL)
