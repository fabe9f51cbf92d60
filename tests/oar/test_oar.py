"""The door to OAR, against a real one."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
from distributed import Client

from doors import TAG, ask, cancel, make_job, submit, wait_for_state, write_script
from hpcdask import OARCUDACluster
from hpcdask.errors import Refused
from hpcdask.queues.job_state import QueueState
from hpcdask.queues.oar import OarQueue
from launching import wait_for
from oar_site import OarSite

RUN_AS_ROOT = [
    f"{project}_ALLOW_RUN_AS_ROOT{end}" for project in ("OMPI", "PRTE") for end in ("", "_CONFIRM")
]
PROGRAM = """
import sys
from distributed import Client
with Client() as client:
    print(sys.argv[1:], len(client.nthreads()), "worker")
sys.exit(5)
"""
SAY = 'echo "$HPCDASK_JOB_ID" >"said-$HPCDASK_JOB_ID"'
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
    seen = wait_for_state(queue, job, QueueState.RUNNING)
    assert seen.nodes == "localhost"
    assert seen.started is not None
    assert seen.ends == seen.started + 1800  # dask-jobqueue's default walltime
    seen = wait_for_state(queue, job, QueueState.FAILED)
    assert seen.exit_code == 3
    assert (tmp_path / f"said-{job}").read_text() == f"{job}\n"
    assert (folder / f"queue-{job}.log").exists()
    assert wait_for_state(queue, good, QueueState.COMPLETED).exit_code == 0
    seen = wait_for_state(queue, killed, QueueState.FAILED)
    assert (seen.exit_code, seen.reason) == (137, "ended by SIGKILL")
    ends = [QueueState.TIMEOUT, QueueState.FAILED, QueueState.CANCELLED]
    assert wait_for_state(queue, expired, *ends).state is QueueState.TIMEOUT
    assert asyncio.run(queue.tagged()) == {}


@pytest.mark.long
def test_an_array_is_cancelled_one_by_one(queue: OarQueue, tmp_path: Path):
    jobs = submit(queue, script_of(queue, tmp_path, f"{SAY}; exec sleep 600"), 3)
    assert len(set(jobs)) == 3
    for job in jobs:
        wait_for_state(queue, job, QueueState.RUNNING)
    wait_for(lambda: len(list(tmp_path.glob("said-*"))) == 3, 10, "the jobs' files")
    assert {path.name for path in tmp_path.glob("said-*")} == {f"said-{job}" for job in jobs}
    assert asyncio.run(queue.tagged()) == dict.fromkeys(jobs, TAG)
    cancel(queue, jobs[1:2])
    assert wait_for_state(queue, jobs[1], QueueState.CANCELLED)
    wait_for(lambda: set(asyncio.run(queue.tagged())) == {jobs[0], jobs[2]}, 10, "two jobs")
    cancel(queue, jobs)  # the one that is over does not matter


def test_a_job_waits_for_gpus_is_held_and_cancelled(oar: OarSite, queue: OarQueue, tmp_path: Path):
    script = script_of(queue, tmp_path, "exec sleep 600", gpus=3)
    first, second = submit(queue, script)[0], submit(queue, script)[0]
    wait_for_state(queue, first, QueueState.RUNNING)
    assert ask(queue, second).state is QueueState.PENDING
    oar.run("oarhold", second)
    wait_for(lambda: ask(queue, second).reason == "Hold", 10, "the job to be held")
    assert ask(queue, second).state is QueueState.PENDING
    cancel(queue, [second])
    wait_for_state(queue, second, QueueState.CANCELLED)


def test_oars_own_copy_of_a_job_is_cancelled(oar: OarSite, queue: OarQueue, tmp_path: Path):
    """It makes one when a node does not answer; the cluster submits another job itself."""
    oar.unreachable.touch()
    try:
        (job,) = submit(queue, script_of(queue, tmp_path, "exec sleep 600"))
        wait_for(lambda: ask(queue, job) and not asyncio.run(queue.tagged()), 60, "both to end")
        seen = ask(queue, job)
    finally:
        oar.unreachable.unlink()
        oar.run("oarnodesetting", "-s", "Alive", "-h", "localhost")
    assert seen.state is QueueState.FAILED
    assert "not responding" in seen.reason
    # OAR may have made one more before the node was alive again
    wait_for(
        lambda: ask(queue, job) and "Waiting" not in oar.sql("SELECT state FROM jobs;"),
        20,
        "OAR's own copy to end",
    )


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
    with (
        OARCUDACluster(
            device="cpu",
            cores=1,
            memory="500MB",
            job_name="my jobs",
            shared_temp_directory=str(tmp_path / "shared; folder"),
            scheduler_options={"dashboard_address": ":0"},
            **SITE,
        ) as cluster,
        Client(cluster) as client,
    ):
        cluster.scale(2)
        client.wait_for_workers(2, timeout=180)
        assert client.submit(sum, [1, 2]).result(timeout=180) == 3
        cluster.scale(1)
        wait_for(lambda: len(asyncio.run(queue.tagged())) == 1, 30, "one job to end")
    wait_for(lambda: asyncio.run(queue.tagged()) == {}, 10, "no job to be left")


def test_submit_waits_and_returns_the_exit_code(oar: OarSite, queue: OarQueue, tmp_path: Path):
    (tmp_path / "program.py").write_text(PROGRAM)
    lines = [f"export {name}=1" for name in RUN_AS_ROOT]
    done = subprocess.run(
        [sys.executable, "-m", "hpcdask.cli", "submit", "--system", "oar", "--wait"]
        + [word for line in lines for word in ("--prologue", line)]
        + ["--gpus-per-node", "0", "--run", "--device cpu", "program.py", "a word"],
        cwd=tmp_path,
        env={**os.environ, **oar.env, "HOME": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 5, (done.stdout, done.stderr)
    assert "['a word'] 1 worker" in done.stdout.splitlines()
    assert asyncio.run(queue.tagged()) == {}
