"""Processes of this machine as jobs."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from doors import ask, cancel, wait_for_state
from hpcdask.errors import Refused
from hpcdask.queues import local
from hpcdask.queues.base import Request
from hpcdask.queues.job_state import OVER, JobState, QueueStatus
from hpcdask.queues.local import LocalQueue
from launching import end, leftovers, wait_for

GRACE_S = 1  # between SIGTERM and SIGKILL
STUBBORN = "trap '' TERM; echo ready; while :; do sleep 0.1; done"
SLEEP = "exec sleep 1000"


class Site:
    """A folder for scripts and logs, and a tag whose processes must be gone at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tag = f"hpcdask:{uuid.uuid4().hex}"
        self.submitted: list[tuple[LocalQueue, str]] = []

    def script(self, command: str, gpus: int = 0) -> str:
        request = Request(name="x", tag=self.tag, folder=str(self.folder), gpus=gpus)
        job = SimpleNamespace(shebang="", job_header="", _job_script_prologue=["A=from-prologue"])
        job.job_extra_directives = job.job_directives_skip = ()
        path = self.folder / f"script {uuid.uuid4().hex}.sh"
        path.write_text(LocalQueue().script(job, request, ["B=from-preamble"], command))
        return str(path)

    def submit(self, queue: LocalQueue, command: str, count: int = 1, gpus: int = 0) -> list[str]:
        ids = asyncio.run(queue.submit(self.script(command, gpus), count))
        self.submitted += [(queue, job_id) for job_id in ids]
        return ids

    def submit_elsewhere(self, command: str, uuids: Sequence[str] = ()) -> str:
        """Submit in a process that ends when the job has begun; the job takes all these GPUs."""
        program = (
            "import asyncio, time\nfrom hpcdask.queues import local\n"
            f"local.KILL_WAIT_S, queue = {GRACE_S}, local.LocalQueue({[*uuids]})\n"
            f"(job,) = asyncio.run(queue.submit({self.script(command, len(uuids))!r}, 1))\n"
            "while asyncio.run(queue.query([job]))[job].state != 'running':\n    time.sleep(0.01)\n"
            "print(job)\n"
        )
        words = [sys.executable, "-c", program]
        done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=True)
        assert not done.stderr
        return done.stdout.strip()

    def output(self, job_id: str) -> str:
        return (self.folder / f"queue-{job_id}.log").read_text()

    def processes(self) -> list[psutil.Process]:
        return leftovers(self.tag)

    def kill_leader(self) -> None:
        (leader,) = (process for process in self.processes() if process.name() == "timeout")
        leader.kill()
        wait_for(lambda: leader not in self.processes())


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setattr(local, "KILL_WAIT_S", GRACE_S)
    site = Site(tmp_path)
    try:
        yield site
        wait_for(lambda: not site.processes(), 15, "the jobs' processes to end")
        for queue, job_id in site.submitted:
            wait_for_state(queue, job_id, *OVER)
    finally:
        end(site.processes())


def gpus(count: int) -> list[str]:
    return [f"GPU-{uuid.uuid4()}" for _ in range(count)]


def running(queue: LocalQueue, *ids: str) -> list[QueueStatus]:
    return [wait_for_state(queue, job_id, JobState.RUNNING) for job_id in ids]


def waiting(queue: LocalQueue, job_id: str) -> str:
    """Wait until the queue has seen that a job must wait, and return why."""
    reason = wait_for(lambda: ask(queue, job_id).reason)
    assert ask(queue, job_id).state is JobState.PENDING
    return reason


def cancelled(queue: LocalQueue, *ids: str) -> list[QueueStatus]:
    cancel(queue, ids)
    return [wait_for_state(queue, job_id, *OVER) for job_id in ids]


def test_a_job_runs_with_prologue_and_ends(site: Site):
    queue = LocalQueue()
    ids = site.submit(queue, 'echo "$A $B"; echo "id ${HPCDASK_LOCAL_JOB}" >&2', count=3)
    assert len(set(ids)) == 3
    for job_id in ids:
        seen = wait_for_state(queue, job_id, *OVER)
        assert (seen.id, seen.state, seen.exit_code) == (job_id, JobState.COMPLETED, 0)
        assert seen.nodes == os.uname().nodename
        assert abs(seen.started - time.time()) < 600
        assert site.output(job_id).splitlines() == ["from-prologue from-preamble", f"id {job_id}"]
        assert (site.folder / f"queue-{job_id}.log").stat().st_mode & 0o777 == 0o600
    assert asyncio.run(queue.tagged()).keys().isdisjoint(ids)


@pytest.mark.parametrize(
    ("command", "code", "reason"),
    [("exit 3", 3, ""), ("kill -KILL $$", 137, "ended by SIGKILL")],
)
def test_a_job_fails_with_its_exit_code(site: Site, command: str, code: int, reason: str):
    queue = LocalQueue()
    seen = wait_for_state(queue, *site.submit(queue, command), *OVER)
    assert (seen.state, seen.exit_code, seen.reason) == (JobState.FAILED, code, reason)


def test_a_job_that_cannot_be_started_has_failed(site: Site):
    queue = LocalQueue()
    script = Path(site.script("true"))
    script.write_text(script.read_text().replace(str(site.folder), str(site.folder / "missing")))
    (job_id,) = asyncio.run(queue.submit(str(script), 1))
    assert "No such file or directory" in wait_for_state(queue, job_id, JobState.FAILED).reason


def test_cancelling_ends_all_of_a_job(site: Site):
    queue = LocalQueue()
    (job_id,) = site.submit(queue, f"sleep 1000 & (setsid sleep 1000) & {SLEEP}")
    wait_for(lambda: len([p for p in site.processes() if p.name() == "sleep"]) == 3)
    running(queue, job_id)
    assert asyncio.run(queue.tagged())[job_id] == site.tag
    (seen,) = cancelled(queue, job_id)
    assert (seen.state, seen.exit_code, seen.reason) == (JobState.CANCELLED, 143, "cancelled")
    assert not site.processes()


def test_what_ignores_sigterm_is_killed_without_the_one_who_asked(site: Site):
    job_id = site.submit_elsewhere(STUBBORN)
    wait_for(lambda: site.output(job_id))
    program = "import asyncio, sys; from hpcdask.queues.local import LocalQueue\n"
    program += "asyncio.run(LocalQueue().cancel(sys.argv[1:]))"
    subprocess.run([sys.executable, "-c", program, job_id], timeout=300, check=True)
    wait_for(lambda: not site.processes(), 30, "the job's end, though nobody asks")


def test_the_walltime_ends_a_job(site: Site):
    queue = LocalQueue(walltime_s=1)
    commands = (SLEEP, "trap '' TERM; sleep 1000; sleep 1000")
    polite, stubborn = (site.submit(queue, command)[0] for command in commands)
    for job_id, code in ((polite, 143), (stubborn, 137)):
        seen = wait_for_state(queue, job_id, *OVER)
        assert (seen.state, seen.exit_code) == (JobState.TIMEOUT, code)
        assert seen.ends - seen.started == pytest.approx(1)


# GPUs


def test_every_job_has_gpus_of_its_own(site: Site):
    queue = LocalQueue(every := gpus(3))
    mark = f"{site.folder}/$HPCDASK_LOCAL_JOB"
    hold = f'echo "$CUDA_VISIBLE_DEVICES"; while [ ! -e "{mark}" ]; do sleep 0.05; done'
    ids = site.submit(queue, hold, count=5, gpus=1)
    running(queue, *ids[:3])
    assert {waiting(queue, one) for one in ids[3:]} == {"Resources: 0 of 3 GPUs are free, not 1"}
    wait_for(lambda: all(site.output(job_id) for job_id in ids[:3]))
    assert sorted(site.output(job_id).strip() for job_id in ids[:3]) == sorted(every)

    (site.folder / ids[1]).touch()
    running(queue, ids[3])
    assert wait_for(lambda: site.output(ids[3])) == site.output(ids[1])
    waiting(queue, ids[4])

    (cpu,) = site.submit(queue, 'echo "has [$CUDA_VISIBLE_DEVICES]"')
    wait_for_state(queue, cpu, *OVER)
    assert site.output(cpu) == "has []\n"
    assert cancelled(queue, *ids)[4].state is JobState.CANCELLED


def test_a_gpu_that_was_just_given_is_not_given_again(site: Site):
    """Regression: the kernel shows a new process's environment a moment late."""
    for _ in range(20):
        one = gpus(1)
        queues = LocalQueue(one), LocalQueue(one)
        jobs = [(queue, job) for queue in queues for job in site.submit(queue, SLEEP, 2, gpus=1)]
        seen = [wait_for(partial(decided, queue, job_id)) for queue, job_id in jobs]
        assert sorted(seen) == ["pending"] * 3 + ["running"]
        for queue, job_id in reversed(jobs):
            cancel(queue, [job_id])


def decided(queue: LocalQueue, job_id: str) -> str:
    """Return the state of a job once the queue has tried to start it."""
    seen = ask(queue, job_id)
    return seen.state if seen.state is JobState.RUNNING or seen.reason else ""


def test_two_queues_take_no_gpu_twice(site: Site):
    every = gpus(3)
    first, second = LocalQueue(every), LocalQueue(every)
    ours = site.submit(first, SLEEP, count=2, gpus=1)
    running(first, *ours)
    (pair,) = site.submit(second, 'echo "$CUDA_VISIBLE_DEVICES"', gpus=2)
    assert waiting(second, pair) == "Resources: 1 of 3 GPUs are free, not 2"
    cancelled(first, ours[0])
    wait_for_state(second, pair, *OVER)
    assert len(set(site.output(pair).strip().split(",")) & set(every)) == 2
    cancelled(first, *ours)


def test_the_gpu_of_a_job_whose_submitter_died_stays_taken(site: Site):
    job_id = site.submit_elsewhere(SLEEP, one := gpus(1))
    queue = LocalQueue(one)
    (next_job,) = site.submit(queue, "true", gpus=1)
    waiting(queue, next_job)
    cancel(queue, [job_id])
    wait_for_state(queue, next_job, *OVER)


def test_more_gpus_than_there_are_are_refused(site: Site):
    with pytest.raises(Refused, match="asks for 2 GPUs, and this machine has 1") as refusal:
        site.submit(LocalQueue(gpus(1)), "true", gpus=2)
    assert not refusal.value.for_now


# A query only reads


def test_a_waiting_job_starts_though_nobody_asks(site: Site):
    """Regression: a query started it."""
    queue = LocalQueue(gpus(1))
    site.submit(queue, f"touch '{site.folder}'/ended-$HPCDASK_LOCAL_JOB", count=2, gpus=1)
    wait_for(lambda: len(list(site.folder.glob("ended-*"))) == 2, 15, "both jobs' end")


def test_a_job_whose_leader_is_killed_takes_its_processes_with_it(site: Site):
    """Regression: a query killed them."""
    queue = LocalQueue()
    (job_id,) = site.submit(queue, "echo ready; sleep 1000; sleep 1000")
    wait_for(lambda: running(queue, job_id) and site.output(job_id))
    site.kill_leader()
    wait_for(lambda: not site.processes(), 15, "its end, though nobody asks")
    seen = wait_for_state(queue, job_id, *OVER)
    assert (seen.state, seen.exit_code) == (JobState.FAILED, 137)


# Jobs of other processes


def test_another_process_finds_and_cancels_a_job(site: Site):
    job_id = site.submit_elsewhere(STUBBORN)
    queue = LocalQueue()
    wait_for(lambda: site.output(job_id))
    assert asyncio.run(queue.tagged())[job_id] == site.tag
    running(queue, job_id)
    cancel(queue, [job_id])
    wait_for(lambda: ask(queue, job_id) is None, 30, "the job's end")


def test_jobs_of_another_home_are_not_listed(site: Site, monkeypatch: pytest.MonkeyPatch):
    """`hpcdask down --dead` must not end the jobs of people who share an account, or of tests."""
    monkeypatch.setenv("HPCDASK_HOME", str(site.folder / "theirs"))
    job_id = site.submit_elsewhere(SLEEP)
    monkeypatch.setenv("HPCDASK_HOME", str(site.folder / "ours"))
    queue = LocalQueue()
    (own,) = site.submit(queue, SLEEP)
    running(queue, own, job_id)  # one that is named is found
    assert set(asyncio.run(LocalQueue().tagged())) == {own}
    monkeypatch.setenv("HPCDASK_HOME", str(site.folder / "theirs"))
    assert set(asyncio.run(LocalQueue().tagged())) == {job_id}
    cancel(queue, [job_id, own])


def test_a_job_without_its_leader_is_found_and_ended(site: Site):
    job_id = site.submit_elsewhere(STUBBORN.replace("''", "'echo bye; exit'"))
    queue = LocalQueue()
    wait_for(lambda: site.output(job_id))
    site.kill_leader()
    running(queue, job_id)
    cancel(queue, [job_id])
    wait_for(lambda: ask(queue, job_id) is None, 30, "the job's end")
    assert {"ready", "bye"} <= set(site.output(job_id).splitlines())


def test_a_job_is_seen_while_its_processes_come_and_go(site: Site):
    """Regression: one that ended meanwhile hid the others, and the job seemed to be over."""
    job_id = site.submit_elsewhere("echo ready; while :; do /bin/true; done")
    queue = LocalQueue()
    wait_for(lambda: site.output(job_id))
    assert all(ask(queue, job_id) is not None for _ in range(100))
    cancel(queue, [job_id])
