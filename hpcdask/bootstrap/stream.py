"""Messages over sockets in an event loop."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

from .orders import Json, Message, read, to_line

LINE_LIMIT = 4 * 2**20


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
            self._writer.write(to_line(told))

    async def receive(self) -> Json | None:
        """Return the fields of the next message, or None when the peer is gone."""
        try:
            line = await self._reader.readline()
            message = json.loads(line) if line.endswith(b"\n") else None
        except (OSError, ValueError, asyncio.LimitOverrunError):
            return None
        return message if isinstance(message, dict) else None

    def close(self) -> None:
        self._writer.close()
