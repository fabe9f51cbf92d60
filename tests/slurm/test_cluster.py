"""The life of clusters of jobs on a real SLURM: up, down, seen, and over."""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path

import pytest

import hpcdask
from hpcdask.errors import UsageError
from hpcdask.queues.job_state import OVER, JobState
from launching import end, wait_for, walk
from slurm_login import ONE, Login, pids, states, wait_for_running

pytestmark = pytest.mark.slurm


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
        told = user.hpcdask("stacks", cluster.id)
        assert "its jobs are 2 pending (JobHeldUser)" in told
        assert waits in told
        assert waits in user.hpcdask("list")
        words = ("logs", "--folder", str(user.folder), cluster.id)
        done = user.site.run(sys.executable, "-m", "hpcdask", *words, env=user.variables)
        assert "there is no line yet; jobs: 2 pending (JobHeldUser)" in done.stderr
    said = capfd.readouterr().err
    assert said.count("may never start: JobHeldUser") == 1


def test_a_directive_of_the_user_gives_the_workers_their_memory(user: Login):
    """Regression: --mem, hpcdask's own line, and --mem-per-gpu were "mutually exclusive"."""
    own = {"memory": None, "job_extra_directives": ["--mem-per-cpu=300M"]}
    with user.make(**own) as cluster, cluster.get_client() as client:
        cluster.scale(1)
        client.wait_for_workers(1, timeout=180)
        (worker,) = client.scheduler_info()["workers"].values()
        assert worker["memory_limit"] == 300 << 20
        with pytest.raises(UsageError, match="the workers' memory is not known here"):
            cluster.scale(memory="1GiB")


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


# Workers of several kinds


def test_each_group_has_its_own_request_and_replacements(user: Login):
    with user.make(groups={"gpu": {}, "cpu": {"gpus_per_job": 0}}) as cluster:
        cluster.scale(gpu=1, cpu=1)
        wait_for_running(cluster, 2)
        known = {job.group: job.id for job in cluster.jobs()}
        for group, expected in (("gpu", "gres:gpu:1"), ("cpu", "N/A")):
            shown = user.site.run("squeue", "-h", "-j", known[group], "-o", "%b").stdout.strip()
            assert shown.replace("gres/", "gres:") == expected
        user.site.run("scancel", known["gpu"])
        wait_for(lambda: len(cluster.jobs()) == 3, 60, "another job")
        wait_for_running(cluster, 2)
        new = {job.group: job.id for job in cluster.jobs() if job.state not in OVER}
        assert new["cpu"] == known["cpu"]
        assert new.keys() == {"gpu", "cpu"}
        cluster.scale(gpu=0)
        wait_for(lambda: list(user.queued()) == [known["cpu"]], 60, "a group to leave")


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
    assert not [path for path in walk(tmp_path / "clusters") if path.name.endswith("keys")]
