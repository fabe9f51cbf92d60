"""JSON lines over a socket."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

Message = dict[str, Any]
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

    async def receive(self) -> Message | None:
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
