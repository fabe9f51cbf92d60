"""Messages between the agents of the ranks, and of rank 0's with the scheduler's process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hpcdask.bootstrap.orders import Message
from hpcdask.comm.fabric import Fabric
from hpcdask.node.inventory import Inventory
from hpcdask.node.placement import WorkerPlacement
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
