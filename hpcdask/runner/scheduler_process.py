"""Rank 0's hold on the process that becomes the scheduler."""

from __future__ import annotations

import asyncio
import contextlib
import socket

from hpcdask.bootstrap import orders
from hpcdask.bootstrap.orders import MessageStream
from hpcdask.bootstrap.supervisor import CONTEXT

from . import protocol, scheduler
from .protocol import Events, SchedulerLost

#: Seconds in which it asks the workers what the GPUs did, and says so.
USAGE_DEADLINE_S = 1.0


class SchedulerProcess:
    """Starts it, hears from it, and ends it.

    What it tells becomes events, and its end is `SchedulerClosed` or `SchedulerLost`. `started` is
    what it told of its start. `registered` has the names of its workers, `doors` the addresses of
    the nannies of all that ever were.
    """

    def __init__(self, events: Events) -> None:
        self.started: protocol.SchedulerStarted | protocol.SchedulerFailed | None = None
        self.registered: set[str] = set()
        self.doors: dict[str, str] = {}
        self._events = events
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
        while (received := await self._orders.receive()) is not None:
            message = orders.read(received)
            match message:
                case protocol.WorkersChanged(came, gone):
                    self.registered.difference_update(gone)
                    self.registered.update(came)
                    self.doors.update(came)
                case protocol.GpuUsageTold(lines):
                    self._usage = self._usage or lines
                    self._usage_told.set()
                case protocol.SchedulerStarted() | protocol.SchedulerFailed():
                    self.started = message
                case protocol.SchedulerClosed():
                    closed = True
            self._events.put(message)
        self._usage_told.set()
        if not closed:
            self._events.put(SchedulerLost())

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
