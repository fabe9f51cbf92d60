"""What goes wrong with jobs, nodes, SLURM's commands and notebooks, on a real SLURM.

Every fault ends in the wanted number of workers or a clear error; no result is lost or wrong, and
no job, process or key is left, which the fixture sees to.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from distributed import Client, Future

from hpcdask.clusters.job import Job
from hpcdask.errors import QueueError
from hpcdask.jobs.state import JobState
from hpcdask.spec.job import parse_worker_name
from launching import decide_again, end, until, wait_for, walk
from slurm_login import Login, live, login, pids, states, wait_for_running
from slurm_site import SlurmSite

pytestmark = pytest.mark.slurm


@pytest.fixture
def user(slurm: SlurmSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Login]:
    with login(slurm, tmp_path, monkeypatch) as user:
        yield user


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
    parsed = parse_worker_name(cluster.id, name)
    assert parsed is not None
    return parsed[0]


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
        assert parse_worker_name(cluster.id, new) == (requeued, 1, 0)
        assert cluster.failure is None
    assert f"job {cancelled} has ended: cancelled" in capsys.readouterr().err


@pytest.mark.long
def test_scancel_of_a_pending_job(user: Login):
    others = user.occupy(3)
    with user.make() as cluster:
        cluster.scale(3)  # and there are two GPUs
        wait_for(lambda: sorted(states(cluster)) == ["pending", "running", "running"], 40, "two")
        running = live(cluster)
        (pending,) = (job.id for job in cluster.jobs() if job.state == JobState.PENDING)
        user.site.run("scancel", pending)
        wait_for(lambda: len(cluster.jobs()) == 4, 20, "another job instead")
        assert job(cluster, pending).state == JobState.CANCELLED
        last = cluster.jobs()[-1]
        wait_for(lambda: job(cluster, last.id).reason, 20, "the queue's word on it")
        assert sorted(user.queued()) == sorted([*running, last.id])
        assert live(cluster) == running
        user.site.run("scancel", str(others))
        wait_for_running(cluster, 3)


# Nodes that go


@pytest.fixture
def nodes_back(slurm: SlurmSite) -> Iterator[None]:
    yield
    for node in slurm.nodes:
        slurm.run("scontrol", "update", f"nodename={node}", "state=resume", check=False)


@pytest.mark.usefixtures("nodes_back")
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


@pytest.mark.usefixtures("nodes_back")
def test_a_node_that_is_drained_and_one_whose_job_is_requeued(user: Login):
    keywords = {"job_extra_directives": ["--requeue"]}
    with user.make(n_workers=1, **keywords) as cluster, cluster.get_client() as client:
        client.wait_for_workers(1, timeout=180)
        wait_for_running(cluster, 1)
        computation = Computation(client, 20)
        (first,) = cluster.jobs()
        user.site.run("scontrol", "update", f"nodename={first.nodes}", "state=drain", "reason=test")
        computation.check()  # what runs there may go on
        assert live(cluster) == [first.id]
        cluster.scale(2)
        wait_for_running(cluster, 2)
        last = cluster.jobs()[-1]
        assert last.nodes != first.nodes

        computation = Computation(client)
        user.site.run("scontrol", "update", f"nodename={last.nodes}", "state=down", "reason=test")
        computation.check(lost=True)
        wait_for(lambda: job(cluster, last.id).restarts == 1, 20, "SLURM to start it again")
        wait_for_running(cluster, 2)
        assert len(cluster.jobs()) == 2
        assert cluster.failure is None


# A submission that fails


def test_sbatch_hangs(user: Login):
    sbatch = user.wrap("sbatch")
    sbatch.behave("sleep 600")

    async def notebook() -> None:
        async with user.make(asynchronous=True) as cluster:
            cluster.queue.timeout_s = 4.0
            scaling = asyncio.ensure_future(cluster.scale(2))
            await until(sbatch.calls, 30, "sbatch to hang")
            for _ in range(20):  # the event loop goes on meanwhile
                await asyncio.sleep(0.01)
                assert not scaling.done()
            with pytest.raises(QueueError, match=r"sbatch did not answer within 4 s.*SLURM"):
                await asyncio.wait_for(scaling, 180)
            assert not cluster.jobs()
            assert not user.queued()
            sbatch.behave()
            cluster.queue.timeout_s = 30.0
            await cluster.scale(1)  # the user asks again
            await asyncio.wait_for(cluster.wait_for_workers(1), 180)

    asyncio.run(notebook())


@pytest.mark.long
def test_sbatch_hangs_after_it_has_submitted(user: Login):
    sbatch = user.wrap("sbatch")
    sbatch.behave(f'{sbatch.real} "$@"; sleep 600')
    with user.make() as cluster, cluster.get_client() as client:
        cluster.queue.timeout_s = 5.0
        cluster.scale(2)  # all that was asked for is there
        cluster.queue.timeout_s = 30.0
        assert len(cluster.jobs()) == 2
        assert sorted(user.queued()) == sorted(job.id for job in cluster.jobs())
        client.wait_for_workers(2, timeout=180)
        assert client.submit(sum, [1, 2]).result(timeout=180) == 3
        wait_for_running(cluster, 2)
        assert len(sbatch.calls()) == 1
    assert not user.queued()


@pytest.mark.parametrize("seen", ["at work", "at the end"])
def test_jobs_that_appear_after_sbatch_was_given_up(user: Login, tmp_path: Path, seen: str):
    """A busy controller takes a request whose sender is gone."""
    sbatch = user.wrap("sbatch")
    given_up = tmp_path / "given-up"
    late = f'until [ -e {given_up} ]; do sleep 0.1; done; exec {sbatch.real} "$@"'
    sbatch.behave(f"setsid sh -c '{late}' sh \"$@\" >/dev/null 2>&1 & sleep 600")
    if seen == "at the end":
        user.occupy(4)  # so that no worker tells of them
    with user.make() as cluster, cluster.get_client() as client:
        cluster.queue.timeout_s = 3.0
        with pytest.raises(QueueError, match="sbatch did not answer"):
            cluster.scale(2)
        given_up.touch()
        assert not cluster.jobs()
        cluster.queue.timeout_s = 30.0
        sbatch.behave()
        wait_for(lambda: len(user.queued()) == 2, 20, "the late jobs")
        if seen == "at work":
            wait_for_running(cluster, 2)
            cluster.scale(2)
            assert len(sbatch.calls()) == 1
            assert client.submit(sum, [1, 2]).result(timeout=180) == 3
    assert not user.queued()


# A queue that does not answer


@pytest.mark.long
def test_squeue_fails_for_a_while(user: Login, capsys: pytest.CaptureFixture[str]):
    squeue, sbatch = user.wrap("squeue"), user.wrap("sbatch")
    with user.make(poll_interval=0.2) as cluster, cluster.get_client() as client:
        cluster.scale(2)
        client.wait_for_workers(2, timeout=180)
        wait_for_running(cluster, 2)
        computation = Computation(client, 60)
        cluster.queue.timeout_s = 3.0
        more = len(squeue.calls()) + 2  # the one under way still has the old limit, of a minute
        wait_for(lambda: len(squeue.calls()) >= more, 40, "a call with the new limit")
        error = "echo 'squeue: error: Unable to contact slurm controller' >&2; exit 1"
        for failing, times in (("sleep 600", 1), (error, 2)):  # it is asked less and less often
            squeue.behave(failing)
            more = len(squeue.calls()) + times
            wait_for(lambda more=more: len(squeue.calls()) >= more, 40, "some failures")
        assert states(cluster) == [JobState.RUNNING] * 2
        victim = live(cluster)[0]
        user.site.run("scancel", victim)
        computation.check()
        assert len(sbatch.calls()) == 1  # who knows what has become of it
        cluster.queue.timeout_s = 30.0
        squeue.behave()
        wait_for(lambda: job(cluster, victim).state == JobState.CANCELLED, 60, "the truth")
        wait_for_running(cluster, 2)
        assert len(sbatch.calls()) == 2
        assert cluster.failure is None
    said = capsys.readouterr().err
    assert said.count("What the jobs do is unknown") == 1
    assert said.count("warning") == 1


# Jobs that never get anywhere


# Walltime


@pytest.mark.long
def test_walltime_in_the_middle_of_a_computation(user: Login, capsys: pytest.CaptureFixture[str]):
    """One cluster has room for replacements; the other has none until its only job is over."""
    hold = ("--gres=gpu:1", "--nodelist=node4", "--chdir", user.home, "--output=/dev/null")
    user.site.submit(*hold, "--wrap", "exec sleep 600")
    roomy = {"walltime": "00:01:00", "job_extra_directives": ["--exclude=node4"]}
    tight = {"walltime": "00:01:00", "job_extra_directives": ["--nodelist=node4"]}

    def compute(client: Client, count: int) -> list[Future]:
        """Dask tasks of 2 s, so that some run whenever a job ends."""
        return client.map(lambda number: time.sleep(2) or number, range(count), pure=False)

    with (
        user.make(n_workers=2, **roomy) as two,
        user.make(n_workers=1, **tight) as one,
        two.get_client() as of_two,
        one.get_client() as of_one,
    ):
        two.wait_for_workers(2, timeout=180)
        one.wait_for_workers(1, timeout=180)
        wait_for_running(two, 2)
        wait_for_running(one, 1)
        first = [job.id for job in [*two.jobs(), *one.jobs()]]
        until = max(job.ends for job in [*two.jobs(), *one.jobs()]) + 5
        kept = of_two.map(lambda number: (number, os.urandom(8)), range(8), pure=False)
        known = of_two.gather(kept)
        while time.time() < until:
            futures = compute(of_two, 4), compute(of_one, 2)
            assert of_two.gather(futures[0]) == [0, 1, 2, 3]
            assert of_one.gather(futures[1]) == [0, 1]
        assert of_two.gather(kept) == known  # handed over from job to job
        for cluster, count in ((two, 2), (one, 1)):
            wait_for_running(cluster, count)
            assert not set(first) & set(live(cluster))
            assert {job.state for job in cluster.jobs() if job.id in first} == {JobState.COMPLETED}
            assert cluster.failure is None
    said = capsys.readouterr().err
    assert re.findall(r"job (\S+) reaches its walltime and nobody could take over", said) == [
        first[-1]
    ]


# The notebook dies


NOTEBOOK = """
import sys, time
from hpcdask import SLURMCUDACluster
cluster = SLURMCUDACluster(**eval(sys.argv[1]))
cluster.scale(3)
cluster.wait_for_workers(2, timeout=180)
print(cluster._watchdog.pid, flush=True)
time.sleep(600)
"""


def test_sigkill_of_the_notebook_and_its_watchdog(user: Login):
    user.occupy(3)
    notebook = user.start(NOTEBOOK, repr(user.keywords(death_timeout="3s")))
    assert notebook.stdout is not None
    watchdog = psutil.Process(int(notebook.stdout.readline()))
    assert sorted(user.queued().values()) == ["PENDING", "RUNNING", "RUNNING"]
    watchdog.kill()
    notebook.kill()
    notebook.communicate()
    # the workers by themselves, and the third job, which starts then and finds no scheduler
    wait_for(lambda: not user.queued(), 40, "all jobs to end")
    (folder,) = user.folder.glob("*/cluster.json")
    done = user.hpcdask("cleanup", "--yes")  # and that removes the keys
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


@pytest.mark.slow
@pytest.mark.usefixtures("slurm_programs")
def test_a_job_that_slurm_failed_to_launch_and_holds_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """It was waited for without end. A user's own hold is respected."""
    fails, prolog = tmp_path / "fails", tmp_path / "prolog"
    prolog.write_text(f"#!/bin/sh\n[ ! -e {fails} ]\n")
    prolog.chmod(0o755)
    fails.touch()
    with (
        SlurmSite(nodes=1, gpus_per_node=2, conf={"Prolog": prolog}) as site,
        login(site, tmp_path, monkeypatch) as user,
        user.make() as cluster,
    ):
        cluster.scale(1)
        first = cluster.jobs()[0].id
        wait_for(lambda: len(cluster.jobs()) == 2, 60, "another job")
        fails.unlink()
        site.run("scontrol", "update", "nodename=node1", "state=resume")
        wait_for_running(cluster, 1)
        assert job(cluster, first).cancelled
        assert cluster.failure is None
        said = capsys.readouterr().err
        assert f"job {first} is given up, as one that failed" in said
        assert "launch failed requeued held" in said

        site.run("scontrol", "requeuehold", live(cluster)[0])
        wait_for(lambda: "1 requeued (" in repr(cluster), 20, "it to be held")
        cluster.sync(decide_again, cluster, times=5)
        assert len(cluster.jobs()) == 2
        assert "is given up" not in capsys.readouterr().err
        for path in walk(user.folder):
            if path.name.startswith("queue-"):
                path.chmod(0o600)  # slurmd itself wrote it, in a folder of 0700
