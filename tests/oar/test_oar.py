"""The door to OAR, against a real one."""

import asyncio
from pathlib import Path

import pytest

from doors import (
    SAY,
    TAG,
    ask,
    cancel,
    check_cluster,
    check_submit,
    make_job,
    submit,
    wait_for_state,
    write_script,
)
from hpcdask import OARCUDACluster
from hpcdask.errors import Refused
from hpcdask.queues.job_state import JobState
from hpcdask.queues.oar import OarQueue
from launching import wait_for
from oar_site import OarSite

SITE = {"memory_per_core_property_name": "not_applicable"}


@pytest.fixture
def queue(oar: OarSite, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> OarQueue:
    """The door, as a user of the site in an empty folder."""
    for name, value in oar.env.items():
        if name != "HOME":  # the test's own
            monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    return OarQueue()


def script_of(door: OarQueue, folder: Path, command: str, *, gpus: int = 0, **keywords) -> str:
    return write_script(door, make_job("OAR", **SITE, **keywords), folder, command, gpus=gpus)


@pytest.mark.slow
def test_jobs_end_each_in_its_way(queue: OarQueue, tmp_path: Path):
    folder = tmp_path / "my logs"
    (job,) = submit(queue, script_of(queue, folder, f"{SAY}; sleep 3; exit 3", gpus=1))
    (good,) = submit(queue, script_of(queue, tmp_path / """it's "odd"; """, "true"))
    (killed,) = submit(queue, script_of(queue, tmp_path / "killed", "kill -9 $$"))
    script = script_of(queue, tmp_path / "long", "exec sleep 600", walltime="0:0:2")
    (expired,) = submit(queue, script)
    seen = wait_for_state(queue, job, JobState.RUNNING)
    assert seen.nodes == "localhost"
    assert seen.started is not None
    assert seen.ends == seen.started + 1800  # dask-jobqueue's default walltime
    seen = wait_for_state(queue, job, JobState.FAILED)
    assert seen.exit_code == 3
    assert (tmp_path / f"said-{job}").read_text() == f"{job}\n"
    assert (folder / f"queue-{job}.log").exists()
    assert wait_for_state(queue, good, JobState.COMPLETED).exit_code == 0
    seen = wait_for_state(queue, killed, JobState.FAILED)
    assert (seen.exit_code, seen.reason) == (137, "ended by SIGKILL")
    ends = [JobState.TIMEOUT, JobState.FAILED, JobState.CANCELLED]
    assert wait_for_state(queue, expired, *ends).state is JobState.TIMEOUT
    assert asyncio.run(queue.tagged()) == {}


@pytest.mark.long
def test_an_array_is_cancelled_one_by_one(queue: OarQueue, tmp_path: Path):
    jobs = submit(queue, script_of(queue, tmp_path, f"{SAY}; exec sleep 600"), 3)
    assert len(set(jobs)) == 3
    for job in jobs:
        wait_for_state(queue, job, JobState.RUNNING)
    wait_for(lambda: len(list(tmp_path.glob("said-*"))) == 3, 10, "the jobs' files")
    assert {path.name for path in tmp_path.glob("said-*")} == {f"said-{job}" for job in jobs}
    assert asyncio.run(queue.tagged()) == dict.fromkeys(jobs, TAG)
    cancel(queue, jobs[1:2])
    assert wait_for_state(queue, jobs[1], JobState.CANCELLED)
    wait_for(lambda: set(asyncio.run(queue.tagged())) == {jobs[0], jobs[2]}, 10, "two jobs")
    cancel(queue, jobs)  # the one that is over does not matter


def test_a_job_waits_for_gpus_is_held_and_cancelled(oar: OarSite, queue: OarQueue, tmp_path: Path):
    script = script_of(queue, tmp_path, "exec sleep 600", gpus=3)
    first, second = submit(queue, script)[0], submit(queue, script)[0]
    wait_for_state(queue, first, JobState.RUNNING)
    assert ask(queue, second).state is JobState.PENDING
    oar.run("oarhold", second)
    wait_for(lambda: ask(queue, second).reason == "Hold", 10, "the job to be held")
    assert ask(queue, second).state is JobState.PENDING
    cancel(queue, [second])
    wait_for_state(queue, second, JobState.CANCELLED)


@pytest.mark.long
def test_oars_own_copy_of_a_job_is_told_of(oar: OarSite, queue: OarQueue, tmp_path: Path):
    """It makes one when a node does not answer. Regression: a query cancelled it."""
    oar.unreachable.touch()
    try:
        (job,) = submit(queue, script_of(queue, tmp_path, "exec sleep 600"))
        seen = wait_for_state(queue, job, JobState.FAILED, timeout=60)
        copies = wait_for(lambda: ask(queue, job).copies, 30, "OAR's own copy")
    finally:
        oar.unreachable.unlink()
        oar.run("oarnodesetting", "-s", "Alive", "-h", "localhost")
    assert "not responding" in seen.reason
    assert set(copies) <= set(oar.sql("SELECT job_id FROM jobs;").split())

    def none_is_left() -> bool:  # OAR may have made one more before the node was alive again
        if left := list(asyncio.run(queue.tagged())):
            cancel(queue, left)
        return not left

    wait_for(none_is_left, 30, "all copies to end")


@pytest.mark.long
def test_what_oar_refuses(queue: OarQueue, tmp_path: Path):
    script = script_of(queue, tmp_path, "true", project="my project", queue="nix")
    with pytest.raises(Refused, match="nix") as caught:
        submit(queue, script)
    assert script in str(caught.value)
    assert "oarnodes" in str(caught.value)
    assert not caught.value.for_now


def test_more_than_there_is_is_refused(queue: OarQueue, tmp_path: Path):
    script = script_of(queue, tmp_path, "true", gpus=5)
    with pytest.raises(Refused, match="not enough resources") as caught:
        submit(queue, script)
    assert not caught.value.for_now


@pytest.mark.slow
@pytest.mark.long
def test_a_cluster_of_oar_jobs(queue: OarQueue, tmp_path: Path):
    check_cluster(OARCUDACluster, queue, tmp_path, **SITE)


@pytest.mark.long
def test_submit_waits_and_returns_the_exit_code(oar: OarSite, queue: OarQueue, tmp_path: Path):
    check_submit("oar", queue, tmp_path, oar.env)
