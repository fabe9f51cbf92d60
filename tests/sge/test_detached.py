"""Detached clusters on a real Grid Engine: who attaches, and every end."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hpcdask
from detached_cases import (
    check_told,
    computes_while_the_queue_is_away,
)
from hpcdask.errors import ClusterError
from hpcdask.jobs import detached
from hpcdask.queues.job_state import QueueState
from hpcdask.queues.sge import SgeQueue
from launching import wait_for
from login import watched
from sge_login import SgeUser
from sge_site import SgeSite

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parents[1] / "jobs" / "attached.py"
#: A job that waits, for more GPUs than there are.
WAITS = {"job_extra_directives": ["-l gpu=9"]}
#: Why it ends when its job is warned: its shell sends SIGTERM as well.
CANCELLED = "its job was cancelled, or reached its walltime"


@pytest.fixture
def user(sge: SgeSite, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[SgeUser]:
    with watched(SgeUser(sge, tmp_path, monkeypatch)) as user:
        yield user
        sge.bring_back()


def scheduler_job() -> str:
    job = detached.scheduler_job(detached.find("mine"))
    assert job is not None
    return job


def test_a_killed_notebook_and_down(user: SgeUser, tmp_path: Path):
    ran = tmp_path / "ran"
    ran.mkdir()
    user.detached(n_workers=2).close()
    command = [sys.executable, PROGRAM, "mine"]
    notebook = subprocess.Popen([*command, ran, "200"], stdout=subprocess.PIPE, text=True)
    assert notebook.stdout.readline() == "computes\n"
    wait_for(lambda: len(list(ran.iterdir())) > 20, 60, "some to be done")
    notebook.kill()
    notebook.communicate()
    with hpcdask.attach("mine") as cluster, cluster.get_client() as client:
        results = client.gather(client.get_dataset("work"))
        assert results == [number * number for number in range(200)]
        assert {path.read_text() for path in ran.iterdir()} == {"x"}
        assert len(cluster.jobs()) == 2
    user.hpcdask("down", "mine")
    wait_for(user.gone, 30, "all to be gone")


def test_a_node_without_qsub_is_told(user: SgeUser):
    lines = [f"export {user.marker}", "PATH=/usr/bin:/bin"]
    with pytest.raises(ClusterError, match=r"no qsub on this machine.*scheduler_job=None"):
        user.detached(job_script_prologue=lines)


@pytest.mark.long
@pytest.mark.parametrize("attached", [False, pytest.param(True, marks=pytest.mark.long)])
def test_its_schedulers_job_is_deleted(user: SgeUser, attached: bool):
    """Grid Engine's SIGKILL comes after a warning, so that all ends in order."""
    cluster = user.detached(groups={"cpu": {}, "waits": WAITS})
    cluster.scale(cpu=2, waits=1)
    cluster.wait_for_workers(2, timeout=180)
    if not attached:
        cluster.close()
    job = scheduler_job()
    user.site.run("qdel", job)
    if attached:
        check_told(user, cluster, CANCELLED)
        cluster.close()
    wait_for(lambda: detached.find("mine").ended, 60, "its end")
    wait_for(user.gone, 60, "all to be gone")
    assert CANCELLED in " ".join(user.hpcdask("list").split())
    with pytest.raises(ClusterError, match=CANCELLED):
        hpcdask.attach("mine")


@pytest.mark.long
@pytest.mark.parametrize("how", ["all", "its process"])
def test_its_schedulers_job_is_killed(user: SgeUser, how: str):
    """With SIGKILL: the notebook ends what is left, or the job's own shell does so."""
    with user.detached(groups={"cpu": {}, "waits": WAITS}) as cluster:
        cluster.scale(cpu=2, waits=1)
        cluster.wait_for_workers(2, timeout=180)
        if how == "all":
            user.lose(scheduler_job())
            check_told(user, cluster, "its scheduler's job")
        else:
            user.control().kill()
            check_told(user, cluster, "killed by SIGKILL")


@pytest.mark.long
def test_its_host_goes_and_comes_back(user: SgeUser):
    """Grid Engine takes its jobs for running meanwhile, and so does the notebook."""
    with user.detached(n_workers=1) as cluster:
        cluster.wait_for_workers(1, timeout=180)
        jobs = [scheduler_job(), *(job.id for job in cluster.jobs())]
        user.site.stop("sge_execd")
        for job in jobs:
            user.lose(job)
        assert "running" in user.hpcdask("list")
        user.site.bring_back()
        check_told(user, cluster, f"its scheduler's job {jobs[0]} has ended: failed")


@pytest.mark.long
def test_its_schedulers_job_is_not_rerun(user: SgeUser):
    """Grid Engine refuses that. A manager may insist: the second run finds nothing to do."""
    with user.detached(groups={"cpu": {}, "waits": WAITS}) as cluster:
        cluster.scale(cpu=2, waits=1)
        cluster.wait_for_workers(2, timeout=180)
        job = scheduler_job()
        assert "not restartable" in user.site.run("qmod", "-rj", job).stdout
        with cluster.get_client() as client:
            assert client.submit(sum, [1, 2]).result(timeout=60) == 3
        user.site.run("qmod", "-f", "-rj", job)
        check_told(user, cluster, CANCELLED)


@pytest.mark.long
def test_its_walltime_comes(user: SgeUser, capfd: pytest.CaptureFixture[str]):
    with user.detached(scheduler_job={"walltime": "0:1:0"}, n_workers=1) as cluster:
        cluster.wait_for_workers(1, timeout=180)
        job = scheduler_job()
        check_told(user, cluster, "the walltime of its scheduler's job is reached")
    assert "by the walltime of its scheduler's job" in capfd.readouterr().err
    assert accounted(job) is QueueState.COMPLETED


@pytest.mark.long
def test_grid_engine_ends_it_at_its_walltime(user: SgeUser):
    """Its process has stopped, and does not end by itself."""
    with user.detached(scheduler_job={"walltime": "0:0:20"}, n_workers=1) as cluster:
        cluster.wait_for_workers(1, timeout=180)
        job = scheduler_job()
        user.control().suspend()
        check_told(user, cluster, f"its scheduler's job {job} has ended: timeout")
    assert accounted(job) is QueueState.TIMEOUT


def accounted(job: str) -> QueueState:
    """How a job ended."""
    found = wait_for(lambda: asyncio.run(SgeQueue().departed([job])), 30, "the accounts")
    return found[job].state


@pytest.mark.long
@pytest.mark.parametrize("seconds", [0, 60])
def test_the_master_is_away_while_it_computes(
    user: SgeUser, tmp_path: Path, capfd: pytest.CaptureFixture[str], seconds: int
):
    def leave() -> None:
        user.site.stop("sge_qmaster")

    computes_while_the_queue_is_away(user, tmp_path, capfd, leave, user.site.bring_back, seconds)
