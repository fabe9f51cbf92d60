"""Messages between a rank's own process and its agent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hpcdask.spec.records import Record


@dataclass(frozen=True)
class Message(Record):
    """Base of all messages between processes; in JSON, ``op`` is the name of the class."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields for `read`."""
        return {"op": type(self).__name__, **super().to_json()}


def read(data: Mapping[str, Any]) -> Message:
    """Return a message from what `Message.to_json` and JSON made of it."""
    fields = dict(data)
    kinds = {kind.__name__: kind for kind in Message.__subclasses__()}
    return kinds[fields.pop("op")].from_json(fields)


@dataclass(frozen=True)
class Signal(Message):
    """A signal that a rank got."""

    number: int


@dataclass(frozen=True)
class ProgramStarted(Message):
    """Process id of the user's program."""

    pid: int


@dataclass(frozen=True)
class ProgramEnded(Message):
    """Exit code of the user's program, as a shell has it."""

    code: int


@dataclass(frozen=True)
class StartProgram(Message):
    """Order to start the user's program, with these variables added to the environment."""

    variables: dict[str, str]


@dataclass(frozen=True)
class AbortLaunch(Message):
    """Order to end the whole launch after this rank: some other never came."""


@dataclass(frozen=True)
class SignalProgram(Message):
    """Order to send the program a signal."""

    number: int


@dataclass(frozen=True)
class Clean(Message):
    """Order to the janitor about a path, for when the rank is gone."""

    path: str
    when: Literal["later", "now", "never"]
