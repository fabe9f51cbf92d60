"""Messages of rank 0, the other ranks, the scheduler's process and the program's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpcdask.node.placement import WorkerPlacement
from hpcdask.security.credentials import Credentials
from hpcdask.spec.records import Record


@dataclass(frozen=True)
class Message(Record):
    """Base of them all; the name of the class says in JSON which it is."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields for `read`."""
        return {"op": type(self).__name__, **super().to_json()}


def read(data: Mapping[str, Any]) -> Message:
    """Return a message from what `Message.to_json` and JSON made of it."""
    fields = dict(data)
    kinds = {kind.__name__: kind for kind in Message.__subclasses__()}
    return kinds[fields.pop("op")].from_json(fields)


# From rank 0 to the program's process


@dataclass(frozen=True)
class StartProgram(Message):
    """The cluster is ready: become the program.

    `file` is a scheduler file, `threads` are BLAS's; `on_gpus` are the workers.
    """

    address: str
    on_gpus: bool
    file: str
    threads: int


# From rank 0 to another


@dataclass(frozen=True)
class StartWorkers(Message):
    """Order to start these workers."""

    scheduler: str
    placements: list[WorkerPlacement]


@dataclass(frozen=True)
class EndRun(Message):
    """The run is over: leave, with this exit code."""

    code: int


# From another rank to rank 0


@dataclass(frozen=True)
class WorkerFailed(Message):
    """A worker did not start; without a name, none of the rank's did."""

    name: str | None
    error: str


@dataclass(frozen=True)
class Signal(Message):
    """A signal that the rank got."""

    number: int


# From rank 0 to the scheduler's process


@dataclass(frozen=True)
class StartScheduler(Message):
    """Become the scheduler."""

    host: str | None
    interface: str | None
    protocol: str
    credentials: Credentials
    dashboard: str
    scratch: str


@dataclass(frozen=True)
class TellGpuUsage(Message):
    """Say what the GPUs did: the run ends."""


@dataclass(frozen=True)
class Silence(Message):
    """The run ends: what would be logged of that is no news."""


@dataclass(frozen=True)
class CloseScheduler(Message):
    """The run is over."""


# From the scheduler's process to rank 0


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
