"""Clusters with workers of several kinds on a real SLURM."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import hpcdask
from hpcdask.errors import Refused
from hpcdask.jobs.state import OVER
from launching import wait_for
from slurm_login import Login, login, wait_for_running
from slurm_site import SlurmSite

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


@pytest.fixture
def user(slurm: SlurmSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Login]:
    with login(slurm, tmp_path, monkeypatch) as user:
        yield user


def live(cluster: hpcdask.SLURMCUDACluster) -> Counter[str]:
    return Counter(job.group for job in cluster.jobs() if job.state not in OVER)


def dask_task() -> Callable[[], str]:
    """A function that travels as it is: workers do not know this module."""

    def named() -> str:
        from distributed import get_worker

        return str(get_worker().name)

    return named


named = dask_task()


GPU = {"resources": {"GPU": 1, "CPU": 0}}
CPU = {"gpus_per_job": 0}


@pytest.mark.long
def test_groups_up_and_down(user: Login):
    """Each with its own request, and one query of the queue for all."""
    squeue = user.wrap("squeue")
    with user.make(groups={"gpu": GPU, "cpu": CPU}) as cluster, cluster.get_client() as client:
        cluster.scale(gpu=2, cpu=1)
        wait_for_running(cluster, 3)
        assert live(cluster) == {"gpu": 2, "cpu": 1}
        granted = {
            job.group: user.site.run("squeue", "-h", "-j", job.id, "-o", "%b").stdout.strip()
            for job in cluster.jobs()
        }
        assert granted["gpu"] in ("gres:gpu:1", "gres/gpu:1")
        assert granted["cpu"] == "N/A"
        before = len(squeue.calls())
        wait_for(lambda: len(squeue.calls()) > before + 3, 30, "more queries")
        own = [job.id for job in cluster.jobs()]
        queries = [call for call in squeue.calls()[before:] if own[0] in call]
        assert all(job_id in call for call in queries for job_id in own), queries
        assert ".gpu-" in client.submit(named, pure=False, resources={"GPU": 1}).result(timeout=180)
        assert ".cpu-" in client.submit(named, pure=False, resources={"CPU": 1}).result(timeout=180)
        table = user.hpcdask("jobs")
        assert "group" in table
        assert cluster.id in table
        cluster.scale(gpu=0)
        wait_for(lambda: live(cluster) == {"cpu": 1}, 60, "a group to leave")
        assert len(user.queued()) == 1
    assert not user.queued()
    assert not user.key_files()


@pytest.mark.long
def test_a_bad_partition_does_not_stop_the_other_group(user: Login):
    groups = {"bad": {**GPU, "queue": "nowhere"}, "good": CPU}
    with user.make(groups=groups) as cluster, cluster.get_client() as client:
        said = r"group bad: sbatch refused the job: .*nowhere.* sinfo -s"
        with pytest.raises(Refused, match=said):
            cluster.scale(bad=1, good=2)
        wait_for_running(cluster, 2)
        assert live(cluster) == {"good": 2}
        hopeless = client.submit(named, resources={"GPU": 1}, pure=False)
        with pytest.raises(Refused, match="group bad"):
            hopeless.result(timeout=180)
        assert ".good-" in client.submit(named, pure=False).result(timeout=180)
        cluster.adapt(good=(0, 1), interval="200ms")
        wait_for(lambda: live(cluster)["good"] <= 1, 60, "one to leave")
        assert str(cluster.failure).startswith("group bad")
    assert not user.queued()


def test_a_cancelled_job_is_replaced_in_its_own_group_only(user: Login):
    with user.make(groups={"gpu": GPU, "cpu": CPU}) as cluster:
        cluster.scale(gpu=1, cpu=1)
        wait_for_running(cluster, 2)
        known = {job.group: job.id for job in cluster.jobs()}
        user.site.run("scancel", known["gpu"])
        wait_for(lambda: len(cluster.jobs()) == 3, 60, "another job")
        wait_for_running(cluster, 2)
        new = {job.group: job.id for job in cluster.jobs() if job.state not in OVER}
        assert new["cpu"] == known["cpu"]
        assert new["gpu"] != known["gpu"]
        assert live(cluster) == {"gpu": 1, "cpu": 1}


def test_jobs_of_a_submission_without_an_answer_come_back_to_their_group(user: Login):
    sbatch = user.wrap("sbatch")
    with user.make(groups={"gpu": GPU, "cpu": CPU}) as cluster:
        sbatch.behave(f'{sbatch.real} "$@" >/dev/null; echo "Socket timed out" >&2; exit 1')
        cluster.scale(gpu=1, cpu=2)
        wait_for_running(cluster, 3)
        assert live(cluster) == {"gpu": 1, "cpu": 2}
        assert len(user.queued()) == 3
        sbatch.behave()
    assert not user.queued()


def test_cleanup_ends_all_groups_of_a_notebook_that_was_killed(user: Login):
    notebook = user.start(NOTEBOOK, repr(user.keywords(groups={"gpu": GPU, "cpu": CPU})))
    assert notebook.stdout is not None
    name = notebook.stdout.readline().strip()
    wait_for(lambda: len(user.queued()) == 2, 60, "both jobs")
    notebook.kill()
    notebook.communicate()
    wait_for(lambda: not user.queued(), 60, "the watchdog to cancel them")
    wait_for(lambda: not user.key_files(), 30, "the keys to go")
    assert name not in user.hpcdask("jobs")


NOTEBOOK = """
import sys, time
from hpcdask import SLURMCUDACluster
cluster = SLURMCUDACluster(**eval(sys.argv[1]))
cluster.scale(gpu=1, cpu=1)
print(cluster.id, flush=True)
time.sleep(600)
"""
