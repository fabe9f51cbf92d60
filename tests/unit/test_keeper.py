"""What the keeper makes of a queue's answers, with a stand-in for the queue."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from pathlib import Path

import pytest

from hpcdask.clusters.keeper import Keeper
from hpcdask.clusters.ledger import Ledger
from hpcdask.errors import QueueError
from hpcdask.queues.folder import ClusterFolder
from hpcdask.queues.local import LocalQueue
from hpcdask.reconcile import Policy, Seen, State


class Door(LocalQueue):
    """Shows job 1, and fails to tell how others ended."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    async def query(self, ids: Collection[str]) -> dict[str, Seen]:
        return {"1": Seen("1", State.PENDING)}

    async def departed(self, ids: Collection[str]) -> dict[str, Seen]:
        raise self.error


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (QueueError("sacct did not answer"), "sacct did not answer"),
        (ValueError("not a number"), "ValueError: not a number"),
        (KeyError("State"), "KeyError: 'State'"),
    ],
)
def test_what_the_queue_shows_counts_whatever_accounting_says(
    tmp_path: Path, error: Exception, words: str
):
    said: list[str] = []
    folder = ClusterFolder.create("ab-1", "local", base=tmp_path)

    async def ask() -> dict[str, Seen]:
        ledger = Ledger(None, "ab-1", size=1, policy=Policy(), say=said.append)
        keeper = Keeper(ledger, Door(error), folder, poll_interval_s=1)
        await keeper._ask(["1", "2"])
        return await keeper._ask(["1", "2"])

    assert asyncio.run(ask()).keys() == {"1"}
    assert said == [f"warning: {words}. How jobs ended is not known without it"]
