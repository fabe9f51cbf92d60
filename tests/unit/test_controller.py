"""How jobs are submitted, watched and cancelled, with a stand-in for the queue."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest

from hpcdask.clusters import controller as controlling
from hpcdask.clusters.controller import Group
from hpcdask.clusters.display import JobTable
from hpcdask.clusters.job import Job
from hpcdask.errors import NoAnswer, QueueError, Refused
from hpcdask.jobs.folder import ClusterFolder
from hpcdask.queues.base import Queue
from hpcdask.queues.job_state import JobState, QueueStatus
from hpcdask.queues.local import LocalQueue
from hpcdask.queues.slurm import SlurmQueue
from job_control import one_group
from launching import until


def queue(**answers: Any) -> Queue:
    """Return a queue whose methods return these values, call these functions, or raise these."""
    made = LocalQueue()
    for name, answer in answers.items():

        async def method(*args: Any, answer: Any = answer) -> Any:
            if isinstance(answer, Exception):
                raise answer
            return answer(*args) if callable(answer) else answer

        setattr(made, name, method)
    return made


def all_are(state: JobState) -> Callable[[Collection[str]], dict[str, QueueStatus]]:
    return lambda ids: {job_id: QueueStatus(job_id, state) for job_id in ids}


def add(group: Group, job_id: str, state: JobState) -> None:
    group.jobs[job_id] = Job(job_id, 1, time.time(), state)


# Watching


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (QueueError("sacct did not answer"), "sacct did not answer"),
        (KeyError("State"), "KeyError: 'State'"),
    ],
)
def test_what_the_queue_shows_counts_whatever_accounting_says(error: Exception, words: str):
    said: list[str] = []
    waits = QueueStatus("1", JobState.PENDING)

    async def ask() -> Any:
        controller = one_group(queue(query={"1": waits}, departed=error), said=said).controller
        await controller.ask(["1", "2"])
        return await controller.ask(["1", "2"])

    assert asyncio.run(ask()) == {"1": waits, "2": None}
    assert said == [f"warning: {words}. How jobs ended is not known without it"]


def test_a_job_that_the_queue_made_in_place_of_another_is_the_clusters(tmp_path):
    """Regression: a query cancelled it, and the cluster submitted one more."""

    async def run() -> None:
        group = one_group(base=tmp_path)
        group.want(1)
        add(group, "41", JobState.PENDING)
        ended = QueueStatus("41", JobState.FAILED, "no node", copies=("57",))
        group.controller.observe({"41": ended})
        assert [job.id for job in group.active()] == ["57"]
        group.controller.observe({"57": QueueStatus("57", JobState.CANCELLED)})
        group.controller.observe({"41": ended})
        assert not group.active()

    asyncio.run(run())


def test_logs_of_jobs_that_failed_are_not_read_in_the_event_loop(tmp_path, monkeypatch):
    """Regression: a slow file system made the scheduler wait."""
    threads: list[threading.Thread] = []
    said: list[str] = []
    logs_of = ClusterFolder.logs_of

    def noted(folder: ClusterFolder, ids: Collection[str]) -> dict[str, list[Path]]:
        threads.append(threading.current_thread())
        return logs_of(folder, ids)

    monkeypatch.setattr(ClusterFolder, "logs_of", noted)

    async def run() -> None:
        group = one_group(base=tmp_path, said=said)
        folder = group.controller.folder
        folder.log_path("2").write_text("no module named cuda\n")
        group.controller.start()
        group.want(1)
        for job_id in ("1", "2", "3"):
            add(group, job_id, JobState.STARTING)
            if job_id == "2":
                group.controller.observe({"2": QueueStatus("2", JobState.RUNNING)})
            over = QueueStatus(job_id, JobState.FAILED, exit_code=1)
            group.controller.observe({job_id: over})
        await until(lambda: group.failure is not None)
        assert "3 jobs in a row ended before" in str(group.failure)
        ended = "job {} has ended: failed, exit code 1"
        log = f". Log: {folder.log_path('2')}"  # the others have not started
        assert {ended.format(1), ended.format(2) + log, ended.format(3)} <= set(said)

    asyncio.run(run())
    assert threads
    assert threading.main_thread() not in threads


def test_not_all_jobs_that_ended_are_remembered(tmp_path):
    group = one_group(base=tmp_path)
    ids = [str(number) for number in range(1010)]
    for job_id in ids:
        add(group, job_id, JobState.STARTING)
    answer = {job_id: QueueStatus(job_id, JobState.CANCELLED) for job_id in ids[:-1]}

    async def run() -> None:
        group.controller.observe({**answer, ids[-1]: QueueStatus(ids[-1], JobState.RUNNING)})

    asyncio.run(run())
    assert [*group.jobs] == ids[9:]
    assert group.controller.live() == ids[-1:]


def test_who_waits_for_what_never_comes_is_told_once(tmp_path):
    said: list[str] = []

    async def run() -> None:
        controller = one_group(SlurmQueue(), base=tmp_path, said=said).controller
        for job_id in ("1", "2", "3"):
            add(controller.groups[""], job_id, JobState.PENDING)

        def look(*reasons: str) -> str:
            seen = [
                QueueStatus(str(number), JobState.PENDING, reason)
                for number, reason in enumerate(reasons, 1)
            ]
            controller.observe({one.id: one for one in seen})
            return controller.waits

        assert not look("Resources", "Priority", "Dependency")
        assert not said
        advice = 'What partitions have: sinfo -o "%P %D %c %m %G %l"'
        waits = f"2 jobs wait, and may never start: PartitionConfig. {advice}"
        assert look("PartitionConfig", "PartitionConfig", "Priority") == waits
        assert said == [f"warning: {waits}"]
        assert look("PartitionConfig", "PartitionConfig", "PartitionConfig").startswith("3 jobs")
        down = "Nodes required for job are DOWN, DRAINED or reserved for others"
        assert SlurmQueue.lasting(down) == "Nodes: sinfo -R"
        assert not look("Resources", "Resources", "Resources")
        assert len(said) == 1
        look("QOSMaxJobsPerUserLimit", "Resources", "Resources")
        waits = "1 job waits, and may never start: QOSMaxJobsPerUserLimit. Limits: sacctmgr"
        assert said[1:] == [f"warning: {waits} show qos"]
        table = JobTable(controller.jobs(), controller.waits)
        assert repr(table).endswith("QOSMaxJobsPerUserLimit. Limits: sacctmgr show qos")

    asyncio.run(run())


def test_jobs_that_nobody_watches_any_more_are_as_the_queue_says(tmp_path, monkeypatch):
    """The notebook lives on; its cluster could not end them."""
    deaf = queue(cancel=QueueError("scancel hangs"), query=all_are(JobState.PENDING))

    async def run() -> None:
        group = one_group(deaf, base=tmp_path, poll_interval_s=0.05)
        controller = group.controller
        controller.start()
        add(group, "1", JobState.PENDING)
        await until(lambda: controller.folder.report().jobs)
        with pytest.raises(QueueError, match="these jobs are still in the queue"):
            await controller.close()
        assert not controller.folder.report().jobs

    monkeypatch.setattr(controlling, "CLOSE_S", 0.1)
    asyncio.run(run())


def test_a_job_that_a_query_shows_dead_is_replaced_before_the_next_query(tmp_path):
    """Regression: it was replaced an interval later."""
    queries: list[Collection[str]] = []
    before: list[int] = []

    async def query(ids: Collection[str]) -> dict[str, QueueStatus]:
        queries.append(ids)
        await asyncio.sleep(0.05)  # a command takes its time
        return all_are(JobState.PENDING)(ids) | all_are(JobState.FAILED)(["1"])

    def submit(script: str, count: int) -> list[str]:
        before.append(len(queries))
        return ["2"]

    async def run() -> None:
        made: Any = queue(submit=submit, limit=1)
        made.query = query
        group = one_group(made, base=tmp_path, poll_interval_s=0.5)
        add(group, "0", JobState.PENDING)
        add(group, "1", JobState.STARTING)
        group.controller.start()
        group.want(2)
        await until(lambda: "2" in group.jobs)

    asyncio.run(run())
    assert before == [1]


# Submitting


class Limited(LocalQueue):
    """Queue that takes at most `room` jobs in all, `largest` at a time; `lost` are there too."""

    def __init__(self, room: int, largest: int = 1000, error: QueueError | None = None) -> None:
        super().__init__()
        self.room, self.largest, self.error = room, largest, error
        self.asked: list[int] = []
        self.lost: list[str] | QueueError = []
        self.then: Callable[[], None] = lambda: None

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
        if isinstance(self.lost, QueueError):
            raise self.lost
        return dict.fromkeys(self.lost, "hpcdask:ab")

    async def cancel(self, ids: Collection[str]) -> None:
        pass


def submit(group: Group, count: int) -> list[str]:
    """Submit as a user does; return the jobs' ids, and the name of the error, if there is one."""

    async def scale() -> list[str]:
        try:
            async with asyncio.timeout(60):
                await group.scale(count)
        except QueueError as error:
            return [*group.jobs, type(error).__name__]
        return list(group.jobs)

    return asyncio.run(scale())


BUSY = Refused("Unable to contact slurm controller", for_now=True, fewer=False)


@pytest.mark.parametrize(
    ("door", "wanted", "added", "asked"),
    [
        pytest.param(Limited(5000, largest=1000), 2500, 2500, [1000, 1000, 500], id="arrays"),
        pytest.param(Limited(10), 64, 10, None, id="a-limit-takes-what-it-can"),
        pytest.param(Limited(0, error=BUSY), 64, 0, [64], id="a-busy-controller-is-asked-once"),
    ],
)
def test_as_many_jobs_are_submitted_as_the_site_takes(tmp_path, door, wanted, added, asked):
    """The others are, later."""
    group = one_group(door, base=tmp_path)
    assert len(submit(group, wanted)) == added
    assert (group.retry_at > 0) == (added < wanted)
    assert asked in (None, door.asked)


@pytest.mark.parametrize("how", ["close", "scale"])
def test_a_submission_under_way_is_stopped(tmp_path, how):
    door = Limited(1000, largest=1)
    group = one_group(door, base=tmp_path)

    def stop() -> None:
        if len(door.asked) == 3:
            group.want(0) if how == "scale" else group.controller.expect_end()

    door.then = stop
    assert len(submit(group, 30)) == 3


@pytest.mark.parametrize("error", [NoAnswer("sbatch did not answer"), QueueError("42 what?")])
@pytest.mark.parametrize("lost", [0, 64])
def test_jobs_of_a_command_without_an_answer_are_found(tmp_path, lost: int, error: QueueError):
    door = Limited(0, error=error)
    door.lost = [f"7_{number}" for number in range(lost)]
    group = one_group(door, base=tmp_path)
    assert submit(group, 64) == door.lost + [type(error).__name__] * (not lost)


def test_jobs_that_were_late_are_not_submitted_again(tmp_path):
    door = Limited(100, error=NoAnswer("sbatch did not answer"))
    group = one_group(door, base=tmp_path)
    assert submit(group, 4) == ["NoAnswer"]
    door.lost, door.error = ["7_0", "7_1", "7_2"], None
    assert submit(group, 4) == ["7_0", "7_1", "7_2", "2_0"]
    assert door.asked == [4, 1]


@pytest.mark.parametrize("words", [NoAnswer("squeue hangs"), QueueError("squeue failed")])
def test_while_it_is_not_known_whether_jobs_are_there_none_are_submitted(tmp_path, words):
    door = Limited(100, error=NoAnswer("sbatch did not answer"))
    group = one_group(door, base=tmp_path)
    for _ in range(3):
        assert submit(group, 4) == ["NoAnswer"]
        door.lost = words
    assert door.asked == [4]


# Cancelling


@pytest.mark.parametrize(
    ("error", "ended"),
    [
        pytest.param(NoAnswer("scancel did not answer"), False, id="no-answer"),
        pytest.param(OSError("no more threads"), False, id="no-thread"),
        pytest.param(None, True, id="what-is-gone"),
    ],
)
def test_a_cancel_is_repeated_while_the_job_is_there(monkeypatch, error, ended):
    """Regression: where nothing else happened in the cluster, the job stayed for ever."""
    monkeypatch.setattr(controlling, "LEAVE_S", 0.1)
    said: list[str] = []
    cancelled: list[list[str]] = []

    def cancel(ids: Collection[str]) -> None:
        cancelled.append(list(ids))
        if error is not None and len(cancelled) == 1:
            raise error

    async def run() -> None:
        group = one_group(queue(cancel=cancel, query=all_are(JobState.RUNNING)), said=said)
        add(group, "1", JobState.STARTING)
        group.controller.start()
        group.want(0)
        await until(lambda: cancelled)
        if ended:
            group.mark(["1"], state=JobState.CANCELLED)
            await asyncio.sleep(0.5)
        else:
            await until(lambda: len(cancelled) > 1)

    asyncio.run(run())
    assert said == ([] if ended else [f"warning: {error}"])
    assert cancelled[0] == ["1"]
    assert not ended or len(cancelled) == 1
