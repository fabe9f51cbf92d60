"""The door to Grid Engine, against a real one."""

import asyncio
from pathlib import Path

import pytest

from doors import (
    SAY,
    TAG,
    ask,
    cancel,
    check_cluster,
    check_submit,
    make_job,
    submit,
    wait_for_state,
    write_script,
)
from hpcdask import SGECUDACluster
from hpcdask.errors import Refused
from hpcdask.queues.job_state import JobState
from hpcdask.queues.sge import SgeQueue
from launching import wait_for
from sge_site import SgeSite


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
    seen = wait_for_state(queue, job, JobState.RUNNING)
    assert seen.nodes == "localhost"
    assert seen.started is not None
    assert seen.ends == seen.started + 1800  # dask-jobqueue's default walltime
    seen = wait_for_state(queue, job, JobState.FAILED)
    assert seen.exit_code == 3
    assert (tmp_path / f"said-{job}").read_text() == f"{job}\n"
    assert (folder / f"queue-{job}.0.log").exists()


def test_an_array_is_cancelled_one_by_one(queue: SgeQueue, tmp_path: Path):
    command = f"{SAY}; exec sleep 600"
    jobs = submit(queue, write_script(queue, make_job("SGE"), tmp_path, command), 3)
    assert [job.partition(".")[2] for job in jobs] == ["1", "2", "3"]
    for job in jobs:
        wait_for_state(queue, job, JobState.RUNNING)
    wait_for(lambda: len(list(tmp_path.glob("said-*"))) == 3, 10, "the jobs' files")
    assert {path.name for path in tmp_path.glob("said-*")} == {f"said-{job}" for job in jobs}
    assert asyncio.run(queue.tagged()) == dict.fromkeys(jobs, TAG)
    cancel(queue, jobs[1:2])
    seen = wait_for_state(queue, jobs[1], JobState.FAILED)
    assert (seen.exit_code, seen.reason) == (137, "ended by SIGKILL")
    assert set(asyncio.run(queue.query(jobs))) == {jobs[0], jobs[2]}
    cancel(queue, jobs)  # the one that is over does not matter


def test_a_job_waits_for_gpus_and_is_cancelled(queue: SgeQueue, tmp_path: Path):
    script = write_script(queue, make_job("SGE"), tmp_path, "exec sleep 600", gpus=3)
    first, second = submit(queue, script)[0], submit(queue, script)[0]
    wait_for_state(queue, first, JobState.RUNNING)
    assert ask(queue, second).state is JobState.PENDING
    cancel(queue, [second])
    wait_for(lambda: second not in asyncio.run(queue.query([second])), 10, "the job to be gone")


def test_the_walltime_ends_a_job(queue: SgeQueue, tmp_path: Path):
    job = make_job("SGE", walltime="0:0:2")
    (job,) = submit(queue, write_script(queue, job, tmp_path, "exec sleep 600"))
    assert wait_for_state(queue, job, JobState.TIMEOUT, JobState.FAILED).state is JobState.TIMEOUT


def test_a_job_in_error_state_is_stuck_until_it_is_cancelled(queue: SgeQueue, tmp_path: Path):
    """Regression: a query deleted it, also one of `hpcdask list --jobs`."""
    folder = tmp_path / "logs"
    script = write_script(queue, make_job("SGE"), folder, "true")
    kept = Path(script).rename(tmp_path / "script.sh")
    folder.rmdir()  # its output cannot be opened
    (job,) = submit(queue, str(kept))
    seen = wait_for(
        lambda: (one := ask(queue, job)) and one.stuck and one, 30, "the job to be stuck"
    )
    assert seen.state is JobState.PENDING
    assert "error state Eqw" in seen.reason
    assert job in asyncio.run(queue.query([job]))
    cancel(queue, [job])
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
    wait_for_state(queue, job, JobState.COMPLETED)


def test_a_cluster_of_grid_engine_jobs(queue: SgeQueue, tmp_path: Path):
    check_cluster(SGECUDACluster, queue, tmp_path)


@pytest.mark.long
def test_submit_waits_and_returns_the_exit_code(sge: SgeSite, queue: SgeQueue, tmp_path: Path):
    check_submit("sge", queue, tmp_path, sge.env)
