"""The door to PBS, through SLURM's real qsub, qstat and qdel.

Those commands translate to SLURM: arrays have no elements there, exit codes and tags are not
shown, `mem` of a select statement has to come last. `tests/unit/test_queue_answers.py` has what
PBS itself answers.
"""

import asyncio
import dataclasses
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from distributed import Client

from doors import ask, cancel, make_job, submit, wait_for_state, write_script
from hpcdask import PBSCUDACluster
from hpcdask.cli import main
from hpcdask.errors import QueueError, Refused
from hpcdask.jobs.cancel import end_cluster
from hpcdask.jobs.folder import ClusterFolder
from hpcdask.queues.job_state import QueueState
from hpcdask.queues.pbs import PbsQueue
from launching import wait_for
from slurm_site import SlurmSite
from torque import with_torque

pytestmark = pytest.mark.slurm

SAY = 'echo "$HPCDASK_JOB_ID ${CUDA_VISIBLE_DEVICES:-none}" >said; '


@pytest.fixture
def queue(slurm: SlurmSite, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> PbsQueue:
    """The door, as a user of the site in an empty folder."""
    for name, value in with_torque(slurm.env).items():
        if name != "HOME":  # the test's own
            monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    return PbsQueue()


def test_a_job_runs_and_ends(queue: PbsQueue, tmp_path: Path):
    folder = tmp_path / """it's of; "all" """
    job = make_job("PBS", resource_spec="nodes=1:ppn=1,mem=100MB", job_name="my job")
    command = SAY + "sleep 2; exit 3"
    (job,) = submit(queue, write_script(queue, job, folder, command, name="my job", gpus=1))
    seen = wait_for_state(queue, job, QueueState.RUNNING)
    assert seen.nodes.startswith("node")
    assert seen.started is not None
    assert seen.ends == seen.started + 1800  # dask-jobqueue's default walltime
    seen = wait_for_state(queue, job, QueueState.COMPLETED)
    assert "exit code is not shown" in seen.reason
    assert Path("said").read_text() == f"{job} 0\n"
    log = folder / f"queue-{job}.log"
    assert log.stat().st_mode & 0o777 == 0o600
    assert not list(tmp_path.glob("*.o*"))


def test_dask_jobqueues_own_resources_are_understood(queue: PbsQueue, tmp_path: Path):
    job = make_job("PBS", cores=2, memory="100MB")
    (job,) = submit(queue, write_script(queue, job, tmp_path, SAY, gpus=1))
    wait_for_state(queue, job, QueueState.COMPLETED)
    assert Path("said").read_text() == f"{job} none\n"  # SLURM does not know ngpus


def test_a_pending_and_a_running_job_are_cancelled(
    queue: PbsQueue, slurm: SlurmSite, tmp_path: Path
):
    job = make_job("PBS", resource_spec="nodes=3:ppn=8")
    script = write_script(queue, job, tmp_path, "exec sleep 600")
    first, second = submit(queue, script)[0], submit(queue, script)[0]
    wait_for_state(queue, first, QueueState.RUNNING)
    assert ask(queue, second).state is QueueState.PENDING
    cancel(queue, [first, second])
    for job in (first, second):
        wait_for_state(queue, job, QueueState.COMPLETED)
    cancel(queue, [first, "999"])  # those that are over, or unknown, do not matter


def test_a_job_that_is_started_again_ends_at_once(
    queue: PbsQueue, slurm: SlurmSite, tmp_path: Path
):
    job = make_job("PBS", resource_spec="nodes=1:ppn=1")
    log = f"{tmp_path}/$HPCDASK_JOB_ID.log"
    command = f'echo life >>"{log}"; exec sleep 600'
    (job,) = submit(queue, write_script(queue, job, tmp_path, command))
    wait_for(lambda: (tmp_path / f"{job}.log").exists(), 20, "the job's first life")
    slurm.run("scontrol", "requeue", job)
    wait_for_state(queue, job, QueueState.PENDING)
    wait_for_state(queue, job, QueueState.COMPLETED, timeout=40)
    assert (tmp_path / f"{job}.log").read_text() == "life\n"


def test_what_is_refused(queue: PbsQueue, tmp_path: Path):
    script = write_script(queue, make_job("PBS", queue="nix"), tmp_path, "true")
    with pytest.raises(Refused, match="nvalid partition") as caught:
        submit(queue, script)
    assert script in str(caught.value)
    assert "qstat -Q" in str(caught.value)
    assert not caught.value.for_now


def test_a_job_that_is_not_known_is_missing(queue: PbsQueue):
    assert ask(queue, "999999") is None


def test_these_commands_hide_tags_and_elements(queue: PbsQueue):
    assert asyncio.run(queue.limit()) == 1
    with pytest.raises(QueueError, match="squeue --me"):
        asyncio.run(queue.tagged())


def test_jobs_without_tags_are_known_by_what_was_recorded(
    queue: PbsQueue, slurm: SlurmSite, tmp_path: Path
):
    """Of a cluster whose notebook is gone; its watchdog and `hpcdask cleanup` found nothing."""
    base = tmp_path / "base"
    folder = ClusterFolder.create("pbs-ab12cd34", "pbs", base)
    folder.owner = dataclasses.replace(folder.owner, start="0")
    folder._write()
    folder.write_script("true")
    script = write_script(queue, make_job("PBS"), tmp_path, "exec sleep 600")
    ids = [submit(queue, script)[0] for _ in range(2)]
    wait_for_state(queue, ids[0], QueueState.RUNNING)
    told: list[str] = []
    folder.new_submission().record(ids[:1])
    assert asyncio.run(end_cluster(folder, queue, told.append)) == []
    assert told == [f"cancelling {ids[0]}"]
    told.clear()
    assert asyncio.run(end_cluster(folder, queue, told.append)) == []  # not for 150 s
    assert not told

    folder.new_submission().record(ids[1:])
    shown = CliRunner().invoke(main, ["jobs", "--folder", str(base), "--json"])
    assert shown.exit_code == 0, shown.output
    rows = json.loads(shown.stdout)
    assert [row["job"] for row in rows if row["queue"] == "pbs"] == ids[1:]
    done = CliRunner().invoke(main, ["cleanup", "--folder", str(base), "--yes"])
    assert done.exit_code == 0, done.output
    assert f"cancelling {ids[1]}" in done.output
    assert running(slurm) == 0
    assert ClusterFolder.open(folder.path).ended is not None


def test_a_cluster_of_pbs_jobs(queue: PbsQueue, slurm: SlurmSite, tmp_path: Path):
    with (
        PBSCUDACluster(
            device="cpu",
            cores=1,
            memory="500MB",
            resource_spec="nodes=1:ppn=1,mem=500MB",
            job_name="my jobs",
            shared_temp_directory=str(tmp_path / "it's; shared"),
            scheduler_options={"dashboard_address": ":0"},
        ) as cluster,
        Client(cluster) as client,
    ):
        cluster.scale(2)
        client.wait_for_workers(2, timeout=180)
        assert client.submit(sum, [1, 2]).result(timeout=180) == 3
        cluster.scale(1)
        wait_for(lambda: running(slurm) == 1, 30, "one job to end")
    wait_for(lambda: running(slurm) == 0, 10, "the jobs to end")


def running(slurm: SlurmSite) -> int:
    return len(slurm.run("squeue", "-h", "-t", "pending,running").stdout.splitlines())
