"""Processes of this machine as jobs."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from hpcdask.errors import Refused
from hpcdask.queues import local
from hpcdask.queues.base import Request
from hpcdask.queues.job_state import OVER, QueueState, QueueStatus
from hpcdask.queues.local import LocalQueue
from launching import end, leftovers, wait_for


class Site:
    """A folder for scripts and logs, and a tag whose processes must be gone at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tag = f"hpcdask:{uuid.uuid4().hex}"
        self.submitted: list[tuple[LocalQueue, list[str]]] = []

    def script(self, command: str, gpus: int = 0) -> str:
        request = Request(name="x", tag=self.tag, folder=str(self.folder), gpus=gpus)
        job = SimpleNamespace(shebang="", _job_script_prologue=["A=from-prologue"])
        path = self.folder / f"script {uuid.uuid4().hex}.sh"
        path.write_text(LocalQueue().script(job, request, ["B=from-preamble"], command))
        return str(path)

    def submit(self, queue: LocalQueue, command: str, count: int = 1, gpus: int = 0) -> list[str]:
        ids = asyncio.run(queue.submit(self.script(command, gpus), count))
        self.submitted.append((queue, ids))
        return ids

    def output(self, job_id: str) -> str:
        return (self.folder / f"queue-{job_id}.log").read_text()

    def processes(self) -> list[psutil.Process]:
        return leftovers(self.tag)


GRACE_S = 1  # between SIGTERM and SIGKILL


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setattr(local, "KILL_WAIT_S", GRACE_S)
    site = Site(tmp_path)
    try:
        yield site
        wait_for(lambda: not site.processes(), 15, "the jobs' processes to end")
        for queue, ids in site.submitted:
            assert all(seen.state in OVER for seen in query(queue, *ids))
    finally:
        end(site.processes())


def query(queue: LocalQueue, *ids: str) -> list[QueueStatus | None]:
    seen = asyncio.run(queue.query(ids))
    return [seen.get(job_id) for job_id in ids]


def wait_over(queue: LocalQueue, *ids: str, timeout: float = 30) -> list[QueueStatus]:
    wait_for(lambda: all(seen.state in OVER for seen in query(queue, *ids)), timeout, "the end")
    return query(queue, *ids)


def cancel(queue: LocalQueue, *ids: str) -> None:
    asyncio.run(queue.cancel(ids))


def test_a_job_runs_with_prologue_and_ends(site):
    queue = LocalQueue()
    ids = site.submit(queue, 'echo "$A $B"; echo "id ${HPCDASK_LOCAL_JOB}" >&2', count=3)
    assert len(set(ids)) == 3
    for job_id, seen in zip(ids, wait_over(queue, *ids), strict=True):
        assert seen.id == job_id
        assert (seen.state, seen.exit_code) == (QueueState.COMPLETED, 0)
        assert seen.nodes == os.uname().nodename
        assert abs(seen.started - time.time()) < 600
        assert site.output(job_id).splitlines() == ["from-prologue from-preamble", f"id {job_id}"]
        assert (site.folder / f"queue-{job_id}.log").stat().st_mode & 0o777 == 0o600
    assert asyncio.run(queue.tagged()).keys().isdisjoint(ids)


@pytest.mark.parametrize(
    ("command", "code", "reason"),
    [("exit 3", 3, ""), ("kill -KILL $$", 137, "killed by SIGKILL")],
)
def test_a_job_fails_with_its_exit_code(site, command, code, reason):
    queue = LocalQueue()
    (job_id,) = site.submit(queue, command)
    (seen,) = wait_over(queue, job_id)
    assert (seen.state, seen.exit_code, seen.reason) == (QueueState.FAILED, code, reason)


def test_a_job_that_cannot_be_started_has_failed(site):
    queue = LocalQueue()
    script = Path(site.script("true"))
    script.write_text(script.read_text().replace(str(site.folder), str(site.folder / "missing")))
    (job_id,) = asyncio.run(queue.submit(str(script), 1))
    (seen,) = query(queue, job_id)
    assert seen.state is QueueState.FAILED
    assert "No such file or directory" in seen.reason


def test_cancelling_ends_all_of_a_job(site):
    queue = LocalQueue()
    (job_id,) = site.submit(queue, "sleep 1000 & (setsid sleep 1000) & exec sleep 1000")
    wait_for(lambda: len([p for p in site.processes() if p.name() == "sleep"]) == 3)
    assert query(queue, job_id)[0].state is QueueState.RUNNING
    assert asyncio.run(queue.tagged())[job_id] == site.tag
    cancel(queue, job_id)
    (seen,) = wait_over(queue, job_id)
    assert (seen.state, seen.exit_code, seen.reason) == (QueueState.CANCELLED, 143, "cancelled")
    assert not site.processes()


def test_what_ignores_sigterm_is_killed_without_the_one_who_asked(site):
    queue = LocalQueue()
    (job_id,) = site.submit(queue, "trap '' TERM; echo ready; while :; do sleep 0.1; done")
    wait_for(lambda: site.output(job_id))
    cancel(queue, job_id)
    wait_for(lambda: not site.processes(), 30, "the job's end, though nobody asks")
    assert query(queue, job_id)[0].state is QueueState.CANCELLED


def test_the_walltime_ends_a_job(site):
    queue = LocalQueue(walltime_s=1)
    polite, stubborn = (
        site.submit(queue, command)[0]
        for command in ("exec sleep 1000", "trap '' TERM; sleep 1000; sleep 1000")
    )
    seen = query(queue, polite)[0]
    assert seen.ends - seen.started == pytest.approx(1)
    last = [(seen.state, seen.exit_code) for seen in wait_over(queue, polite, stubborn)]
    assert last == [(QueueState.TIMEOUT, 143), (QueueState.TIMEOUT, 137)]


def test_every_job_has_gpus_of_its_own(site):
    gpus = [f"GPU-{uuid.uuid4()}" for _ in range(3)]
    queue = LocalQueue(gpus)
    mark = f"{site.folder}/$HPCDASK_LOCAL_JOB"
    hold = f'echo "$CUDA_VISIBLE_DEVICES"; while [ ! -e "{mark}" ]; do sleep 0.05; done'
    ids = site.submit(queue, hold, count=5, gpus=1)
    states = [seen.state for seen in query(queue, *ids)]
    assert states == [QueueState.RUNNING] * 3 + [QueueState.PENDING] * 2
    assert {seen.reason for seen in query(queue, *ids[3:])} == {"Resources: all 3 GPUs are taken"}
    wait_for(lambda: all(site.output(job_id) for job_id in ids[:3]))
    assert sorted(site.output(job_id).strip() for job_id in ids[:3]) == sorted(gpus)

    (site.folder / ids[1]).touch()
    wait_over(queue, ids[1])
    wait_for(lambda: query(queue, ids[3])[0].state is QueueState.RUNNING)
    wait_for(lambda: site.output(ids[3]))
    assert site.output(ids[3]) == site.output(ids[1])
    assert query(queue, ids[4])[0].state is QueueState.PENDING

    (cpu,) = site.submit(queue, 'echo "has [$CUDA_VISIBLE_DEVICES]"', gpus=0)
    wait_over(queue, cpu)
    assert site.output(cpu) == "has []\n"
    cancel(queue, *ids)
    assert query(queue, ids[4])[0].state is QueueState.CANCELLED
    wait_over(queue, *ids)


def test_a_gpu_that_was_just_given_is_not_given_again(site):
    """Regression: the kernel shows a new process's environment a moment late."""
    for _ in range(20):
        gpus = [f"GPU-{uuid.uuid4()}"]
        first, second = LocalQueue(gpus), LocalQueue(gpus)
        ids = site.submit(first, "exec sleep 1000", count=2, gpus=1)
        (other,) = site.submit(second, "true", gpus=1)
        states = [seen.state for seen in query(first, *ids) + query(second, other)]
        assert states == [QueueState.RUNNING] + [QueueState.PENDING] * 2
        cancel(second, other)
        cancel(first, *ids)


def test_two_queues_take_no_gpu_twice(site):
    gpus = [f"GPU-{uuid.uuid4()}" for _ in range(3)]
    first, second = LocalQueue(gpus), LocalQueue(gpus)
    ours = site.submit(first, "exec sleep 1000", count=2, gpus=1)
    (pair,) = site.submit(second, 'echo "$CUDA_VISIBLE_DEVICES"', gpus=2)
    assert query(second, pair)[0].reason == "Resources: 1 of 3 GPUs are free, not 2"
    cancel(first, ours[0])
    wait_over(first, ours[0])
    wait_over(second, pair)
    assert len(set(site.output(pair).strip().split(",")) & set(gpus)) == 2
    cancel(first, *ours)
    wait_over(first, *ours)


def test_the_gpu_of_a_job_whose_submitter_died_stays_taken(site):
    gpu = f"GPU-{uuid.uuid4()}"
    job_id = submit_elsewhere(site, "exec sleep 1000", gpus=1, uuids=[gpu])
    queue = LocalQueue([gpu])
    (waiting,) = site.submit(queue, "true", gpus=1)
    assert query(queue, waiting)[0].state is QueueState.PENDING
    cancel(queue, job_id)
    wait_over(queue, waiting)


def test_more_gpus_than_there_are_are_refused(site):
    with pytest.raises(Refused, match="asks for 2 GPUs, and this machine has 1") as refusal:
        site.submit(LocalQueue(["GPU-1"]), "true", gpus=2)
    assert not refusal.value.for_now


def submit_elsewhere(
    site: Site, command: str, gpus: int = 0, uuids: list[str] | None = None
) -> str:
    """Submit in a process that then ends."""
    program = f"""
import asyncio
from hpcdask.queues import local
local.KILL_WAIT_S = {GRACE_S}
print(*asyncio.run(local.LocalQueue({uuids!r}).submit({site.script(command, gpus)!r}, 1)))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True
    )
    assert not done.stderr
    return done.stdout.strip()


def test_another_process_finds_and_cancels_a_job(site):
    job_id = submit_elsewhere(site, "trap '' TERM; echo ready; while :; do sleep 0.1; done")
    queue = LocalQueue()
    wait_for(lambda: site.output(job_id))
    assert asyncio.run(queue.tagged())[job_id] == site.tag
    (seen,) = query(queue, job_id)
    assert seen.state is QueueState.RUNNING
    cancel(queue, job_id)
    wait_for(lambda: query(queue, job_id) == [None], 30, "the job's end")


def test_jobs_of_another_home_are_not_listed(site, monkeypatch):
    """`hpcdask down --dead` must not end the jobs of people who share an account, or of tests."""
    monkeypatch.setenv("HPCDASK_HOME", str(site.folder / "theirs"))
    job_id = submit_elsewhere(site, "exec sleep 1000")
    monkeypatch.setenv("HPCDASK_HOME", str(site.folder / "ours"))
    queue = LocalQueue()
    (own,) = site.submit(queue, "exec sleep 1000")
    assert set(asyncio.run(LocalQueue().tagged())) == {own}
    assert query(queue, job_id)[0].state is QueueState.RUNNING  # one that is named is found
    monkeypatch.setenv("HPCDASK_HOME", str(site.folder / "theirs"))
    assert set(asyncio.run(LocalQueue().tagged())) == {job_id}
    cancel(queue, job_id, own)
    wait_over(queue, own)


@pytest.mark.parametrize(("trap", "told"), [("", []), ("echo bye; exit", ["bye"])])
def test_a_job_without_its_leader_is_found_and_ended(site, trap, told):
    job_id = submit_elsewhere(site, f"trap '{trap}' TERM; echo ready; while :; do sleep 0.1; done")
    queue = LocalQueue()
    wait_for(lambda: site.output(job_id))
    (leader,) = (process for process in site.processes() if process.name() == "timeout")
    leader.kill()
    wait_for(lambda: leader not in site.processes())
    assert query(queue, job_id)[0].state is QueueState.RUNNING
    cancel(queue, job_id)
    wait_for(lambda: query(queue, job_id) == [None], 30, "the job's end")
    assert {"ready", *told} <= set(site.output(job_id).splitlines())


def test_a_job_is_seen_while_its_processes_come_and_go(site):
    """Regression: one that ended meanwhile hid the others, and the job seemed to be over."""
    job_id = submit_elsewhere(site, "echo ready; while :; do /bin/true; done")
    queue = LocalQueue()
    wait_for(lambda: site.output(job_id))
    assert all(query(queue, job_id)[0] is not None for _ in range(100))
    cancel(queue, job_id)
    wait_for(lambda: query(queue, job_id) == [None], 30, "the job's end")


def test_a_job_whose_leader_is_killed_takes_its_processes_with_it(site):
    queue = LocalQueue()
    (job_id,) = site.submit(queue, "echo ready; sleep 1000; sleep 1000")
    wait_for(lambda: site.output(job_id))
    (leader,) = (process for process in site.processes() if process.name() == "timeout")
    leader.kill()
    wait_for(lambda: query(queue, job_id)[0].reason, what="its leader's end to be seen")
    assert query(queue, job_id)[0].state is QueueState.RUNNING
    (seen,) = wait_over(queue, job_id)
    assert (seen.state, seen.exit_code) == (QueueState.FAILED, 137)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("90s", 90), ("5min", 300), ("1h30m", 5400), ("00:30:00", 1800)],
)
def test_walltimes(text, seconds):
    assert LocalQueue.parse_walltime(text) == timedelta(seconds=seconds)
