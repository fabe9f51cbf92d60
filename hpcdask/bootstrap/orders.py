"""Messages of JSON over sockets, and those between a rank's own process and its agent."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from hpcdask.spec.records import Record

Json = dict[str, Any]
LINE_LIMIT = 4 * 2**20


@dataclass(frozen=True)
class Message(Record):
    """Base of all messages between processes; in JSON, ``op`` is the name of the class."""

    def to_json(self) -> dict[str, Any]:
        return {"op": type(self).__name__, **super().to_json()}


def read(data: Mapping[str, Any]) -> Message:
    """Return a message from what `Message.to_json` and JSON made of it."""
    fields = dict(data)
    kinds = {kind.__name__: kind for kind in Message.__subclasses__()}
    return kinds[fields.pop("op")].from_json(fields)


class MessageStream:
    """Messages over one stream, to be iterated over until the peer is gone."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def over(cls, sock: socket.socket) -> MessageStream:
        """Return the messages over a connected socket, such as one end of a socketpair."""
        sock.setblocking(False)
        return cls(*await asyncio.open_connection(sock=sock, limit=LINE_LIMIT))

    async def __aiter__(self) -> AsyncIterator[Message]:
        while (received := await self.receive()) is not None:
            yield read(received)

    def send(self, message: Message | None = None, /, **fields: Any) -> None:
        """Queue a message, or some fields. The end of the peer is noticed by those who receive."""
        if not self._writer.is_closing():
            told = fields if message is None else message.to_json()
            self._writer.write(json.dumps(told).encode() + b"\n")

    async def receive(self) -> Json | None:
        """Return the fields of the next message, or None when the peer is gone."""
        try:
            line = await self._reader.readline()
            message = json.loads(line) if line.endswith(b"\n") else None
        except (OSError, ValueError, asyncio.LimitOverrunError):
            return None
        return message if isinstance(message, dict) else None

    async def flush(self) -> None:
        """Wait until what was sent has left this process, at most a second."""
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(1.0):
                await self._writer.drain()

    def close(self) -> None:
        self._writer.close()


@dataclass(frozen=True)
class Signal(Message):
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
class SignalProgram(Message):
    number: int


@dataclass(frozen=True)
class Clean(Message):
    path: str
