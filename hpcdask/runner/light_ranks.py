"""The ranks of rank 0's node that leave their workers to it (`hpcdask.node.light_rank`)."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import socket

from hpcdask.node import light_rank
from hpcdask.node.channel import LINE_LIMIT, MessageStream
from hpcdask.spec.specs import RunSpec

from . import protocol
from .arrivals import Arrivals


def may_be(spec: RunSpec) -> bool:
    """Whether ranks may be light, by options that are read: else they have asked in vain."""
    return spec.layout == "shared" and not spec.groups and spec.profile == "none"


class LightRanks:
    """Takes them in, and has them arrive as other ranks do.

    `indices` are theirs. The listener is None where there are none.
    """

    def __init__(self, listener: socket.socket | None, arrivals: Arrivals) -> None:
        self.indices: set[int] = set()
        self._listener, self._arrivals = listener, arrivals
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Take in those that ask. Rank 0 has reported."""
        if self._listener is not None:
            self._server = await asyncio.start_unix_server(
                self._take_in, sock=self._listener, limit=LINE_LIMIT
            )

    def close(self) -> None:
        """Take in no more."""
        if self._server is not None:
            self._server.close()

    async def _take_in(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel, place = MessageStream(reader, writer), None
        if light_rank.peer(writer.get_extra_info("socket"))[1] == os.geteuid():
            place = await channel.receive()
        if place is None:
            channel.close()
            return
        report = self._arrivals.reports[0]
        inventory = report.inventory and dataclasses.replace(
            report.inventory,
            rank=place["rank"],
            local_index=place["local_index"],
            cores=tuple(place["cores"]),
        )
        report = dataclasses.replace(
            report, rank=place["rank"], pid=place["pid"], inventory=inventory
        )
        self.indices.add(report.rank)
        channel.send(**protocol.TakenIn().to_json())
        await self._arrivals.take(report, channel)
