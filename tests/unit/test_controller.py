"""What the controller makes of a queue's answers, with a stand-in for the queue."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpcdask.clusters import publishing, termination
from hpcdask.clusters.controller import JobController
from hpcdask.clusters.display import JobTable
from hpcdask.clusters.job import Job, Policy
from hpcdask.clusters.state import ClusterState
from hpcdask.errors import QueueError
from hpcdask.jobs.folder import ClusterFolder
from hpcdask.jobs.state import JobReport, JobState
from hpcdask.queues import slurm_errors
from hpcdask.queues.job_state import QueueState, QueueStatus
from hpcdask.queues.local import LocalQueue
from launching import until


class Door(LocalQueue):
    """Shows job 1, and fails to tell how others ended."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    async def query(self, ids: Collection[str]) -> dict[str, QueueStatus]:
        return {"1": QueueStatus("1", QueueState.PENDING)}

    async def departed(self, ids: Collection[str]) -> dict[str, QueueStatus]:
        raise self.error


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (QueueError("sacct did not answer"), "sacct did not answer"),
        (KeyError("State"), "KeyError: 'State'"),
    ],
)
def test_what_the_queue_shows_counts_whatever_accounting_says(
    tmp_path: Path, error: Exception, words: str
):
    said: list[str] = []
    folder = ClusterFolder.create("ab-1", "local", base=tmp_path)

    async def ask() -> dict[str, QueueStatus]:
        state = ClusterState(None, "ab-1", size=1, policy=Policy(), say=said.append)
        controller = JobController([state], Door(error), folder, poll_interval_s=1)
        await controller._poller.ask(["1", "2"])
        return await controller._poller.ask(["1", "2"])

    assert asyncio.run(ask()).keys() == {"1"}
    assert said == [f"warning: {words}. How jobs ended is not known without it"]


class Cluster:
    """A controller with a stand-in for the scheduler, whose workers have these names."""

    def __init__(self, folder: Path, door: LocalQueue, *workers: str) -> None:
        self.said: list[str] = []
        self.scheduler = SimpleNamespace(workers={}, address="tls://here:1")
        for name in workers:
            self.scheduler.workers[name] = SimpleNamespace(name=name, nbytes=0, nanny="")
        self.state = ClusterState(
            self.scheduler, "ab", size=1, policy=Policy(lost_after_s=0.2), say=self.said.append
        )
        made = ClusterFolder.create("ab", "local", base=folder)
        made.write_script("#!/bin/sh\n")
        self.controller = JobController([self.state], door, made, poll_interval_s=60)
        self.group = self.controller.groups[""]
        self.controller._poller.postpone()

    def add(self, job_id: str, state: JobState, **facts: Any) -> None:
        self.state.jobs[job_id] = Job(job_id, 1, time.time(), state, **facts)


def test_jobs_are_told_of_without_waiting_for_the_file_system(tmp_path, monkeypatch):
    """Each change once, what comes meanwhile together, and nothing where nothing is new."""
    written: list[dict[str, tuple[str, int | None]]] = []
    go_on, write = threading.Event(), ClusterFolder.write_reports

    def slow(folder: ClusterFolder, reports: list[JobReport]) -> None:
        assert threading.current_thread() is not threading.main_thread()
        assert go_on.wait(60)
        write(folder, reports)
        written.append({job.id: (job.state, job.workers) for job in reports})

    async def run() -> None:
        cluster = Cluster(tmp_path, LocalQueue(), "ab-1-0-0")
        for job_id in ("1", "2", "3"):
            cluster.add(job_id, JobState.PENDING)
            cluster.controller._observe(set(), {})
            await asyncio.sleep(0)
        cluster.add("3", JobState.FAILED)
        cluster.controller._observe(set(), {})
        go_on.set()
        await until(lambda: len(written) == 2)
        cluster.scheduler.workers["ab-1-0-0"].nbytes = 7
        cluster.controller._observe(set(), {})
        assert cluster.state.jobs["1"].held == 7
        await until(lambda: cluster.controller._publisher._task.done())
        cluster.controller._observe(set(), {})

    monkeypatch.setattr(ClusterFolder, "write_reports", slow)
    monkeypatch.setattr(publishing, "PAUSE_S", 0.01)
    asyncio.run(run())
    assert written == [{"1": ("running", 1)}, {"1": ("running", 1), "2": ("pending", 0)}]


class Full(LocalQueue):
    """Knows of a reason that does not end by itself, as SLURM does."""

    lasting = staticmethod(slurm_errors.lasting)


def test_who_waits_for_what_never_comes_is_told_once(tmp_path):
    async def run() -> None:
        cluster = Cluster(tmp_path, Full())
        for job_id in ("1", "2", "3"):
            cluster.add(job_id, JobState.PENDING)

        def look(*reasons: str) -> str:
            seen = {
                str(number): QueueStatus(str(number), QueueState.PENDING, reason)
                for number, reason in enumerate(reasons, 1)
            }
            cluster.controller._observe(set(seen), seen)
            return cluster.controller.waits

        assert not look("Resources", "Priority", "Dependency")
        assert not cluster.said
        advice = 'What partitions have: sinfo -o "%P %D %c %m %G %l"'
        waits = f"2 jobs wait, and may never start: PartitionConfig. {advice}"
        assert look("PartitionConfig", "PartitionConfig", "Priority") == waits
        assert cluster.said == [f"warning: {waits}"]
        assert look("PartitionConfig", "PartitionConfig", "PartitionConfig").startswith("3 jobs")
        down = "Nodes required for job are DOWN, DRAINED or reserved for others"
        assert slurm_errors.lasting(down) == "Nodes: sinfo -R"
        assert not look("Resources", "Resources", "Resources")
        assert len(cluster.said) == 1
        look("QOSMaxJobsPerUserLimit", "Resources", "Resources")
        waits = "1 job waits, and may never start: QOSMaxJobsPerUserLimit. Limits: sacctmgr"
        assert cluster.said[1:] == [f"warning: {waits} show qos"]
        table = JobTable(cluster.controller.jobs(), cluster.controller.waits)
        assert repr(table).endswith("QOSMaxJobsPerUserLimit. Limits: sacctmgr show qos")

    asyncio.run(run())


def test_jobs_that_nobody_watches_any_more_are_as_the_queue_says(tmp_path, monkeypatch):
    """The notebook lives on; its cluster could not end them."""

    class Deaf(LocalQueue):
        async def cancel(self, ids: Collection[str]) -> None:
            raise QueueError("scancel did not answer")

        async def query(self, ids: Collection[str]) -> dict[str, QueueStatus]:
            return {job_id: QueueStatus(job_id, QueueState.PENDING) for job_id in ids}

    async def run() -> None:
        cluster = Cluster(tmp_path, Deaf())
        cluster.add("1", JobState.PENDING)
        cluster.controller._observe(set(), {})
        await until(cluster.controller.folder.reports)
        with pytest.raises(QueueError, match="these jobs are still in the queue"):
            await cluster.controller.close()
        assert not cluster.controller.folder.reports()

    monkeypatch.setattr(termination, "CLOSE_S", 0.1)
    asyncio.run(run())
