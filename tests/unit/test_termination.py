"""How jobs are ended, with stand-ins for the queue and for the workers that hand over."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from typing import Any

import pytest

from hpcdask.clusters import retire, termination
from hpcdask.clusters.job import Job, Policy, worker_names
from hpcdask.clusters.state import ClusterState
from hpcdask.clusters.termination import JobTerminator
from hpcdask.errors import NoAnswer
from hpcdask.jobs.state import JobState
from hpcdask.queues.local import LocalQueue


class Door(LocalQueue):
    """Notes what is cancelled; fails as often as there are errors."""

    def __init__(self, *errors: Exception) -> None:
        super().__init__()
        self.errors = list(errors)
        self.cancelled: list[list[str]] = []

    async def cancel(self, ids: Collection[str]) -> None:
        self.cancelled.append(list(ids))
        if self.errors:
            raise self.errors.pop(0)


class Site:
    """One job, and what ends it. Everything that waits does so for a tenth of a second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *errors: Exception, **facts: Any) -> None:
        monkeypatch.setattr(termination, "LEAVE_S", 0.1)
        self.said: list[str] = []
        self.state = ClusterState(None, "ab", size=1, policy=Policy(), say=self.said.append)
        self.state.jobs["1"] = Job("1", 1, time.time(), JobState.RUNNING)
        self.state.mark("1", **facts)
        self.door = Door(*errors)
        self.terminator = JobTerminator(self.state, self.door, self.wake)
        self.poked = asyncio.Event()

    def wake(self) -> None:
        self.poked.set()
        self.terminator.cancel_stragglers()

    async def cancelled(self, times: int) -> None:
        """Wait until there were so many requests to cancel."""
        async with asyncio.timeout(60):
            while len(self.door.cancelled) < times:
                self.poked.clear()
                await self.poked.wait()
                await asyncio.sleep(0)


@pytest.mark.parametrize("error", [NoAnswer("scancel did not answer"), OSError("no more threads")])
def test_a_cancel_that_failed_is_repeated(monkeypatch, error):
    """Also where nothing else happens in the cluster; the job stayed for ever."""

    async def run() -> None:
        site = Site(monkeypatch, error)
        site.terminator.cancel(["1"])
        await site.cancelled(2)
        assert site.said == [f"warning: {error}"]

    asyncio.run(run())


def test_a_cancel_that_the_queue_forgets_is_repeated(monkeypatch):
    async def run() -> None:
        site = Site(monkeypatch)
        site.terminator.cancel(["1"])
        await site.cancelled(3)
        assert not site.said

    asyncio.run(run())


@pytest.mark.parametrize("facts", [{"state": JobState.CANCELLED}, {"cancelled": False}], ids=str)
def test_a_cancel_is_not_repeated_for_what_is_gone(monkeypatch, facts):
    async def run() -> None:
        site = Site(monkeypatch)
        site.terminator.cancel(["1"])
        await asyncio.sleep(0)
        site.state.mark("1", **facts)
        await asyncio.wait_for(site.poked.wait(), 60)
        await asyncio.sleep(0)
        assert site.door.cancelled == [["1"]]

    asyncio.run(run())


def test_a_job_that_is_not_needed_is_given_up_before_its_walltime_too(monkeypatch):
    """Its end counted as a death of what it ran."""
    reasons: list[str] = []

    async def hand_over(scheduler: Any, workers: Collection[str], *, deadline_s: float) -> set[str]:
        assert deadline_s < 2
        await asyncio.sleep(deadline_s)
        return set()

    async def force_out(*_: Any, reason: str, expected: bool) -> None:
        assert not expected
        reasons.append(reason)

    async def run() -> None:
        now = time.time()
        site = Site(monkeypatch, started=now - 600, ends=now + 1)
        site.state.mark("1", workers=frozenset(worker_names("ab", site.state.jobs["1"])))
        site.terminator.retire("1")
        await asyncio.wait_for(site.terminator._retiring["1"], 60)

    monkeypatch.setattr(termination, "LAST_MOMENT_S", 0.2)
    monkeypatch.setattr(retire, "retire", hand_over)
    monkeypatch.setattr(retire, "force_out", force_out)
    asyncio.run(run())
    assert reasons == ["walltime"]
