"""What goes wrong around a detached cluster on a real SLURM: nodes, preemption, daemons, disks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from detached_cases import check_told, computes_while_the_queue_is_away, its_disk_is_full
from hpcdask.jobs import detached
from launching import wait_for
from slurm_login import SCHEDULER, Login, login
from slurm_site import SlurmSite

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

#: For workers: not on the scheduler's node.
ELSEWHERE = {"job_extra_directives": ["--exclude=node4"]}


@pytest.fixture
def user(slurm: SlurmSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Login]:
    with login(slurm, tmp_path, monkeypatch) as user:
        yield user
        slurm.mend()


def make(user: Login, *directives: str, **keywords):
    job = {**SCHEDULER, "job_extra_directives": list(directives)}
    return user.detached(scheduler_job=job, **keywords)


NODE_DOWN = ("nodename=node4", "state=down", "reason=test")


@pytest.mark.long
def test_the_schedulers_node_is_taken_away(user: Login):
    with make(user, "--nodelist=node4", n_workers=2, **ELSEWHERE) as cluster:
        cluster.wait_for_workers(2, timeout=180)
        user.site.run("scontrol", "update", *NODE_DOWN)
        check_told(user, cluster, "SIGTERM")


@pytest.mark.long
@pytest.mark.parametrize(
    ("again", "why"),
    [
        ("--requeue", "waits to run again"),
        ("--no-requeue", "has ended: failed (NODE_FAIL"),
    ],
)
def test_the_schedulers_node_loses_power(user: Login, again: str, why: str):
    with make(user, "--nodelist=node4", again, n_workers=2, **ELSEWHERE) as cluster:
        cluster.wait_for_workers(2, timeout=180)
        next(one for one in user.site.daemons("slurmd") if "node4" in one.args).kill()
        user.lose(detached.scheduler_job(detached.find("mine")))
        user.site.run("scontrol", "update", *NODE_DOWN)
        check_told(user, cluster, why)
        wait_for(lambda: not user.site.run("squeue", "-h").stdout, 60, "the queue to be empty")


@pytest.mark.long
@pytest.mark.usefixtures("slurm_programs")
def test_it_is_preempted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    conf = {"PreemptType": "preempt/partition_prio", "PreemptMode": "CANCEL"}
    with PreemptingSite(nodes=1, conf=conf) as site, login(site, tmp_path, monkeypatch) as user:
        monkeypatch.setenv("SLURM_CONF", site.env["SLURM_CONF"])
        with make(user, n_workers=1) as cluster:
            cluster.wait_for_workers(1, timeout=180)
            whole = ("-p", "urgent", "-N1", "--exclusive", "--output=/dev/null")
            site.submit(*whole, "--chdir", tmp_path, "--wrap", "exec sleep 600")
            check_told(user, cluster, "SIGTERM")
        site.cancel_all()


class PreemptingSite(SlurmSite):
    """With a partition whose jobs take the places of others."""

    def _write_slurm_conf(self) -> None:
        super()._write_slurm_conf()
        with (self.folder / "slurm.conf").open("a") as conf:
            conf.write("PartitionName=urgent Nodes=ALL PriorityTier=9 State=UP\n")


@pytest.mark.parametrize("seconds", [0, pytest.param(60, marks=pytest.mark.long)])
def test_slurm_is_away_while_it_computes(
    user: Login, tmp_path: Path, capfd: pytest.CaptureFixture[str], seconds: int
):
    def leave() -> None:
        for daemon in (*user.site.daemons("slurmctld"), *user.site.daemons("munged")):
            daemon.terminate()  # with its state saved: what it forgets, it ends
            daemon.wait()

    def come_back() -> None:
        for daemon in (*user.site.daemons("munged"), *user.site.daemons("slurmctld")):
            user.site.restart(daemon)
        user.site.bring_back()

    computes_while_the_queue_is_away(user, tmp_path, capfd, leave, come_back, seconds)


@pytest.mark.long
def test_its_disk_is_full(user: Login):
    its_disk_is_full(user)
