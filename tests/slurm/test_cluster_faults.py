"""What goes wrong with jobs, nodes, SLURM's commands and notebooks, on a real SLURM.

Every fault ends in the wanted number of workers or a clear error; no result is lost or wrong, and
no job, process or key is left, which the fixture sees to.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from distributed import Client

from hpcdask.clusters.job import Job
from hpcdask.errors import QueueError
from hpcdask.queues.job_state import JobState
from hpcdask.spec.names import job_of_worker, worker_name
from launching import end, wait_for
from slurm_login import Login, live, login, pids, wait_for_running
from slurm_site import SlurmSite

pytestmark = pytest.mark.slurm


class Computation:
    """A computation of some seconds on a cluster, whose results must stay as they are.

    `known` are results that cannot be computed again, held by the workers.
    """

    def __init__(self, client: Client, count: int = 40) -> None:
        kept = client.map(lambda number: (number, os.urandom(8)), range(8), pure=False)
        self.known = client.gather(kept)
        self.client, self.count, self.kept = client, count, kept
        self.futures = client.map(lambda n: time.sleep(0.1) or 2 * n, range(count), pure=False)
        wait_for(lambda: self.done() >= 4, 30, "the computation to be under way")

    def done(self) -> int:
        return sum(future.done() for future in self.futures)

    def check(self, *, lost: bool = False) -> None:
        """The sum is right; without `lost`, no result was computed twice either."""
        results = self.client.gather(self.futures)
        assert results == [2 * number for number in range(self.count)]
        kept = self.client.gather(self.kept)
        assert [number for number, _ in kept] == list(range(8))
        assert lost or kept == self.known


def job(cluster, job_id: str) -> Job:
    (found,) = (job for job in cluster.jobs() if job.id == job_id)
    return found


def job_of(cluster, name: str) -> str:
    job_id = job_of_worker(cluster.id, name)
    assert job_id is not None
    return job_id


# Jobs that end


@pytest.mark.slow
def test_jobs_and_workers_that_end(user: Login, capsys: pytest.CaptureFixture[str]):
    """Cancelled, killed by two kinds of SIGKILL, and requeued, one after the other."""
    with user.make(n_workers=2) as cluster, cluster.get_client() as client:
        client.wait_for_workers(2, timeout=180)
        wait_for_running(cluster, 2)

        computation = Computation(client)
        cancelled = live(cluster)[0]
        user.site.run("scancel", cancelled)
        computation.check()  # it has handed over what it held
        wait_for_running(cluster, 2)
        assert len(cluster.jobs()) == 3
        assert job(cluster, cancelled).state == JobState.CANCELLED
        assert cancelled not in {job_of(cluster, name) for name in pids(client)}

        computation = Computation(client)
        name, pid = sorted(pids(client).items())[0]
        os.kill(pid, signal.SIGKILL)
        computation.check(lost=True)
        wait_for(lambda: pid not in pids(client).values(), 20, "the worker to be gone")
        wait_for_running(cluster, 2)
        assert len(cluster.jobs()) == 3  # its nanny has started it again

        computation = Computation(client)
        name, pid = sorted(pids(client).items())[0]
        killed = job_of(cluster, name)
        found = user.processes(f"HPCDASK_JOB_ID={killed}")
        assert pid in {process.pid for process in found}
        end(found)
        computation.check(lost=True)
        wait_for(lambda: pid not in pids(client).values(), 20, "the worker to be gone")
        wait_for_running(cluster, 2)
        assert len(cluster.jobs()) == 4
        assert job(cluster, killed).state == JobState.FAILED
        assert job(cluster, killed).exit_code == 137

        computation = Computation(client)
        requeued = live(cluster)[0]
        before = set(pids(client))
        user.site.run("scontrol", "requeue", requeued)
        wait_for(lambda: job(cluster, requeued).state == JobState.REQUEUED, 20, "it to be requeued")
        assert "1 requeued" in repr(cluster)
        computation.check(lost=True)
        wait_for_running(cluster, 2)
        assert job(cluster, requeued).restarts == 1
        assert len(cluster.jobs()) == 4  # not replaced: it came back
        (new,) = set(pids(client)) - before
        assert new == worker_name(cluster.id, requeued, 1, 0)
        assert cluster.failure is None
    assert f"job {cancelled} has ended: cancelled" in capsys.readouterr().err


# Nodes that go


@pytest.fixture
def nodes_back(slurm: SlurmSite) -> Iterator[None]:
    yield
    for node in slurm.nodes:
        slurm.run("scontrol", "update", f"nodename={node}", "state=resume", check=False)


@pytest.mark.usefixtures("nodes_back")
@pytest.mark.long
def test_a_node_that_goes_down(user: Login):
    keywords = {"job_extra_directives": ["--no-requeue"]}
    with user.make(n_workers=3, **keywords) as cluster, cluster.get_client() as client:
        client.wait_for_workers(3, timeout=180)
        wait_for_running(cluster, 3)
        computation = Computation(client)
        last = cluster.jobs()[-1]  # alone on its node
        user.site.run("scontrol", "update", f"nodename={last.nodes}", "state=down", "reason=test")
        computation.check(lost=True)
        wait_for(lambda: job(cluster, last.id).state == JobState.FAILED, 20, "its end")
        assert job(cluster, last.id).reason.startswith("NODE_FAIL")
        wait_for_running(cluster, 3)
        assert len(cluster.jobs()) == 4
        assert cluster.failure is None


# A submission that fails


def test_jobs_that_appear_after_sbatch_was_given_up(user: Login, tmp_path: Path):
    """A busy controller takes a request whose sender is gone."""
    sbatch = user.wrap("sbatch")
    given_up = tmp_path / "given-up"
    late = f'until [ -e {given_up} ]; do sleep 0.1; done; exec {sbatch.real} "$@"'
    sbatch.behave(f"setsid sh -c '{late}' sh \"$@\" >/dev/null 2>&1 & sleep 600")
    with user.make() as cluster, cluster.get_client() as client:
        cluster.queue.timeout_s = 3.0
        with pytest.raises(QueueError, match="sbatch did not answer"):
            cluster.scale(2)
        given_up.touch()
        assert not cluster.jobs()
        cluster.queue.timeout_s = 30.0
        sbatch.behave()
        wait_for(lambda: len(user.queued()) == 2, 20, "the late jobs")
        wait_for_running(cluster, 2)
        cluster.scale(2)
        assert len(sbatch.calls()) == 1
        assert client.submit(sum, [1, 2]).result(timeout=180) == 3
    assert not user.queued()


# The notebook dies


NOTEBOOK = """
import sys, time
from hpcdask import SLURMCUDACluster
cluster = SLURMCUDACluster(**eval(sys.argv[1]))
cluster.scale(3)
cluster.wait_for_workers(2, timeout=180)
print("ready", flush=True)
time.sleep(600)
"""


def test_sigkill_of_the_notebook_and_its_watchdog(user: Login):
    user.occupy(3)
    notebook = user.start(NOTEBOOK, repr(user.keywords(death_timeout="3s")))
    assert notebook.stdout is not None
    assert notebook.stdout.readline() == "ready\n"
    children = psutil.Process(notebook.pid).children()
    (watchdog,) = (one for one in children if "watchdog" in " ".join(one.cmdline()))
    assert sorted(user.queued().values()) == ["PENDING", "RUNNING", "RUNNING"]
    watchdog.kill()
    notebook.kill()
    notebook.communicate()
    # the workers by themselves, and the third job, which starts then and finds no scheduler
    wait_for(lambda: not user.queued(), 40, "all jobs to end")
    (folder,) = user.folder.glob("*/cluster.json")
    done = user.hpcdask("down", "--dead", "--yes")  # and that removes the keys
    assert "no keys are left" in done
    assert not user.key_files()
    assert json.loads(folder.read_text())["ended"]


# Jobs that others take the place of


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.usefixtures("slurm_programs")
def test_a_preempted_job_is_replaced_when_there_is_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    conf = {
        "PreemptType": "preempt/partition_prio",
        "PreemptMode": "CANCEL",
        "PartitionName": "urgent Nodes=ALL PriorityTier=10",
    }
    with (
        SlurmSite(nodes=1, gpus_per_node=1, conf=conf) as site,
        login(site, tmp_path, monkeypatch) as user,
        user.make(n_workers=1) as cluster,
        cluster.get_client() as client,
    ):
        wait_for_running(cluster, 1)
        computation = Computation(client)
        (first,) = live(cluster)
        urgent = site.submit(
            "-p", "urgent", "--gres=gpu:1", "--output=/dev/null", "--wrap", "sleep 5"
        )
        site.wait_for_state(urgent, "RUNNING")
        wait_for(lambda: job(cluster, first).state == JobState.PREEMPTED, 30, "it to be preempted")
        wait_for(lambda: "1 pending" in repr(cluster), 20, "another that waits")
        computation.check(lost=True)
        assert site.state(urgent) == "COMPLETED"
        assert len(cluster.jobs()) == 2
        assert cluster.failure is None
