"""What goes wrong around a detached cluster on a real SLURM: nodes, preemption, daemons, disks."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from distributed import wait

import hpcdask
from hpcdask.errors import ClusterError, HpcdaskError
from hpcdask.jobs import detached
from launching import unavailable, wait_for
from slurm_login import Login, login
from slurm_site import SlurmSite

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

#: The scheduler's job.
SCHEDULER = {"cores": 1, "memory": "1GiB", "walltime": "00:30:00"}
#: For workers: not on the scheduler's node.
ELSEWHERE = {"job_extra_directives": ["--exclude=node4"]}


@pytest.fixture
def user(slurm: SlurmSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Login]:
    with login(slurm, tmp_path, monkeypatch) as user:
        yield user
        slurm.mend()


def make(user: Login, *directives: str, **keywords):
    job = {**SCHEDULER, "job_extra_directives": list(directives)}
    return user.make(name="mine", detached=True, scheduler_job=job, **keywords)


def gone(user: Login) -> bool:
    return not user.queued() and not user.key_files()


def check_told(user: Login, cluster, why: str) -> None:
    """Those who are attached and who ask are told; the jobs end."""
    wait_for(lambda: cluster.failure is not None, 60, "the notebook to see it")
    assert why in str(cluster.failure)
    wait_for(lambda: gone(user), 60, "the jobs' end")
    with pytest.raises(ClusterError, match="has ended: "):
        cluster.scale(1)
    assert why in " ".join(user.hpcdask("list").split())


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


@pytest.mark.parametrize("how", ["until it is seen", pytest.param("60", marks=pytest.mark.long)])
def test_slurm_is_away_while_it_computes(
    user: Login, tmp_path: Path, capfd: pytest.CaptureFixture[str], how: str
):
    with make(user, n_workers=2) as cluster, cluster.get_client() as client:
        client.wait_for_workers(2, timeout=180)
        before = [job.id for job in cluster.jobs()]
        ran = tmp_path / "ran"
        ran.mkdir()

        def work(number: int, folder: str) -> int:
            import time

            with open(f"{folder}/{number}", "a") as file:
                file.write("x")
            time.sleep(0.2)
            return number

        futures = client.map(work, range(100), folder=str(ran))
        for daemon in (*user.site.daemons("slurmctld"), *user.site.daemons("munged")):
            daemon.terminate()  # with its state saved: what it forgets, it ends
            daemon.wait()
        wait_for(lambda: "What the jobs do is unknown" in capfd.readouterr().err, 120, "a word")
        if how != "until it is seen":
            threading.Event().wait(float(how))
        wait(futures, timeout=300)
        assert client.gather(futures) == list(range(100))
        assert client.submit(sum, [1, 2]).result(timeout=60) == 3
        for daemon in (*user.site.daemons("munged"), *user.site.daemons("slurmctld")):
            user.site.restart(daemon)
        user.site.bring_back()
        cluster.scale(3)
        client.wait_for_workers(3, timeout=300)
        assert [job.id for job in cluster.jobs()][:2] == before
        assert len(cluster.jobs()) == 3
        assert {path.read_text() for path in ran.iterdir()} == {"x"}
        cluster.shutdown()


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    folder.mkdir(mode=0o700)
    command = ["mount", "-t", "tmpfs", "-o", "size=4m,mode=700", "small", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        unavailable("only root can mount a small file system")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> Path:
    path = folder / "filling"
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError:
            return path


def test_its_disk_is_full(user: Login):
    with small_disk(user.folder):
        filling = fill(user.folder)
        with pytest.raises(HpcdaskError, match="No space left"):
            make(user)
        assert not user.queued()
        filling.unlink()
        with make(user, n_workers=1) as cluster, cluster.get_client() as client:
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
            assert gone(user)
            filling.unlink()
            with pytest.raises(ClusterError, match="hpcdask down"):
                hpcdask.attach("mine")
        assert detached.find("mine").ended
