"""Messages of JSON, and those between a rank's own process and its agent; without asyncio."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpcdask.spec.records import Record

Json = dict[str, Any]


@dataclass(frozen=True)
class Message(Record):
    """Base of all messages between processes; in JSON, ``op`` is the name of the class."""

    def to_json(self) -> Json:
        return {"op": type(self).__name__, **super().to_json()}


def to_line(message: Json) -> bytes:
    """Return a message, or some fields, as it is sent."""
    return json.dumps(message).encode() + b"\n"


def read(data: Mapping[str, Any]) -> Message:
    """Return a message from what `Message.to_json` and JSON made of it."""
    fields = dict(data)
    kinds = {kind.__name__: kind for kind in Message.__subclasses__()}
    return kinds[fields.pop("op")].from_json(fields)


@dataclass(frozen=True)
class Signal(Message):
    """Signal that the rank's own process got or, from its agent, that the program is to get."""

    number: int


@dataclass(frozen=True)
class ProgramStarted(Message):
    pid: int


@dataclass(frozen=True)
class ProgramEnded(Message):
    """Exit code of the user's program, as a shell has it."""

    code: int


@dataclass(frozen=True)
class StartProgram(Message):
    variables: dict[str, str]


@dataclass(frozen=True)
class AbortLaunch(Message):
    """Order to end the whole launch after this rank: some other never came."""


@dataclass(frozen=True)
class Clean(Message):
    path: str


@dataclass(frozen=True)
class Leaving(Message):
    """Exit code of the agent: without the fork server, nobody else knows it."""

    code: int
