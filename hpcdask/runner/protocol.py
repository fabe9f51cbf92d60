"""Messages between the agents of the ranks and with the scheduler's process, and events of a run.

All come to rank 0 in one queue, with the tasks that tell of some of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from hpcdask.bootstrap.orders import Message
from hpcdask.comm.fabric import Fabric
from hpcdask.node.placement import Inventory, WorkerPlacement
from hpcdask.security.credentials import Credentials
from hpcdask.spec.records import Record


@dataclass(frozen=True)
class RankReport(Record):
    """Report of a rank: what it sees, or why it cannot take part: with `error` the rest is void."""

    rank: int
    host: str
    pid: int
    error: str = ""
    inventory: Inventory | None = None
    fabric: Fabric = field(default_factory=Fabric)


@dataclass(frozen=True)
class StartWorkers(Message):
    """Order to start these workers."""

    scheduler: str
    placements: list[WorkerPlacement]


@dataclass(frozen=True)
class EndRun(Message):
    """The run is over: leave, with this exit code. Workers get `seconds` to close."""

    code: int
    seconds: float


@dataclass(frozen=True)
class WorkerFailed(Message):
    """A worker of a rank did not start; without a name, none of the rank's did."""

    rank: int
    name: str | None
    error: str


@dataclass(frozen=True)
class StartScheduler(Message):
    """Become the scheduler."""

    host: str | None
    interface: str | None
    protocol: str
    credentials: Credentials
    dashboard: str
    scratch: str
    port_range: str | None


@dataclass(frozen=True)
class TellGpuUsage(Message):
    """Say what the GPUs did: the run ends."""


@dataclass(frozen=True)
class Silence(Message):
    """The run ends: what would be logged of that is no news."""


@dataclass(frozen=True)
class CloseScheduler(Message):
    """The run is over."""


@dataclass(frozen=True)
class SchedulerStarted(Message):
    """Where it and its dashboard listen."""

    address: str
    dashboard_host: str
    dashboard_port: int


@dataclass(frozen=True)
class SchedulerFailed(Message):
    """It did not start."""

    error: str


@dataclass(frozen=True)
class WorkersChanged(Message):
    """The names of workers that came, or went: those of all would be too much each time.

    Those that came are with the addresses of their nannies.
    """

    came: dict[str, str]
    gone: list[str]


@dataclass(frozen=True)
class WorkerWarm(Message):
    """Result of a worker's first exchanges with its peers."""

    found: dict[str, Any]


@dataclass(frozen=True)
class GpuUsageTold(Message):
    """Use of the GPUs, in lines for the user; none where none was sampled."""

    lines: list[str]


@dataclass(frozen=True)
class SchedulerClosed(Message):
    """It has closed in good order."""


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
