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

from hpcdask.clusters import publishing, retire, termination
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
        (ValueError("not a number"), "ValueError: not a number"),
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


def test_workers_whose_job_is_over_or_of_an_earlier_life_retire(tmp_path, monkeypatch):
    """A node came back, or who watched over the job was killed; they stayed for ever."""
    names = ["ab-1-0-0", "ab-2-0-0", "ab-2-1-0", "ab-3-0-0", "other"]
    tried: list[set[str]] = []

    async def run() -> None:
        cluster = Cluster(tmp_path, LocalQueue(), *names)
        cluster.add("1", JobState.COMPLETED)
        cluster.add("2", JobState.RUNNING, restarts=1)
        cluster.add("3", JobState.RUNNING)
        again = asyncio.Event()

        async def hand_over(_: Any, names: Collection[str], *, deadline_s: float) -> frozenset[str]:
            tried.append(set(names))
            if len(tried) == 1:
                raise RuntimeError("dictionary changed size")
            for name in names:
                del cluster.scheduler.workers[name]
            again.set()
            return frozenset(names)

        monkeypatch.setattr(retire, "retire", hand_over)
        cluster.controller._observe(set(), {})
        await asyncio.sleep(0)
        assert not tried  # they may just be closing
        monkeypatch.setattr(cluster.group, "act", lambda: None)
        watch = asyncio.create_task(cluster.controller._watch())
        await asyncio.wait_for(again.wait(), 60)
        watch.cancel()
        cluster.controller._observe(set(), {})
        await asyncio.gather(watch, *cluster.group.terminator.stop(), return_exceptions=True)
        assert set(cluster.scheduler.workers) == {"ab-2-1-0", "ab-3-0-0", "other"}
        assert not cluster.group.terminator._strays
        assert cluster.said == [
            "warning: workers of jobs that are over were still there, and retire: 1, 2",
            "warning: workers of 1, 2 cannot hand over: RuntimeError: dictionary changed size",
        ]

    asyncio.run(run())
    assert tried == [{"ab-1-0-0", "ab-2-0-0"}] * 2


def test_workers_of_jobs_that_are_over_do_not_wait_for_company_that_nobody_wants(
    tmp_path, monkeypatch
):
    forced: list[list[str]] = []

    async def hand_over(*_: Any, **__: Any) -> frozenset[str]:
        return frozenset()

    async def force_out(_: Any, names: list[str], *, reason: str) -> None:
        forced.append(names)

    async def run() -> None:
        cluster = Cluster(tmp_path, LocalQueue(), "ab-1-0-0")
        cluster.add("1", JobState.COMPLETED)
        await cluster.group.terminator._retire_strays(["ab-1-0-0"])
        assert not forced
        cluster.group.set_target(0)
        await cluster.group.terminator._retire_strays(["ab-1-0-0"])

    monkeypatch.setattr(retire, "retire", hand_over)
    monkeypatch.setattr(retire, "force_out", force_out)
    asyncio.run(run())
    assert forced == [["ab-1-0-0"]]


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


class Counting(LocalQueue):
    """Gives the ids 1, 2, … to each submission."""

    def __init__(self) -> None:
        super().__init__()
        self.meanwhile = lambda: None

    async def submit(self, script: str, count: int) -> list[str]:
        self.meanwhile()
        return [f"{number}" for number in range(1, count + 1)]


@pytest.mark.parametrize("state", [JobState.CANCELLED, JobState.UNKNOWN])
def test_an_id_that_is_given_again_is_another_job(tmp_path, state):
    """SLURM's controller lost its state and counted anew; its new jobs were taken for old ones."""

    async def run() -> None:
        door = Counting()
        cluster = Cluster(tmp_path, door)
        cluster.add("1", state, cancelled=True)
        before = cluster.state.jobs["1"]
        cluster.state.wanted = 2
        cluster.controller._poller._queried = {"1"}

        def connect() -> None:  # before sbatch returns
            cluster.scheduler.workers["late"] = SimpleNamespace(name="ab-2-0-0", nbytes=0, nanny="")
            cluster.controller._observe(set(), {})

        door.meanwhile = connect
        await cluster.group._submit(2)
        one, two = cluster.state.active()
        assert (one.id, two.id) == ("1", "2")
        assert one.submitted > before.submitted
        assert one == Job("1", 1, one.submitted)
        assert two.state is JobState.RUNNING
        assert not cluster.controller._poller._queried
        cluster.group._add(["2"])
        assert cluster.state.jobs["2"] is two

    asyncio.run(run())


class Forgetful(LocalQueue):
    """Has lost the end of job 1; shows others that are over, or not the cluster's."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.error = error
        self.ends = 0
        self.looks = 0

    async def cancel(self, ids: Collection[str]) -> None:
        assert list(ids) == ["1"]
        self.ends += 1

    async def tagged(self) -> dict[str, str]:
        self.looks += 1
        if self.error is not None:
            raise self.error
        return {"1": "hpcdask:ab", "2": "hpcdask:ab", "3": "hpcdask:other"}

    async def query(self, ids: Collection[str]) -> dict[str, QueueStatus]:
        assert "3" not in ids
        one = JobState.CANCELLED if self.ends else JobState.PENDING
        return {"1": QueueStatus("1", one), "2": QueueStatus("2", QueueState.COMPLETED)}


@pytest.mark.parametrize(
    ("error", "ends"), [(None, 1), (QueueError("no answer"), 0), (ValueError("not a number"), 0)]
)
def test_jobs_that_are_there_again_after_their_end_are_ended(tmp_path, error, ends):
    """SLURM's controller was killed before it saved that they had been cancelled."""

    async def run() -> None:
        door = Forgetful(error)
        cluster = Cluster(tmp_path, door)
        cluster.add("1", JobState.CANCELLED, cancelled=True)
        cluster.add("2", JobState.COMPLETED)
        await cluster.controller.close()
        assert door.ends == ends
        assert door.looks == 1
        assert not cluster.state.live()

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


def test_a_cluster_without_jobs_asks_the_queue_nothing_at_its_end(tmp_path):
    door = Forgetful()
    asyncio.run(Cluster(tmp_path, door).controller.close())
    assert not door.looks


def test_at_the_end_of_python_nobody_is_told_that_states_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async def refuse(*arguments: object) -> None:
        raise RuntimeError("cannot schedule new futures after shutdown")

    async def publish() -> list[str]:
        cluster = Cluster(tmp_path, Door(ValueError()))
        cluster.state.jobs["1"] = Job("1", 1, 0.0, JobState.RUNNING)
        monkeypatch.setattr(publishing.asyncio, "to_thread", refuse)
        publisher = publishing.JobPublisher([cluster.state], cluster.controller.folder)
        publisher.publish()
        await publisher._task
        return cluster.said

    assert asyncio.run(publish()) == []
