"""The door to Grid Engine, against a real one."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
from distributed import Client

from doors import TAG, ask, cancel, make_job, submit, wait_for_state, write_script
from hpcdask import SGECUDACluster
from hpcdask.errors import Refused
from hpcdask.queues.job_state import QueueState
from hpcdask.queues.sge import SgeQueue
from launching import wait_for
from sge_site import SgeSite

RUN_AS_ROOT = [
    f"{project}_ALLOW_RUN_AS_ROOT{end}" for project in ("OMPI", "PRTE") for end in ("", "_CONFIRM")
]
PROGRAM = """
import sys
from distributed import Client
with Client() as client:
    print(sys.argv[1:], len(client.nthreads()), "worker")
sys.exit(5)
"""
SAY = 'echo "$HPCDASK_JOB_ID" >"said-$HPCDASK_JOB_ID"'


@pytest.fixture
def queue(sge: SgeSite, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SgeQueue:
    """The door, as a user of the site in an empty folder."""
    for name, value in sge.env.items():
        if name != "HOME":  # the test's own
            monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    return SgeQueue()


def test_a_job_runs_and_ends(queue: SgeQueue, tmp_path: Path):
    folder = tmp_path / "logs of; all"
    script = write_script(queue, make_job("SGE"), folder, f"{SAY}; sleep 1; exit 3", gpus=1)
    (job,) = submit(queue, script)
    seen = wait_for_state(queue, job, QueueState.RUNNING)
    assert seen.nodes == "localhost"
    assert seen.started is not None
    assert seen.ends == seen.started + 1800  # dask-jobqueue's default walltime
    seen = wait_for_state(queue, job, QueueState.FAILED)
    assert seen.exit_code == 3
    assert (tmp_path / f"said-{job}").read_text() == f"{job}\n"
    assert (folder / f"queue-{job}.0.log").exists()


def test_success_is_completed(queue: SgeQueue, tmp_path: Path):
    (job,) = submit(queue, write_script(queue, make_job("SGE"), tmp_path, "true"))
    seen = wait_for_state(queue, job, QueueState.COMPLETED)
    assert seen.exit_code == 0


def test_an_array_is_cancelled_one_by_one(queue: SgeQueue, tmp_path: Path):
    command = f"{SAY}; exec sleep 600"
    jobs = submit(queue, write_script(queue, make_job("SGE"), tmp_path, command), 3)
    assert [job.partition(".")[2] for job in jobs] == ["1", "2", "3"]
    for job in jobs:
        wait_for_state(queue, job, QueueState.RUNNING)
    wait_for(lambda: len(list(tmp_path.glob("said-*"))) == 3, 10, "the jobs' files")
    assert {path.name for path in tmp_path.glob("said-*")} == {f"said-{job}" for job in jobs}
    assert asyncio.run(queue.tagged()) == dict.fromkeys(jobs, TAG)
    cancel(queue, jobs[1:2])
    seen = wait_for_state(queue, jobs[1], QueueState.FAILED)
    assert (seen.exit_code, seen.reason) == (137, "ended by SIGKILL")
    assert set(asyncio.run(queue.query(jobs))) == {jobs[0], jobs[2]}
    cancel(queue, jobs)  # the one that is over does not matter


def test_a_job_waits_for_gpus_and_is_cancelled(queue: SgeQueue, tmp_path: Path):
    script = write_script(queue, make_job("SGE"), tmp_path, "exec sleep 600", gpus=3)
    first, second = submit(queue, script)[0], submit(queue, script)[0]
    wait_for_state(queue, first, QueueState.RUNNING)
    assert ask(queue, second).state is QueueState.PENDING
    cancel(queue, [second])
    wait_for(lambda: second not in asyncio.run(queue.query([second])), 10, "the job to be gone")


def test_the_walltime_ends_a_job(queue: SgeQueue, tmp_path: Path):
    job = make_job("SGE", walltime="0:0:2")
    (job,) = submit(queue, write_script(queue, job, tmp_path, "exec sleep 600"))
    assert (
        wait_for_state(queue, job, QueueState.TIMEOUT, QueueState.FAILED).state
        is QueueState.TIMEOUT
    )


def test_a_job_in_error_state_has_failed_and_goes(queue: SgeQueue, tmp_path: Path):
    folder = tmp_path / "logs"
    script = write_script(queue, make_job("SGE"), folder, "true")
    kept = Path(script).rename(tmp_path / "script.sh")
    folder.rmdir()  # its output cannot be opened
    (job,) = submit(queue, str(kept))
    seen = wait_for_state(queue, job, QueueState.FAILED)
    assert "error state Eqw" in seen.reason
    wait_for(lambda: job not in asyncio.run(queue.query([job])), 10, "the job to be gone")
    wait_for(lambda: "output file" in ask(queue, job).reason, 10, "the reason in the accounts")


def test_what_grid_engine_refuses(queue: SgeQueue, tmp_path: Path):
    script = write_script(queue, make_job("SGE", queue="nix"), tmp_path, "true")
    with pytest.raises(Refused, match='unknown queue "nix"') as caught:
        submit(queue, script)
    assert script in str(caught.value)
    assert "qconf -sql" in str(caught.value)
    assert not caught.value.for_now


def test_a_limit_of_the_site_is_for_now(queue: SgeQueue, tmp_path: Path):
    limit = asyncio.run(queue.limit())
    assert limit == 75_000
    script = write_script(queue, make_job("SGE"), tmp_path, "true")
    with pytest.raises(Refused, match="more than 75000 tasks") as caught:
        submit(queue, script, limit + 1)
    assert caught.value.for_now


def test_a_folder_that_directives_cannot_name(queue: SgeQueue, tmp_path: Path):
    folder = tmp_path / """it's "odd" """
    (job,) = submit(queue, write_script(queue, make_job("SGE"), folder, "true"))
    wait_for_state(queue, job, QueueState.COMPLETED)


def test_there_is_no_tagged_job_at_the_end(queue: SgeQueue):
    assert asyncio.run(queue.tagged()) == {}


def test_a_cluster_of_grid_engine_jobs(sge: SgeSite, queue: SgeQueue, tmp_path: Path):
    with (
        SGECUDACluster(
            device="cpu",
            cores=1,
            memory="500MB",
            job_name="my jobs",
            shared_temp_directory=str(tmp_path / "shared; folder"),
            scheduler_options={"dashboard_address": ":0"},
        ) as cluster,
        Client(cluster) as client,
    ):
        cluster.scale(2)
        client.wait_for_workers(2, timeout=180)
        assert client.submit(sum, [1, 2]).result(timeout=180) == 3
        assert len(asyncio.run(queue.tagged())) == 2
        cluster.scale(1)
        wait_for(lambda: len(asyncio.run(queue.tagged())) == 1, 30, "one job to end")
    assert asyncio.run(queue.tagged()) == {}


def test_submit_waits_and_returns_the_exit_code(sge: SgeSite, queue: SgeQueue, tmp_path: Path):
    (tmp_path / "program.py").write_text(PROGRAM)
    lines = [f'PATH="{Path(sys.executable).parent}:$PATH"']  # mpirun
    lines += [f"export {name}=1" for name in RUN_AS_ROOT]
    done = subprocess.run(
        [sys.executable, "-m", "hpcdask.cli", "submit", "--system", "sge", "--wait"]
        + [word for line in lines for word in ("--prologue", line)]
        + ["--gpus-per-node", "0", "--run", "--device cpu", "program.py", "a word"],
        cwd=tmp_path,
        env={**os.environ, **sge.env, "HOME": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 5, (done.stdout, done.stderr)
    # not the last line: what a client leaves in its event loop may be reported behind it
    assert "['a word'] 1 worker" in done.stdout.splitlines()
    assert asyncio.run(queue.tagged()) == {}
