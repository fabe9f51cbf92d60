"""How many commands a submission takes, with a stand-in for the queue."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from pathlib import Path

import pytest

from hpcdask.clusters.submitter import Submitter
from hpcdask.errors import NoAnswer, QueueError, Refused
from hpcdask.jobs.folder import ClusterFolder
from hpcdask.queues.local import LocalQueue

TAG = "hpcdask:test"


class Door(LocalQueue):
    """Takes at most `room` jobs in all, `largest` at a time; a stand-in for a queue."""

    def __init__(self, room: int, largest: int = 1000, error: QueueError | None = None) -> None:
        super().__init__()
        self.room = room
        self.largest = largest
        self.error = error
        self.asked: list[int] = []
        self.lost: list[str] = []
        self.silent = False
        self.words: QueueError = NoAnswer("squeue did not answer")

    async def limit(self) -> int:
        return self.largest

    async def submit(self, script: str, count: int) -> list[str]:
        self.asked.append(count)
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


def make_folder(base: Path) -> ClusterFolder:
    folder = ClusterFolder.create("test", "local", base=base)
    folder.write_script("#!/bin/sh\n")
    return folder


def run(
    door: Door, tmp_path: Path, count: int, commands: int = 1000
) -> tuple[list[str], Submitter]:
    """Submit; after so many commands none is wanted any more."""
    folder = make_folder(tmp_path)
    added: list[str] = []

    def add(ids: Collection[str]) -> None:
        added.extend(ids)

    def missing() -> int:
        return 0 if len(door.asked) >= commands else count - len(added)

    submitter = Submitter(door, folder, TAG, add, missing)
    try:
        asyncio.run(submitter.submit(count, []))
    except QueueError as error:
        added.append(type(error).__name__)
    return added, submitter


def test_many_jobs_are_one_command(tmp_path: Path):
    door = Door(room=5000)
    added, _ = run(door, tmp_path, 64)
    assert len(added) == 64
    assert door.asked == [64]


def test_an_array_has_the_size_that_the_site_allows(tmp_path: Path):
    door = Door(room=5000, largest=1000)
    added, _ = run(door, tmp_path, 2500)
    assert len(added) == 2500
    assert door.asked == [1000, 1000, 500]


def test_a_refused_submission_is_not_tried_with_fewer_when_none_are_wanted(tmp_path: Path):
    door = Door(room=10)
    added, submitter = run(door, tmp_path, 64, commands=1)
    assert added == []
    assert door.asked == [64]
    assert submitter.retry_at == 0


def test_a_limit_takes_what_it_can_and_is_tried_again_later(tmp_path: Path):
    door = Door(room=10)
    added, submitter = run(door, tmp_path, 64)
    assert len(added) == 11
    assert added[-1] == "Refused"
    assert door.room == 0
    assert submitter.retry_at > 0


def test_a_controller_that_is_too_busy_is_asked_once(tmp_path: Path):
    door = Door(0, error=Refused("Unable to contact slurm controller", for_now=True, fewer=False))
    added, submitter = run(door, tmp_path, 64)
    assert added == ["Refused"]
    assert door.asked == [64]
    assert submitter.retry_at > 0


@pytest.mark.parametrize("error", [NoAnswer("sbatch did not answer"), QueueError("42 what?")])
@pytest.mark.parametrize(("lost", "raised"), [(0, True), (64, False)])
def test_jobs_of_a_command_without_an_answer_are_found(
    tmp_path: Path, lost: int, raised: bool, error: QueueError
):
    door = Door(0, error=error)
    door.lost = [f"7_{number}" for number in range(lost)]
    added, submitter = run(door, tmp_path, 64)
    assert added == door.lost + [type(error).__name__] * raised
    # What is not understood would be sent again and again
    assert bool(submitter.retry_at) == (raised and error.for_now)


def test_jobs_that_were_late_are_not_submitted_again(tmp_path: Path):
    folder = make_folder(tmp_path)
    jobs: list[str] = []
    door = Door(100, error=NoAnswer("sbatch did not answer"))
    submitter = Submitter(door, folder, TAG, jobs.extend, lambda: 4 - len(jobs))
    with pytest.raises(NoAnswer):
        asyncio.run(submitter.submit(4, jobs))
    door.lost, door.error = ["7_0", "7_1", "7_2"], None
    asyncio.run(submitter.submit(4, jobs))
    assert jobs == ["7_0", "7_1", "7_2", "2_0"]
    assert door.asked == [4, 1]
    assert Submitter(door, folder, TAG, jobs.extend, lambda: 0).retry_at == 0


def test_while_it_is_not_known_whether_jobs_are_there_none_are_submitted(tmp_path: Path):
    folder = make_folder(tmp_path)
    door = Door(100, error=NoAnswer("sbatch did not answer"))
    submitter = Submitter(door, folder, TAG, lambda ids: None, lambda: 4)
    for _ in range(3):
        with pytest.raises(NoAnswer):
            asyncio.run(submitter.submit(4, []))
        door.silent = True
    assert door.asked == [4]


def test_a_queue_that_does_not_tell_its_limits_is_asked_later(tmp_path: Path, monkeypatch):
    async def fail() -> int:
        raise QueueError("scontrol failed")

    door = Door(100)
    monkeypatch.setattr(door, "limit", fail)
    added, submitter = run(door, tmp_path, 4)
    assert added == ["NoAnswer"]
    assert submitter.retry_at > 0
    assert not submitter.unanswered  # nothing was sent
    assert door.asked == []


def test_a_queue_that_fails_to_tell_is_asked_later(tmp_path: Path):
    folder = make_folder(tmp_path)
    door = Door(100, error=NoAnswer("qsub did not answer"))
    submitter = Submitter(door, folder, TAG, lambda ids: None, lambda: 4)
    with pytest.raises(NoAnswer):
        asyncio.run(submitter.submit(4, []))
    door.silent = True
    door.words = QueueError("qstat failed: cannot connect")
    submitter.retry_at = 0.0
    with pytest.raises(NoAnswer, match="qstat failed"):
        asyncio.run(submitter.submit(4, []))
    assert submitter.retry_at > 0
