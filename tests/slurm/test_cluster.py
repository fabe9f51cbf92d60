"""The life of clusters of jobs on a real SLURM: up, down, seen, and over."""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import hpcdask
from hpcdask.errors import UsageError
from hpcdask.jobs.state import OVER, JobState
from hpcdask.spec.job import parse_worker_name
from launching import decide_again, end, wait_for, walk
from slurm_login import ONE, Login, live, login, pids, states, wait_for_running
from slurm_site import SlurmSite

pytestmark = pytest.mark.slurm


@pytest.fixture
def user(slurm: SlurmSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Login]:
    with login(slurm, tmp_path, monkeypatch) as user:
        yield user


# Up and down


def test_jobs_that_wait_for_what_does_not_end_by_itself(user: Login, capfd):
    with user.make(job_extra_directives=["--hold"], poll_interval="1s") as cluster:
        cluster.scale(2)
        wait_for(lambda: "JobHeldUser" in cluster.jobs().problem, 30, "the queue's reason")
        waits = "2 jobs wait, and may never start: JobHeldUser. Release them: scontrol release JOB"
        wait_for(lambda: cluster.jobs().problem == waits, 30, "both")
        for shown in (repr(cluster), repr(cluster.jobs()), cluster._repr_html_()):
            assert waits in shown
        with pytest.raises(TimeoutError) as error:
            cluster.wait_for_workers(1, timeout=1)
        assert error.value.__notes__ == ["Jobs: 2 pending (JobHeldUser)"]
        wait_for(
            lambda: "2 pending (JobHeldUser)" in user.hpcdask("stacks", cluster.id), 30, "stacks"
        )
        assert "its jobs are 2 pending (JobHeldUser)" in user.hpcdask("stacks", cluster.id)
        words = ("logs", "--folder", str(user.folder), cluster.id)
        done = user.site.run(sys.executable, "-m", "hpcdask.cli", *words, env=user.variables)
        assert "there is no line yet; jobs: 2 pending (JobHeldUser)" in done.stderr
    said = capfd.readouterr().err
    assert said.count("may never start: JobHeldUser") == 1


#: The last is what SLURM 23.11 says where there is no accounting.
USUAL_REASONS = ("Resources", "Priority", "InvalidAccount")


@pytest.mark.long
def test_scale_with_one_sbatch_and_all_that_is_shown(user: Login):
    sbatch = user.wrap("sbatch")
    squeue = user.wrap("squeue")
    user.occupy(3)
    with user.make(job_name='it\'s; a "name" $HOME') as cluster, cluster.get_client() as client:
        assert cluster.jobs() == ()
        cluster.sync(decide_again, cluster, times=3)
        assert not squeue.calls()  # nothing is asked while there is no job
        cluster.scale(4)
        assert sorted(user.queued()) == sorted(job.id for job in cluster.jobs())
        client.wait_for_workers(2, timeout=180)
        wait_for(lambda: sorted(states(cluster)) == ["pending"] * 2 + ["running"] * 2, 20, "two")

        reason = wait_for(
            lambda: next(job.reason for job in cluster.jobs() if job.state == JobState.PENDING),
            20,
            "the queue's reason",
        )
        assert reason in USUAL_REASONS
        for text in (repr(cluster), repr(cluster.jobs()), cluster._repr_html_()):
            assert reason in text
        assert "2 running" in repr(cluster)
        assert "workers=2" in repr(cluster)
        running = live(cluster)
        known = client.submit(os.urandom, 8, pure=False)
        value = known.result(timeout=180)
        cluster.scale(2)  # those that wait go first
        wait_for(lambda: sorted(user.queued()) == running, 20, "the pending jobs to go")
        assert live(cluster) == running
        assert known.result(timeout=180) == value
        names = user.site.run("squeue", "-h", "-r", "-o", "%j", "-n", 'it\'s; a "name" $HOME')
        assert names.stdout.splitlines() == ['it\'s; a "name" $HOME'] * 2
        cluster.scale(1)
        wait_for(lambda: len(user.queued()) == 1, 30, "one job")
        assert known.result(timeout=180) == value  # wherever it was
        logs = cluster.job_logs()
        assert len(logs) == 4
        for job in cluster.jobs():  # live, completed and cancelled before they started
            assert bool(logs[job.id]) == (job.id in running), job
            assert not logs[job.id] or f"job {job.id}" in logs[job.id]
        assert len(sbatch.calls()) == 1
        wait_for_running(cluster, 1)
        cluster.scale(4)  # one runs, one may start, two wait
        assert len(user.queued()) == 4
        assert user.key_files()
    assert not user.queued()  # when `close` returns
    assert not user.key_files()
    assert set(states(cluster)) <= OVER
    assert {job.state for job in cluster.jobs() if not job.nodes} == {JobState.CANCELLED}


@pytest.mark.long
def test_a_suspended_job_shows_the_reason(user: Login):
    with user.make() as cluster, cluster.get_client() as client:
        cluster.scale(2)
        wait_for_running(cluster, 2)
        paused = live(cluster)[0]
        user.site.run("scontrol", "suspend", paused)
        wait_for(lambda: "1 running (SUSPENDED" in repr(cluster), 20, "the queue's reason")
        user.site.run("scontrol", "resume", paused)
        wait_for(lambda: "2 running," in repr(cluster), 20, "no reason any more")
        assert client.submit(sum, [1, 2]).result(timeout=180) == 3


@pytest.mark.long
def test_two_clusters_side_by_side(user: Login):
    with user.make(n_workers=1) as one, user.make(n_workers=1) as two:
        two.wait_for_workers(1, timeout=180)
        one.wait_for_workers(1, timeout=180)
        assert not {job.id for job in one.jobs()} & {job.id for job in two.jobs()}
        with two.get_client() as client:
            assert {parse_worker_name(one.id, name) for name in pids(client)} == {None}
        one.close()
        assert sorted(user.queued()) == live(two)
        assert len(live(two)) == 1


# Several workers per job


def test_a_job_on_two_nodes_is_replaced_as_a_whole(user: Login):
    keywords = {"gpus_per_job": 2, "nodes_per_job": 2}
    with user.make(n_workers=2, **keywords) as cluster, cluster.get_client() as client:
        client.wait_for_workers(2, timeout=180)
        wait_for_running(cluster, 1)
        nodes = client.run(lambda: os.environ["SLURMD_NODENAME"])
        assert len(set(nodes.values())) == 2
        before = pids(client)
        # all of the job's processes on the node that does not run its script
        end(user.processes(f"SLURMD_NODENAME={max(nodes.values())}"))
        wait_for(lambda: len(cluster.jobs()) == 2, 30, "another job")
        wait_for_running(cluster, 1)
        new = pids(client)
        assert not set(new) & set(before)
        assert len(new) == 2
        assert cluster.jobs()[0].state == JobState.FAILED
        assert client.submit(sum, [1, 2]).result(timeout=180) == 3


# What an earlier session left


NOTEBOOK = """
import sys, time
from hpcdask import SLURMCUDACluster
cluster = SLURMCUDACluster(**eval(sys.argv[1]))
cluster.scale(3)
cluster.wait_for_workers(2, timeout=180)
print(cluster.id, cluster._watchdog.pid, flush=True)
time.sleep(600)
"""


def test_jobs_and_cleanup_after_a_killed_notebook(user: Login):
    others = user.occupy(3)  # a job of the same user; one of the cluster's jobs is pending
    notebook = user.start(NOTEBOOK, repr(user.keywords()))
    assert notebook.stdout is not None
    name, watchdog = notebook.stdout.readline().split()
    running = [job_id for job_id, word in user.queued().items() if word == "RUNNING"]
    user.site.run("scancel", "--full", "--signal=STOP", *running)  # else they end by themselves
    with user.make(n_workers=1) as cluster:
        psutil.Process(int(watchdog)).kill()
        notebook.kill()
        notebook.communicate()
        listed = json.loads(user.hpcdask("jobs", "--json"))
        # Clusters of processes, of tests that run beside this one, are this user's as well
        listed = [row for row in listed if row["queue"] == "slurm"]
        lost = {row["job"]: row["state"] for row in listed if row["cluster"] == name}
        assert sorted(lost) == sorted(set(user.queued()) - {cluster.jobs()[0].id})
        assert sorted(lost.values()) == ["pending", "running", "running"]
        assert {row["told_by"] for row in listed if row["cluster"] == name} == {"queue"}
        assert {row["job"] for row in listed} == set(user.queued())
        lives = {row["cluster"]: row["notebook"]["lives"] for row in listed}
        assert lives == {name: False, cluster.id: True}

        said = user.hpcdask("cleanup", "--yes")
        assert f"{name}: 3 jobs cancelled and gone" in said
        assert f"{cluster.id}: kept 1 job" in said
        assert list(user.queued()) == [cluster.jobs()[0].id]
        assert user.site.state(others) == "RUNNING"
        assert not [path for path in user.key_files() if name in path.parts]
        cluster.wait_for_workers(1, timeout=180)  # there is room for it now


# Many jobs


def test_64_jobs_with_one_sbatch(user: Login):
    interval, running = 1.0, 4  # the others wait, as workers need time to start on few cores
    user.occupy(2)
    sbatch, squeue, scancel = map(user.wrap, ("sbatch", "squeue", "scancel"))
    with user.make(poll_interval=interval) as cluster, cluster.get_client() as client:
        cluster.scale(64)
        assert len(user.queued()) == 64
        client.wait_for_workers(running, timeout=180)
        wait_for(lambda: states(cluster).count(JobState.RUNNING) == running, 20, "all to run")
        assert states(cluster).count(JobState.PENDING) == 64 - running
        assert len(sbatch.calls()) == 1
        assert "--array=0-63" in sbatch.calls()[0]
        times = wait_for(lambda: (found := squeue.times())[2:] and found, 10, "three looks")
        assert min(after - before for before, after in itertools.pairwise(times)) >= interval
        assert client.gather(client.map(lambda n: 2 * n, range(200))) == [*range(0, 400, 2)]
        cluster.scale(running)
        wait_for(lambda: len(user.queued()) == running, 20, "the others to go")
        assert len(scancel.calls()) == 1
        assert len(client.nthreads()) == running
    assert not user.queued()


# Where there is no SLURM


def test_without_sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    keywords = {**ONE, "shared_temp_directory": str(tmp_path / "clusters")}
    with hpcdask.SLURMCUDACluster(**keywords) as cluster:
        assert "#SBATCH --gres=gpu:1" in cluster.job_script()
        for ask in (lambda: cluster.scale(2), lambda: cluster.adapt(maximum=2)):
            with pytest.raises(UsageError, match="no sbatch on this machine") as error:
                ask()
            assert "job_script() still" in str(error.value)
        assert not cluster.jobs()
        cluster.scale(0)
    with pytest.raises(UsageError, match="no sbatch"):
        hpcdask.SLURMCUDACluster(**keywords, n_workers=1)
    assert not [path for path in walk(tmp_path / "clusters") if path.suffix == ".pem"]
