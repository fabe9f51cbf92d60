"""Detached clusters on a real SLURM: their scheduler's job, who attaches, and every end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import dask
import pytest

import hpcdask
from hpcdask.errors import ClusterError
from hpcdask.jobs import detached
from hpcdask.jobs.folder import ClusterFolder
from launching import wait_for
from slurm_login import SCHEDULER, Login, login
from slurm_site import SlurmSite

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

PROGRAM = Path(__file__).parents[1] / "jobs" / "attached.py"


@pytest.fixture
def user(slurm: SlurmSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Login]:
    with login(slurm, tmp_path, monkeypatch) as user:
        yield user


def folder_of(name: str = "mine") -> ClusterFolder:
    return detached.find(name)


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
    assert list(other.job_logs()) == [job.id for job in cluster.jobs()]
    assert cluster.job_script() == other.job_script()
    cluster.close()  # only detaches
    assert len(user.queued()) == 3
    with pytest.raises(hpcdask.errors.UsageError, match="mine already"):
        user.detached()
    listed = user.hpcdask("list")
    assert "mine" in listed
    assert "running" in listed
    scheduler, *others = json.loads(user.hpcdask("jobs", "--json"))
    assert (scheduler["scheduler"], scheduler["state"]) == (True, "running")
    assert {row["job"] for row in others} == {job.id for job in other.jobs()}
    other.shutdown()
    assert user.gone()
    assert not all_states(user)
    with pytest.raises(ClusterError, match=r"has ended: shutdown\(\) by a notebook"):
        hpcdask.attach("mine")


@pytest.mark.long
def test_a_killed_notebook_loses_nothing_and_runs_nothing_twice(user: Login, tmp_path: Path):
    ran = tmp_path / "ran"
    ran.mkdir()
    user.detached(n_workers=2).close()
    command = [sys.executable, PROGRAM, "mine", ran, "200"]
    notebook = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert notebook.stdout.readline() == "computes\n"
    wait_for(lambda: len(list(ran.iterdir())) > 20, 60, "some to be done")
    notebook.kill()
    notebook.communicate()
    host, results = json.loads(on_another_host([sys.executable, PROGRAM, "mine"]))
    assert host == "elsewhere" or os.geteuid()
    assert results == [number * number for number in range(200)]
    assert {path.read_text() for path in ran.iterdir()} == {"x"}
    hpcdask.attach("mine").shutdown()
    assert user.gone()


def on_another_host(command: list[str | Path]) -> str:
    """Run a program where this host has another name, as root may; return what it prints."""
    if not os.geteuid():
        command = ["unshare", "-u", "sh", "-c", 'hostname elsewhere; exec "$@"', "sh", *command]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=300, check=True)
    return done.stdout


@pytest.mark.long
@pytest.mark.parametrize("how", ["scancel", "kill", "requeue"])
def test_the_schedulers_job_dies(user: Login, how: str):
    with user.detached() as cluster:
        cluster.scale(2)
        cluster.wait_for_workers(2, timeout=180)
        job = detached.scheduler_job(folder_of())
        if how == "scancel":
            user.site.run("scancel", job)
        elif how == "kill":
            user.site.run("scancel", "--signal=KILL", "--full", job)
        else:
            user.site.run("scontrol", "requeue", job)
        wait_for(lambda: cluster.failure is not None, 60, "the notebook to see it")
        assert "has ended: " in str(cluster.failure)
        wait_for(user.gone, 60, "the jobs' end")
        with pytest.raises(ClusterError, match="has ended: "):
            cluster.scale(1)
    wait_for(lambda: folder_of().ended is not None, 60, "its record")
    record = detached.ControlRecord.read(folder_of())
    expected = {"scancel": "SIGTERM", "kill": "job", "requeue": "SIGTERM"}
    assert expected[how] in record.why
    assert record.why in " ".join(user.hpcdask("list").split())
    wait_for(lambda: not all_states(user), 60, "the scheduler's job to be gone for good")


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
    assert row["why"].startswith(f"its scheduler's job {detached.scheduler_job(folder_of())} is pe")
    assert "pending" in user.hpcdask("jobs")
    user.hpcdask("down", "mine")
    assert user.gone()
    with pytest.raises(ClusterError, match="hpcdask down"):
        hpcdask.attach("mine")
