"""Messages of JSON over sockets, and those between a rank's own process and its agent."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hpcdask.spec.records import Record

Json = dict[str, Any]
LINE_LIMIT = 4 * 2**20


class MessageStream:
    """Messages over one stream."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def over(cls, sock: socket.socket) -> MessageStream:
        """A channel over a connected socket, such as one end of a socketpair."""
        return cls(*await asyncio.open_connection(sock=sock, limit=LINE_LIMIT))

    def send(self, **message: Any) -> None:
        """Queue a message. A peer that is gone is noticed by `receive`."""
        if not self._writer.is_closing():
            self._writer.write(json.dumps(message).encode() + b"\n")

    async def receive(self) -> Json | None:
        """The next message, or None when the peer is gone."""
        try:
            line = await self._reader.readline()
            message = json.loads(line) if line.endswith(b"\n") else None
        except (OSError, ValueError, asyncio.LimitOverrunError):
            return None
        return message if isinstance(message, dict) else None

    async def flush(self) -> None:
        """Wait until what was sent has left this process, at most a second."""
        try:
            async with asyncio.timeout(1.0):
                await self._writer.drain()
        except (OSError, TimeoutError):
            pass

    def close(self) -> None:
        """End the channel."""
        self._writer.close()


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
