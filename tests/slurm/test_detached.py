"""Detached clusters on a real SLURM: their scheduler's job, who attaches, and every end."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import dask
import pytest

import hpcdask
from chaos.hosts import disk, missing
from hpcdask.errors import ClusterError, HpcdaskError, Refused
from hpcdask.jobs import detached
from launching import unavailable, wait_for
from slurm_login import SCHEDULER, Login
from slurm_site import SlurmSite

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


def scheduler() -> str:
    """The scheduler's job."""
    return detached.scheduler_job(detached.find("mine"))


def all_states(user: Login) -> dict[str, str]:
    """The comments of all jobs that are not over, with SLURM's word for each."""
    lines = user.site.run("squeue", "-h", "-r", "-o", "%k %T").stdout.splitlines()
    return dict(line.split() for line in lines)


def test_made_attached_scaled_and_shut_down(user: Login):
    """Where the site's configuration names the interface of a login node, which nodes lack."""
    options = {"interface": "lo", "scheduler-options": {"interface": "login0"}}
    with dask.config.set({f"jobqueue.slurm.{key}": value for key, value in options.items()}):
        cluster = user.detached()
    jobs = all_states(user)
    assert jobs == {f"hpcdask:scheduler-{cluster.id}": "RUNNING"}
    other = hpcdask.attach("mine")
    other.scale(2)
    wait_for(lambda: len(cluster.plan) == 2, 30, "the other to see it")
    with cluster.get_client() as client:
        client.wait_for_workers(2, timeout=180)
        assert client.submit(sum, [1, 2]).result(timeout=60) == 3
        hosts = set(client.run(lambda: os.environ["SLURM_JOB_ID"]).values())
        assert len(hosts) == 2
    assert {job.id for job in other.jobs()} == {job.id for job in cluster.jobs()}
    cluster.close()  # only detaches
    assert len(user.queued()) == 3
    scheduler, *others = json.loads(user.hpcdask("list", "--jobs", "--json"))
    assert (scheduler["scheduler"], scheduler["state"]) == (True, "running")
    assert {row["job"] for row in others} == {job.id for job in other.jobs()}
    other.shutdown()
    assert user.gone()
    assert not all_states(user)


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "why"), [("scancel", "SIGTERM"), ("kill", "job"), ("requeue", "SIGTERM")]
)
def test_the_schedulers_job_dies(user: Login, how: str, why: str):
    commands = {
        "scancel": ["scancel"],
        "kill": ["scancel", "--signal=KILL", "--full"],
        "requeue": ["scontrol", "requeue"],
    }
    with user.detached(n_workers=2) as cluster:
        cluster.wait_for_workers(2, timeout=180)
        user.site.run(*commands[how], scheduler())
        user.check_told(cluster, why)
    wait_for(lambda: detached.find("mine").ended is not None, 60, "its record")
    wait_for(lambda: not all_states(user), 60, "the scheduler's job to be gone for good")


@pytest.fixture
def mended(slurm: SlurmSite) -> Iterator[SlurmSite]:
    yield slurm
    slurm.mend()


@pytest.mark.long
@pytest.mark.parametrize(
    ("again", "why"),
    [("--requeue", "waits to run again"), ("--no-requeue", "has ended: failed (NODE_FAIL")],
)
def test_the_schedulers_node_loses_power(mended: SlurmSite, user: Login, again: str, why: str):
    job = {**SCHEDULER, "job_extra_directives": ["--nodelist=node4", again]}
    elsewhere = ["--exclude=node4"]  # for workers
    with user.detached(scheduler_job=job, n_workers=2, job_extra_directives=elsewhere) as cluster:
        cluster.wait_for_workers(2, timeout=180)
        next(one for one in mended.daemons("slurmd") if "node4" in one.args).kill()
        user.lose(scheduler())
        mended.run("scontrol", "update", "nodename=node4", "state=down", "reason=test")
        user.check_told(cluster, why)
        wait_for(lambda: not mended.run("squeue", "-h").stdout, 60, "the queue to be empty")


@pytest.mark.long
def test_slurm_is_away_while_it_computes(
    mended: SlurmSite, user: Login, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    """No job is lost, and nothing runs twice."""
    ran = tmp_path / "ran"
    ran.mkdir()

    def work(number: int, folder: str) -> int:
        import time

        with open(f"{folder}/{number}", "a") as file:
            file.write("x")
        time.sleep(0.2)
        return number

    with user.detached(n_workers=2) as cluster, cluster.get_client() as client:
        client.wait_for_workers(2, timeout=180)
        before = [job.id for job in cluster.jobs()]
        futures = client.map(work, range(100), folder=str(ran))
        for daemon in (*mended.daemons("slurmctld"), *mended.daemons("munged")):
            daemon.terminate()  # with its state saved: what it forgets, it ends
            daemon.wait()
        wait_for(lambda: "What the jobs do is unknown" in capfd.readouterr().err, 120, "a word")
        assert client.gather(futures) == list(range(100))
        for daemon in (*mended.daemons("munged"), *mended.daemons("slurmctld")):
            mended.restart(daemon)
        mended.bring_back()
        cluster.scale(3)
        client.wait_for_workers(3, timeout=300)
        assert [job.id for job in cluster.jobs()][:2] == before
        assert len(cluster.jobs()) == 3
        assert {path.read_text() for path in ran.iterdir()} == {"x"}
        cluster.shutdown()


def test_a_node_that_may_not_submit_is_told_with_what_to_do(user: Login):
    sbatch = user.wrap("sbatch")
    with user.detached() as cluster:
        sbatch.behave("echo 'sbatch: error: Access/permission denied' >&2; exit 1")
        with pytest.raises(Refused, match=r"Access/permission denied.*scheduler_job=None"):
            cluster.scale(1)
        cluster.shutdown()


def fill(folder: Path) -> Path:
    path = folder / "filling"
    with suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)
    return path


@pytest.mark.long
def test_its_disk_is_full_when_it_is_made_scaled_and_ended(user: Login):
    if why := missing():
        unavailable(why)
    user.folder.mkdir(mode=0o700)
    with disk(user.folder, 4):
        filling = fill(user.folder)
        with pytest.raises(HpcdaskError, match="No space left"):
            user.detached()
        assert not user.queued()
        filling.unlink()
        with user.detached(n_workers=1) as cluster, cluster.get_client() as client:
            client.wait_for_workers(1, timeout=180)
            fill(user.folder)
            assert client.submit(sum, [1, 2]).result(timeout=60) == 3
            with pytest.raises(HpcdaskError, match="No space left"):
                cluster.scale(2)
            filling.unlink()
            cluster.scale(2)
            client.wait_for_workers(2, timeout=180)
            fill(user.folder)
            user.hpcdask("down", "mine")
            assert user.gone()
            filling.unlink()
        assert detached.find("mine").ended


@pytest.mark.long
def test_its_walltime_comes(user: Login, capfd: pytest.CaptureFixture[str]):
    short = {**SCHEDULER, "walltime": "00:01:00"}
    with user.detached(scheduler_job=short, n_workers=1) as cluster:
        wait_for(lambda: cluster.failure is not None, 90, "its end")
        assert "the walltime of its scheduler's job is reached" in str(cluster.failure)
    assert "by the walltime of its scheduler's job" in capfd.readouterr().err
    wait_for(lambda: user.gone() and not all_states(user), 30, "all to be gone")


@pytest.mark.long
def test_down_while_its_scheduler_waits(user: Login):
    user.occupy(4)
    with pytest.raises(ClusterError, match=r"the scheduler's job \d+ is pending .*It goes on"):
        user.detached(scheduler_timeout="8s")
    assert len(all_states(user)) >= 1
    (row,) = json.loads(user.hpcdask("list", "--json"))
    assert row["why"].startswith(f"its scheduler's job {scheduler()} is pe")
    assert "pending" in user.hpcdask("list", "--jobs")
    user.hpcdask("down", "mine")
    assert user.gone()


def test_each_view_of_a_detached_cluster_says_that_jobs_may_never_start(user: Login):
    waits = "1 job waits, and may never start: JobHeldUser. Release them: scontrol release JOB"
    held = {"job_extra_directives": ["--hold"], "poll_interval": "1s", "scheduler_job": None}
    with user.detached(**held) as cluster:
        cluster.scale(1)
        wait_for(lambda: waits in cluster.jobs().problem, 60, "the cluster to see it")
        assert waits in user.hpcdask("list")
        for words in (["attach", "mine"], ["scale", "mine", "1"], ["list", "--jobs"]):
            command = [*words[:1], "--folder", str(user.folder), *words[1:]]
            done = user.site.run(sys.executable, "-m", "hpcdask", *command, env=user.variables)
            assert waits in done.stderr, words
        cluster.shutdown()
    assert not user.queued()
