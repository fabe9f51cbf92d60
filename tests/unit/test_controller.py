"""How jobs are submitted, watched and cancelled, with a stand-in for the queue."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Collection, Coroutine
from pathlib import Path
from typing import Any

import pytest

from hpcdask.clusters import controller as controlling
from hpcdask.clusters.controller import Group
from hpcdask.clusters.display import JobTable
from hpcdask.clusters.job import Job
from hpcdask.errors import NoAnswer, QueueError, Refused
from hpcdask.jobs.folder import ClusterFolder
from hpcdask.jobs.state import JobState
from hpcdask.queues.job_state import QueueState, QueueStatus
from hpcdask.queues.local import LocalQueue
from hpcdask.queues.slurm import SlurmQueue
from job_control import control, one_group, stand_in
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
def test_what_the_queue_shows_counts_whatever_accounting_says(error: Exception, words: str):
    said: list[str] = []

    async def ask() -> dict[str, QueueStatus]:
        controller = control(Door(error), said=said)
        await controller.ask(["1", "2"])
        return await controller.ask(["1", "2"])

    assert asyncio.run(ask()).keys() == {"1"}
    assert said == [f"warning: {words}. How jobs ended is not known without it"]


class Cluster:
    """A controller with a stand-in for the scheduler, whose workers have these names."""

    def __init__(self, folder: Path, door: LocalQueue, *workers: str) -> None:
        self.said: list[str] = []
        self.scheduler = stand_in(*workers)
        self.controller = control(
            door, self.scheduler, base=folder, said=self.said, poll_interval_s=0.05
        )
        self.group = self.controller.groups[""]

    def add(self, job_id: str, state: JobState, **facts: Any) -> None:
        self.group.jobs[job_id] = Job(job_id, 1, time.time(), state, **facts)


def test_a_job_that_the_queue_made_in_place_of_another_is_the_clusters(tmp_path):
    """Regression: a query cancelled it, and the cluster submitted one more."""

    async def run() -> None:
        cluster = Cluster(tmp_path, LocalQueue())
        cluster.group.want(1)
        cluster.add("41", JobState.PENDING)
        ended = QueueStatus("41", QueueState.FAILED, "no node", copies=("57",))
        cluster.controller.observe({"41"}, {"41": ended})
        assert [job.id for job in cluster.group.active()] == ["57"]
        over = QueueStatus("57", QueueState.CANCELLED)
        cluster.controller.observe({"57"}, {"57": over})
        cluster.controller.observe({"41"}, {"41": ended})
        assert not cluster.group.active()

    asyncio.run(run())


def test_logs_of_jobs_that_failed_are_not_read_in_the_event_loop(tmp_path, monkeypatch):
    """Regression: a slow file system made the scheduler wait."""
    threads: list[threading.Thread] = []
    logs_of = ClusterFolder.logs_of

    def noted(folder: ClusterFolder, ids: Collection[str]) -> dict[str, list[Path]]:
        threads.append(threading.current_thread())
        return logs_of(folder, ids)

    monkeypatch.setattr(ClusterFolder, "logs_of", noted)

    async def run() -> None:
        cluster = Cluster(tmp_path, LocalQueue())
        folder = cluster.controller.folder
        folder.log_path("2").write_text("no module named cuda\n")
        cluster.controller.start()
        cluster.group.want(1)
        for job_id in ("1", "2", "3"):
            cluster.add(job_id, JobState.STARTING)
            over = QueueStatus(job_id, QueueState.FAILED, exit_code=1)
            cluster.controller.observe({job_id}, {job_id: over})
        await until(lambda: cluster.group.failure is not None)
        assert "3 jobs in a row ended before" in str(cluster.group.failure)
        ended = "job {} has ended: failed, exit code 1"
        log = f". Log: {folder.log_path('2')}"  # the others have none
        said = {ended.format(1), ended.format(2) + log, ended.format(3)}
        await until(lambda: said <= set(cluster.said))

    asyncio.run(run())
    assert len(threads) == 4
    assert threading.main_thread() not in threads


class Full(LocalQueue):
    """Knows of a reason that does not end by itself, as SLURM does."""

    lasting = staticmethod(SlurmQueue.lasting)


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
            cluster.controller.observe(set(seen), seen)
            return cluster.controller.waits

        assert not look("Resources", "Priority", "Dependency")
        assert not cluster.said
        advice = 'What partitions have: sinfo -o "%P %D %c %m %G %l"'
        waits = f"2 jobs wait, and may never start: PartitionConfig. {advice}"
        assert look("PartitionConfig", "PartitionConfig", "Priority") == waits
        assert cluster.said == [f"warning: {waits}"]
        assert look("PartitionConfig", "PartitionConfig", "PartitionConfig").startswith("3 jobs")
        down = "Nodes required for job are DOWN, DRAINED or reserved for others"
        assert SlurmQueue.lasting(down) == "Nodes: sinfo -R"
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
        cluster.controller.start()
        cluster.add("1", JobState.PENDING)
        cluster.controller.observe(set(), {})
        await until(lambda: cluster.controller.folder.report().jobs)
        with pytest.raises(QueueError, match="these jobs are still in the queue"):
            await cluster.controller.close()
        assert not cluster.controller.folder.report().jobs

    monkeypatch.setattr(controlling, "CLOSE_S", 0.1)
    asyncio.run(run())


# Submitting

TAG = "hpcdask:ab"


class Limited(LocalQueue):
    """Takes at most `room` jobs in all, `largest` at a time."""

    def __init__(self, room: int, largest: int = 1000, error: QueueError | None = None) -> None:
        super().__init__()
        self.room = room
        self.largest = largest
        self.error = error
        self.asked: list[int] = []
        self.lost: list[str] = []
        self.silent = False
        self.then: Callable[[], None] = lambda: None
        self.words: QueueError = NoAnswer("squeue did not answer")

    async def limit(self) -> int:
        return self.largest

    async def submit(self, script: str, count: int) -> list[str]:
        self.asked.append(count)
        self.then()
        if self.error is not None:
            raise self.error
        if count > self.room:
            raise Refused("QOSMaxSubmitJobPerUserLimit", for_now=True)
        self.room -= count
        return [f"{len(self.asked)}_{number}" for number in range(count)]

    async def tagged(self) -> dict[str, str]:
        if self.silent:
            raise self.words
        return dict.fromkeys(self.lost, TAG)


async def submit(group: Group, count: int) -> list[str]:
    """Submit what a group wants; its jobs' ids, and the name of an error that a user is told."""
    try:
        async with asyncio.timeout(60):
            await group.scale(count)
    except QueueError as error:
        return [*group.jobs, type(error).__name__]
    return list(group.jobs)


def site(work: Callable[[Group], Coroutine[Any, Any, Any]], door: Limited, tmp_path: Path) -> Any:
    """Do some work with the group of a controller that acts."""

    async def run() -> Any:
        group = one_group(door, base=tmp_path)
        group.controller.spawn(group.controller._act())
        return await work(group)

    return asyncio.run(run())


def run(door: Limited, tmp_path: Path, count: int) -> tuple[list[str], Group]:
    async def work(group: Group) -> tuple[list[str], Group]:
        return await submit(group, count), group

    return site(work, door, tmp_path)


def test_an_array_has_the_size_that_the_site_allows(tmp_path: Path):
    door = Limited(room=5000, largest=1000)
    added, _ = run(door, tmp_path, 2500)
    assert len(added) == 2500
    assert door.asked == [1000, 1000, 500]


def test_a_limit_takes_what_it_can_and_is_tried_again_later(tmp_path: Path):
    door = Limited(room=10)
    added, group = run(door, tmp_path, 64)
    assert len(added) == 10
    assert door.room == 0
    assert group.retry_at > 0


def test_a_controller_that_is_too_busy_is_asked_once(tmp_path: Path):
    door = Limited(
        0, error=Refused("Unable to contact slurm controller", for_now=True, fewer=False)
    )
    added, group = run(door, tmp_path, 64)
    assert not added
    assert door.asked == [64]
    assert group.retry_at > 0


@pytest.mark.parametrize("error", [NoAnswer("sbatch did not answer"), QueueError("42 what?")])
@pytest.mark.parametrize(("lost", "raised"), [(0, True), (64, False)])
def test_jobs_of_a_command_without_an_answer_are_found(
    tmp_path: Path, lost: int, raised: bool, error: QueueError
):
    door = Limited(0, error=error)
    door.lost = [f"7_{number}" for number in range(lost)]
    added, group = run(door, tmp_path, 64)
    assert added == door.lost + [type(error).__name__] * raised
    # What is not understood would be sent again and again
    assert bool(group.retry_at) == (raised and error.for_now)


def test_jobs_that_were_late_are_not_submitted_again(tmp_path: Path):
    door = Limited(100, error=NoAnswer("sbatch did not answer"))

    async def work(group: Group) -> None:
        assert await submit(group, 4) == ["NoAnswer"]
        door.lost, door.error = ["7_0", "7_1", "7_2"], None
        assert await submit(group, 4) == ["7_0", "7_1", "7_2", "2_0"]

    site(work, door, tmp_path)
    assert door.asked == [4, 1]


@pytest.mark.parametrize("words", [NoAnswer("squeue hangs"), QueueError("squeue failed")])
def test_while_it_is_not_known_whether_jobs_are_there_none_are_submitted(
    tmp_path: Path, words: QueueError
):
    door = Limited(100, error=NoAnswer("sbatch did not answer"))
    door.words = words

    async def work(group: Group) -> None:
        for _ in range(3):
            assert await submit(group, 4) == ["NoAnswer"]
            door.silent = True

    site(work, door, tmp_path)
    assert door.asked == [4]


# Cancelling


class Silent(LocalQueue):
    """Notes what is cancelled; fails as often as there are errors. Jobs run on."""

    def __init__(self, *errors: Exception) -> None:
        super().__init__()
        self.errors = list(errors)
        self.cancelled: list[list[str]] = []

    async def cancel(self, ids: Collection[str]) -> None:
        self.cancelled.append(list(ids))
        if self.errors:
            raise self.errors.pop(0)

    async def query(self, ids: Collection[str]) -> dict[str, QueueStatus]:
        return {job_id: QueueStatus(job_id, QueueState.RUNNING) for job_id in ids}


def cancelling(monkeypatch: pytest.MonkeyPatch, door: Silent, **facts: Any) -> list[str]:
    """Cancel a job that nobody wants; return what is said after 0.1 s, the time to repeat it."""
    monkeypatch.setattr(controlling, "LEAVE_S", 0.1)
    said: list[str] = []

    async def run() -> None:
        one = one_group(door, said=said, poll_interval_s=0.05)
        one.jobs["1"] = Job("1", 1, time.time(), JobState.STARTING)
        one.controller.spawn(one.controller._act())
        one.controller.spawn(one.controller._watch())
        one.want(0)
        await until(lambda: door.cancelled)
        one.mark(["1"], **facts)
        if facts:
            await asyncio.sleep(0.5)
        else:
            await until(lambda: len(door.cancelled) > 1)

    asyncio.run(run())
    return said


@pytest.mark.parametrize("error", [NoAnswer("scancel did not answer"), OSError("no more threads")])
def test_a_cancel_that_failed_is_repeated(monkeypatch, error):
    """Also where nothing else happens in the cluster; the job stayed for ever."""
    assert cancelling(monkeypatch, Silent(error)) == [f"warning: {error}"]


def test_a_cancel_is_not_repeated_for_what_is_gone(monkeypatch):
    cancelling(monkeypatch, door := Silent(), state=JobState.CANCELLED)
    assert door.cancelled == [["1"]]
