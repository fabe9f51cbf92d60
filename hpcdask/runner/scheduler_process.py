"""Rank 0's hold on the process that becomes the scheduler."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Any

from hpcdask.bootstrap import orders
from hpcdask.bootstrap.channel import MessageStream
from hpcdask.bootstrap.supervisor import CONTEXT

from . import protocol, scheduler
from .events import Events

#: Seconds in which it asks the workers what the GPUs did, and says so.
USAGE_DEADLINE_S = 1.0


class SchedulerProcess:
    """Starts it, hears from it, and ends it.

    `events` hear ``scheduler`` when it has started or cannot, ``workers`` when these change, and
    ``scheduler-closed`` or ``scheduler-lost`` at its end. `warm` is told what a worker's first
    exchanges with its peers gave. `registered` has the names of its workers, `doors` the addresses
    of the nannies of all that ever were.
    """

    def __init__(self, events: Events, warm: Callable[[dict[str, Any]], None]) -> None:
        self.registered: set[str] = set()
        self.doors: dict[str, str] = {}
        self._events, self._warm = events, warm
        self._line, theirs = socket.socketpair()
        self._process = CONTEXT.Process(target=scheduler.main, args=(theirs,), name="scheduler")
        self._process.start()
        theirs.close()
        self._orders: MessageStream | None = None
        self._usage: list[str] = []
        self._usage_told = asyncio.Event()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid or 0

    async def open(self) -> None:
        """Open the line to it."""
        self._line.setblocking(False)
        self._orders = await MessageStream.over(self._line)

    def tell(self, order: orders.Message) -> None:
        """Order the process to become the scheduler, or to end."""
        if self._orders is not None:
            self._orders.send(**order.to_json())

    async def listen(self) -> None:
        """Turn what it tells into events, until its end."""
        assert self._orders is not None
        closed = False
        while (message := await self._orders.receive()) is not None:
            match orders.read(message):
                case protocol.WorkersChanged(came, gone):
                    self.registered.difference_update(gone)
                    self.registered.update(came)
                    self.doors.update(came)
                    self._events.happened("workers")
                case protocol.WorkerWarm(found):
                    self._warm(found)
                case protocol.GpuUsageTold(lines):
                    self._usage = self._usage or lines
                    self._usage_told.set()
                case protocol.SchedulerClosed():
                    closed = True
                case started:
                    self._events.happened("scheduler", started)
        self._usage_told.set()
        self._events.happened("scheduler-closed" if closed else "scheduler-lost")

    async def gpu_usage(self) -> list[str]:
        """Return what the GPUs did, in lines for the user, if the scheduler answers in time."""
        if not self._usage_told.is_set():
            self.tell(protocol.TellGpuUsage())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(USAGE_DEADLINE_S):
                    await self._usage_told.wait()
        return self._usage

    async def end(self) -> None:
        """Close it; after a second, by force."""
        if self._orders is not None:
            self.tell(protocol.CloseScheduler())
            await asyncio.to_thread(self._process.join, 1.0)
        self._process.kill()
