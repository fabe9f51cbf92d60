"""When messages wait for each other."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from distributed.batched import BatchedSend

from hpcdask.client import batching


class Comm:
    """Notes what is written at once."""

    def __init__(self) -> None:
        self.written: list[list[str]] = []

    def closed(self) -> bool:
        return False

    async def write(self, messages: list[str], **options: Any) -> int:
        self.written.append(messages)
        return 1

    async def close(self) -> None:
        pass


def test_messages_of_a_worker_gather_until_they_are_as_many_as_its_tasks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batching, "BUSY_INTERVAL_S", 3600.0)

    async def body() -> None:
        stream, comm = BatchedSend(interval=0), Comm()
        stream.start(comm)

        async def written(count: int) -> None:
            async with asyncio.timeout(30):
                while len(comm.written) < count:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)

        async def idle() -> None:
            for _ in range(100):
                await asyncio.sleep(0)

        batching.pace(stream, ready=3)
        stream.send("first")  # the loop was idle
        await written(1)
        stream.send("second")
        batching.pace(stream, ready=2)
        await idle()  # it has sent nothing more
        stream.send("third")
        batching.pace(stream, ready=2)
        await written(2)
        stream.send("fourth")
        await idle()
        batching.pace(stream, ready=0)
        await written(3)
        stream.send("last")
        await written(4)
        assert comm.written == [["first"], ["second", "third"], ["fourth"], ["last"]]
        await stream.close()

    asyncio.run(body())
