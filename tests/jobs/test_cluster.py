"""Clusters of jobs with processes of this machine as the queue: the state machine of all."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from pathlib import Path

import dask
import psutil
import pytest
from distributed import Client, KilledWorker
from distributed.core import Status

import hpcdask
from clock import PATIENCE, stretched
from hpcdask.clusters import scaling, submitter
from hpcdask.errors import ClusterError, JobsFailed, NoAnswer, Refused, UsageError
from hpcdask.jobs.state import OVER, JobState
from hpcdask.queues.local import LocalQueue
from hpcdask.stacks.look import find, look
from launching import (
    agreed_states,
    clean_environment,
    decide_again,
    until,
    wait_for,
    walk,
)
from strangers import put_modules

ONE = {"device": "cpu", "cores": 1, "processes": 1, "memory": "512MiB", "poll_interval": 0.3}


def keys(base: Path) -> list[Path]:
    return [path for path in walk(base) if path.suffix == ".pem"]


def make(folder: Path, **keywords) -> hpcdask.LocalCUDAJobCluster:
    return hpcdask.LocalCUDAJobCluster(**{**ONE, "shared_temp_directory": str(folder), **keywords})


def states(cluster: hpcdask.LocalCUDAJobCluster) -> list[JobState]:
    return [job.state for job in cluster.jobs()]


def pids(client: Client) -> dict[str, int]:
    """Process ids of the workers, by the workers' names."""
    found = client.run(lambda dask_worker: (str(dask_worker.name), os.getpid()))
    return dict(found.values())


def test_scale_up_and_down(folder: Path):
    with make(folder) as cluster, cluster.get_client() as client:
        assert cluster.jobs() == ()
        assert not cluster.job_logs()
        cluster.scale(2)
        assert len(cluster.jobs()) == 2  # there when `scale` returns

        def pages(dask_worker) -> str:
            return dask_worker.http_server.address

        client.wait_for_workers(2, timeout=180)
        assert client.submit(sum, [1, 2]).result(timeout=180) == 3
        wait_for(lambda: states(cluster) == [JobState.RUNNING] * 2, 10, "both to run")
        assert "2 running" in repr(cluster)
        assert "2 running" in cluster._repr_html_()
        ids = {job.id for job in cluster.jobs()}
        assert {
            name.removeprefix(f"{cluster.id}-").rsplit("-", 2)[0] for name in pids(client)
        } == ids
        for job_id, log in cluster.job_logs().items():
            assert f"job {job_id}" in log

        def both() -> object | None:
            found = asyncio.run(look(find(cluster.id, str(folder))))
            processes = {one.name: one.process.pid for one in found.workers}
            return found if processes == pids(client) else None

        seen = wait_for(both, 60, "both to be seen")
        assert all(one.work and one.process.threads for one in seen.workers), seen
        assert not seen.unreached
        assert seen.parts["notebook"].pid == os.getpid()
        client.run(lambda: logging.getLogger("distributed.worker").warning("said\nin two lines"))
        for name in pids(client):
            said = f" {socket.gethostname()} {name} WARNING distributed.worker - said\n"
            wait_for(lambda said=said: said in f"{cluster.logs()}\n", 20, said)
        assert "in two lines" in cluster.logs(lines=1)
        assert cluster.dashboard_link.startswith("http://127.0.0.1:")
        assert cluster.scheduler_address.startswith("tls://127.0.0.1:")
        listens = [*client.nthreads(), *client.run(pages).values()]
        assert all("127.0.0.1" in address for address in listens), listens
        assert f"2 running, dashboard {cluster.dashboard_link})" in repr(cluster)
        (one, other) = sorted(ids)
        assert set(cluster.job_logs([one], other)) == ids
        assert set(cluster.job_logs(job.id for job in cluster.jobs())) == ids
        with pytest.raises(UsageError, match=f"no job 5. There are: .*{re.escape(one)}"):
            cluster.job_logs(5)
        counted = client.map(lambda number: (number, os.urandom(4)), range(20), pure=False)
        before = client.gather(counted)
        cluster.scale(1)
        wait_for(
            lambda: sorted(states(cluster)) == [JobState.COMPLETED, JobState.RUNNING], 20, "one"
        )
        assert len(client.nthreads()) == 1
        assert client.gather(counted) == before  # moved, not computed again
        cluster.scale(jobs=2)
        client.wait_for_workers(2, timeout=180)
    logs = [path for path in walk(folder) if path.suffix == ".log"]
    assert logs
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in logs)


@pytest.mark.long
def test_all_accounts_of_a_job_say_the_same_state(folder: Path):
    """`hpcdask jobs` did not know of workers, and said that those which ran were starting."""
    gate = folder.parent / "gate"
    prologue = [f"while [ ! -e {gate} ]; do sleep 0.1; done"]
    with make(folder, gpus_per_job=1, job_script_prologue=prologue) as cluster:
        cluster.queue.gpus = tuple(f"GPU-{uuid.uuid4()}" for _ in range(2))
        command = [sys.executable, "-m", "hpcdask.cli", "jobs", "--folder", str(folder)]
        cluster.scale(3)
        started = ["pending", "starting", "starting"]
        wait_for(lambda: agreed_states(cluster, *command) == started, 60, "two to start")
        path = cluster._folder.path / "jobs.json"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        gate.touch()
        running = ["pending", "running", "running"]
        wait_for(lambda: agreed_states(cluster, *command) == running, 120, "two to run")
        written = path.stat().st_mtime_ns
        cluster.sync(decide_again, cluster, times=3)
        assert path.stat().st_mtime_ns == written  # nothing is new
        cluster.scale(2)
        wait_for(lambda: agreed_states(cluster, *command) == ["running"] * 2, 60, "two alone")
    assert cluster.id not in subprocess.check_output(command, text=True)


def test_the_preview_is_what_is_submitted(folder: Path):
    with make(folder, job_script_prologue=["export GREETING='it''s me'"]) as cluster:
        preview = cluster.job_script()
        cluster.scale(1)
        (script,) = folder.glob("*/submissions/*/script.sh")
        assert script.read_text() == preview
        assert "export GREETING='it''s me'" in preview
        ids = (script.parent / "ids").read_text().split()
        assert ids == [job.id for job in cluster.jobs()]


def test_adapt_follows_a_burst_and_wastes_no_job(folder: Path):
    with make(folder) as cluster, cluster.get_client() as client:
        cluster.adapt(minimum=0, maximum=2, interval="100ms", target_duration="1s")
        futures = client.map(lambda number: time.sleep(0.2) or number, range(20), pure=False)
        assert sum(client.gather(futures)) == sum(range(20))
        assert len(cluster.jobs()) == 2
        del futures
        wait_for(lambda: set(states(cluster)) == {JobState.COMPLETED}, 30, "all jobs to end")
        assert not any(job.cancelled for job in cluster.jobs())
        assert client.submit(sum, [1, 2]).result(timeout=180) == 3  # and up again


def test_a_job_that_dies_is_replaced_and_no_result_is_lost(folder: Path):
    with make(folder, n_workers=2) as cluster, cluster.get_client() as client:
        client.wait_for_workers(2, timeout=180)
        futures = client.map(lambda number: time.sleep(0.1) or number, range(60), pure=False)
        victim, pid = sorted(pids(client).items())[0]
        job = psutil.Process(pid)
        while str(os.getpid()) != str(job.parent().pid):  # up to the job's own process
            job = job.parent()
        os.killpg(job.pid, signal.SIGKILL)
        assert sum(client.gather(futures)) == sum(range(60))
        wait_for(lambda: states(cluster).count(JobState.RUNNING) == 2, 30, "a replacement")
        assert len(cluster.jobs()) == 3
        assert victim not in pids(client)


def test_a_worker_that_dies_is_told_to_the_notebook(
    folder: Path, capfd: pytest.CaptureFixture[str]
):
    with make(folder, n_workers=1) as cluster, cluster.get_client() as client:
        client.wait_for_workers(1, timeout=180)
        ((name, pid),) = pids(client).items()
        os.kill(pid, signal.SIGKILL)
        total = client.submit(sum, [1, 2], pure=False)
        assert total.result(timeout=180) == 3
        told, line = [], f"hpcdask: worker {name} was killed by SIGKILL, and is replaced\n"

        def heard() -> bool:
            told.append(capfd.readouterr().err)
            return line in "".join(told)

        wait_for(heard, 30, "the nanny's line")
        wait_for(lambda: pids(client).get(name, pid) != pid, 60, "the worker again")
        client.restart(timeout=180)  # of which nobody needs to be told
    told.append(capfd.readouterr().err)
    assert "".join(told).count("is replaced") == 1


def test_several_workers_per_job_come_and_go_together(folder: Path):
    """And `worker_extra_args` of dask-jobqueue reach them."""
    keywords = {"gpus_per_job": 2, "worker_extra_args": ["--resources", "GPU=2", "--nthreads 3"]}
    with make(folder, **keywords) as cluster, cluster.get_client() as client:
        cluster.scale(3)  # workers: two jobs
        client.wait_for_workers(4, timeout=180)
        for worker in client.sync(client.scheduler.identity, n_workers=-1)["workers"].values():
            assert worker["resources"] == {"CPU": 1.0, "GPU": 2.0}
            assert worker["nthreads"] == 3
        assert re.search(r"--resources GPU=2", cluster.job_script())
        assert [job.size for job in cluster.jobs()] == [2, 2]
        first = cluster.jobs()[0].id
        numbers = sorted(name.rsplit("-", 1)[1] for name in pids(client) if f"-{first}-" in name)
        assert numbers == ["0", "1"]
        cluster.scale(2)
        wait_for(lambda: len(client.nthreads()) == 2, 20, "one job")
        left = {name.rsplit("-", 1)[0] for name in pids(client)}
        assert len(left) == 1


def test_three_jobs_that_do_not_start_are_enough(folder: Path, capsys: pytest.CaptureFixture[str]):
    prologue = ["echo 'module: command not found' >&2", "exit 3"]
    with make(folder, job_script_prologue=prologue) as cluster, cluster.get_client() as client:
        future = client.submit(sum, [1, 2])
        cluster.scale(1)
        with pytest.raises(JobsFailed, match=r"3 jobs in a row") as error:
            client.wait_for_workers(1, timeout=180)
        text = str(error.value)
        last = cluster.jobs()[-1]
        for part in (last.id, "exit code 3", "module: command not found"):
            assert part in text
        assert len(cluster.jobs()) == 3
        with pytest.raises(JobsFailed, match=r"exit code 3"):
            future.result(timeout=180)
        assert "Failed" in cluster._repr_html_()
        assert re.search(r", failed: 3 jobs in a row [^\n]*\)$", repr(cluster))
        cluster.sync(decide_again, cluster, times=3)
        assert len(cluster.jobs()) == 3
    assert capsys.readouterr().err.count("jobs in a row") == 1


def test_an_answer_that_makes_no_sense_does_not_end_the_watch(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    with make(folder) as cluster:
        real, asked = cluster.queue.query, []

        async def query(ids):
            asked.append(ids)
            if len(asked) == 1:
                raise ValueError("not a number")
            return await real(ids)

        cluster.queue.query = query
        cluster.scale(1)
        wait_for(lambda: len(asked) > 2, 30, "more queries")
    assert capsys.readouterr().err.count("ValueError: not a number. What the jobs do") == 1


class Slow(LocalQueue):
    """Takes one job a command, when it is let, and starts none of them."""

    def __init__(self, let: int = 1000) -> None:
        super().__init__()
        self.let = asyncio.Semaphore(let)
        self.commands = 0
        self.queries = 0

    def let_all(self) -> None:
        for _ in range(1000):
            self.let.release()

    async def limit(self) -> int:
        return 1

    async def submit(self, script: str, count: int) -> list[str]:
        await self.let.acquire()
        self.commands += 1
        return await super().submit(script, count)

    async def query(self, ids):
        self.queries += 1
        return await super().query(ids)

    def _start(self, entry) -> str:
        return "Resources"


@contextlib.asynccontextmanager
async def under_way(folder: Path) -> AsyncIterator[tuple]:
    """A cluster whose `scale(30)` has submitted three jobs, and waits for the fourth."""
    cluster = make(folder, asynchronous=True, poll_interval=0.1)
    queue = cluster.queue = Slow(let=3)
    async with cluster:
        scaling = asyncio.ensure_future(cluster.scale(30))
        await until(lambda: queue.commands == 3 and queue.let.locked(), 30, "three jobs")
        yield cluster, queue, scaling
        queue.let_all()
        await asyncio.wait_for(scaling, 60)  # it returns


def test_close_stops_a_submission_under_way(folder: Path):
    async def work() -> None:
        async with under_way(folder) as (cluster, queue, _):
            closing = asyncio.ensure_future(cluster.close())
            await until(lambda: cluster.controller.is_closing, what="the cluster to close")
            queue.let_all()
            await closing
            assert queue.commands <= 4
            assert set(states(cluster)) == {JobState.CANCELLED}

    asyncio.run(work())


def test_scale_0_stops_a_submission_under_way(folder: Path):
    async def work() -> None:
        async with under_way(folder) as (cluster, queue, _):
            scaling = asyncio.ensure_future(cluster.scale(0))
            await until(
                lambda: cluster.controller.groups[""].state.wanted == 0, what="the wish to change"
            )
            queue.let_all()
            await scaling
            assert queue.commands <= 4
            assert all(job.cancelled for job in cluster.jobs())

    asyncio.run(work())


def test_jobs_are_watched_while_others_are_submitted(folder: Path):
    async def work() -> None:
        async with under_way(folder) as (_, queue, _):
            seen = queue.queries
            await until(lambda: queue.queries >= seen + 3, 30, "three queries")
            assert queue.commands == 3

    asyncio.run(work())


@pytest.mark.long
def test_scale_in_an_event_loop_works_without_await_too(folder: Path):
    """As that of distributed's clusters."""

    async def work() -> None:
        async with make(folder, asynchronous=True) as cluster:
            cluster.scale(1)
            await asyncio.wait_for(cluster.wait_for_workers(1), 180)
            await cluster.scale(0)
            assert all(job.cancelled or job.leaving for job in cluster.jobs())

            async def refuse(script: str, count: int) -> list[str]:
                raise Refused("Invalid account")

            cluster.queue.submit = refuse
            problems: list[dict] = []
            asyncio.get_running_loop().set_exception_handler(lambda _, what: problems.append(what))
            cluster.scale(1)
            with pytest.raises(Refused, match="Invalid account"):
                await cluster.wait_for_workers(1)
            with pytest.raises(Refused, match="Invalid account"):
                await cluster.scale(1)
            gc.collect()
            assert not problems

    asyncio.run(work())


def test_a_cluster_closes_with_its_scheduler(folder: Path, capsys: pytest.CaptureFixture[str]):
    """It went on as if it ran, and submitted jobs that found no scheduler."""
    with make(folder, death_timeout="3s") as cluster:
        cluster.scale(2)
        cluster.wait_for_workers(2, timeout=180)
        Client(cluster.scheduler_address, security=cluster.security).shutdown()
        wait_for(lambda: cluster.status == Status.closed, 30, "the cluster to close")
        assert len(cluster.jobs()) == 2
        assert set(states(cluster)) <= OVER
        assert not keys(folder)
        for ask in (lambda: cluster.scale(1), cluster.adapt):
            with pytest.raises(UsageError, match="the scheduler was shut down"):
                ask()
        with pytest.raises(ClusterError, match="the scheduler was shut down"):
            cluster.wait_for_workers(1, timeout=180)
    assert capsys.readouterr().err.count("the scheduler was shut down") == 1


class Busy(LocalQueue):
    """Takes one job, and then no more until it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 1
        self.refused = 0

    async def submit(self, script: str, count: int) -> list[str]:
        if len(self._entries) + count > self.most:
            self.refused += 1
            raise Refused("QOSMaxSubmitJobPerUserLimit", for_now=True)
        return await super().submit(script, count)


@pytest.mark.long
def test_a_limit_of_the_site_keeps_what_runs_and_goes_on_later(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(submitter, "RETRY_S", (0.2, 0.4))
    queue = Busy()
    monkeypatch.setattr(hpcdask.LocalCUDAJobCluster, "_make_queue", lambda self, keywords: queue)
    with make(folder) as cluster, cluster.get_client() as client:
        cluster.scale(2)  # which is told nothing but a warning
        client.wait_for_workers(1, timeout=180)
        tried = queue.refused
        wait_for(lambda: queue.refused > tried + 1, 30, "two more attempts")
        assert cluster.failure is None
        assert len(cluster.jobs()) == 1
        assert client.submit(sum, [1, 2]).result(timeout=180) == 3
        queue.most = 2
        client.wait_for_workers(2, timeout=180)
    said = capsys.readouterr().err
    told = "warning: QOSMaxSubmitJobPerUserLimit. 1 of 2 jobs are there; trying again later"
    assert said.count("QOSMaxSubmitJobPerUserLimit") == said.count(told) == 1


def test_one_idle_sample_cancels_nothing(folder: Path):
    """A burst's work comes with pauses, and jobs wait for hours."""
    samples: list[int] = []

    class Sampled(scaling.JobAdaptive):
        async def safe_target(self) -> int:
            samples.append(len(cluster.jobs()))
            return 2 if len(samples) % 3 else 0

    with make(folder) as cluster:
        cluster.adapt(minimum=0, maximum=2, interval="50ms", Adaptive=Sampled)
        wait_for(lambda: len(samples) > 12, 30, "four idle samples")
        assert len(cluster.jobs()) == 2
        assert not any(job.cancelled or job.leaving for job in cluster.jobs())


def test_workers_that_do_not_connect_in_time_are_told_so(folder: Path):
    prologue = ["exec sleep 100"]
    keywords = {"job_script_prologue": prologue, "start_timeout": "1s", "poll_interval": 0.1}
    with make(folder, **keywords) as cluster:
        cluster.scale(1)
        with pytest.raises(JobsFailed, match=r"3 jobs in a row brought no workers") as error:
            cluster.wait_for_workers(1, timeout=180)
        last = cluster.jobs()[-1].id
        told = f"job {last}: its workers did not connect within 1 s (start_timeout)"
        assert told in str(error.value)
        assert "exit code" not in str(error.value)


def test_a_close_that_was_given_up_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Such as by Ctrl-C: nothing could end the jobs then before the notebook's end."""
    end_jobs = LocalQueue.cancel
    let_go = threading.Event()

    async def cancel(self, ids) -> None:
        await asyncio.to_thread(let_go.wait, 60)
        await end_jobs(self, ids)

    monkeypatch.setattr(LocalQueue, "cancel", cancel)
    with make(folder) as cluster:
        cluster.scale(1)
        with pytest.raises(TimeoutError):
            cluster.close(timeout=0.3)
        assert keys(folder)
        let_go.set()
        cluster.close()
        assert cluster.status == Status.closed
        assert states(cluster) == [JobState.CANCELLED]
        assert not keys(folder)


@pytest.mark.long
def test_a_queue_that_does_not_answer_is_asked_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """One bad minute of a long run ended the cluster, and failed what waited for workers."""
    take = LocalQueue.submit
    answers = iter([True, False, False, True])

    async def submit(self, script: str, count: int) -> list[str]:
        if next(answers):
            return await take(self, script, count)
        raise NoAnswer("sbatch did not answer")

    monkeypatch.setattr(LocalQueue, "submit", submit)
    monkeypatch.setattr(submitter, "RETRY_S", (0.2, 1.0))
    with make(folder) as cluster, cluster.get_client() as client:
        monkeypatch.setattr(cluster.controller.groups[""]._submitter, "_retry_s", 0.2)
        cluster.scale(1)
        client.wait_for_workers(1, timeout=180)
        cluster.scale(1)  # which has nothing to submit, and nobody waits for it any more
        (job,) = cluster.jobs()
        asyncio.run(cluster.queue.cancel([job.id]))
        wait_for(lambda: len(cluster.jobs()) == 2, 30, "another job")
        assert client.submit(sum, [1, 2]).result(timeout=180) == 3
        assert cluster.failure is None
    said = capsys.readouterr().err
    assert said.count("sbatch did not answer. 0 of 1 jobs are there; trying again later") == 1


async def enter(cluster: hpcdask.LocalCUDAJobCluster) -> None:
    async with cluster:
        pass


async def wait(cluster: hpcdask.LocalCUDAJobCluster) -> None:
    await cluster


@pytest.mark.parametrize("start", [enter, wait])
def test_an_asynchronous_start_that_fails_leaves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, start: Callable
):
    async def refuse(self, script: str, count: int) -> list[str]:
        raise Refused("Invalid account")

    async def work() -> None:
        before = set(psutil.Process().children())
        cluster = make(folder, n_workers=1, asynchronous=True)
        with pytest.raises(Refused, match="Invalid account"):
            await start(cluster)
        assert cluster.status == Status.closed
        assert cluster.scheduler.status == Status.closed
        assert not keys(folder)
        assert set(psutil.Process().children()) <= before

    monkeypatch.setattr(LocalQueue, "submit", refuse)
    asyncio.run(work())


@pytest.mark.slow
@pytest.mark.parametrize("how", ["scale", pytest.param("adapt", marks=pytest.mark.long)])
def test_work_longer_than_the_walltime(folder: Path, how: str):
    """Of many Dask tasks, it goes on."""
    limit = max(24, stretched(12))  # time for a new job to come and take over
    with make(folder, walltime=f"{limit}s") as cluster, cluster.get_client() as client:
        if how == "scale":
            cluster.scale(2)
        else:
            cluster.adapt(minimum=2, maximum=2, interval="100ms")
        client.wait_for_workers(2, timeout=180)
        start = time.monotonic()
        first = client.map(lambda number: (number, os.urandom(4)), range(8), pure=False)
        known = client.gather(first)
        count = 4 * limit + 8  # for longer than the limit, two at a time
        futures = client.map(lambda number: time.sleep(0.5) or number, range(count), pure=False)
        assert sum(client.gather(futures)) == sum(range(count))
        assert time.monotonic() - start > limit
        # results moved from job to job before the limit, whose processes may end after it
        assert client.gather(first) == known
        assert cluster.failure is None
        # none is cancelled that came to take over, of which there may be some each 9 s
        assert len(cluster.jobs()) <= 2 * (2 + (time.monotonic() - start) / 9)


@pytest.mark.long
@pytest.mark.slow
def test_a_task_longer_than_the_walltime_ends_with_an_error(folder: Path):
    walltime = f"{max(8, stretched(4))}s"
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 1}),
        make(folder, walltime=walltime, n_workers=1) as cluster,
        cluster.get_client() as client,
    ):
        with pytest.raises(KilledWorker):
            client.submit(time.sleep, 3600).result(timeout=600)
        assert cluster.failure is None


NOTEBOOK = """
import sys, time
from hpcdask import LocalCUDAJobCluster
cluster = LocalCUDAJobCluster(**eval(sys.argv[1]))
cluster.scale(2)
cluster.wait_for_workers(2, timeout=180)
print("here", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("how", [pytest.param("SIGTERM", marks=pytest.mark.long), "SIGKILL"])
def test_no_job_outlives_its_notebook(folder: Path, tmp_path: Path, how: str):
    program = tmp_path / "notebook.py"
    program.write_text(NOTEBOOK)
    keywords = repr({**ONE, "shared_temp_directory": str(folder)})
    notebook = subprocess.Popen(
        [sys.executable, program, keywords],
        env=clean_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert notebook.stdout is not None
    assert notebook.stdout.readline() == "here\n"
    notebook.send_signal(signal.Signals[how])
    notebook.communicate(timeout=PATIENCE * 30)
    assert notebook.returncode == -signal.Signals[how]
    # the fixture waits for the jobs, their processes and the keys to be gone


def run_with_keywords(text: str, folder: Path, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """Run a program whose argument is the keywords of a cluster in this folder."""
    program = tmp_path / "program.py"
    program.write_text(text)
    return subprocess.run(
        [sys.executable, program, repr({**ONE, "shared_temp_directory": str(folder)})],
        env={**clean_environment(), "PYTHONPATH": str(Path(__file__).parents[1])},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE * 60,
    )


ENDING = """
import atexit, sys
from hpcdask import LocalCUDAJobCluster
cluster = LocalCUDAJobCluster(**eval(sys.argv[1]))
client = cluster.get_client()
cluster.scale(1)
client.wait_for_workers(1, timeout=180)
atexit.register(lambda: print(cluster.status.name, client.status))
"""


@pytest.mark.long
def test_what_a_program_does_at_its_end_has_the_cluster(folder: Path, tmp_path: Path):
    done = run_with_keywords(ENDING, folder, tmp_path)
    assert done.stdout == "running running\n", done.stderr
    assert not done.stderr


FORKING = """
import os, sys, warnings
from clock import clock
from hpcdask import LocalCUDAJobCluster
cluster = LocalCUDAJobCluster(**eval(sys.argv[1]))
start = clock()
warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of every such fork
if not (child := os.fork()):
    sys.exit(3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), clock() - start < 5)
print(os.path.exists(cluster.scheduler.local_directory), cluster.status.name)
cluster.close()
"""


@pytest.mark.long
def test_a_forked_child_leaves_the_cluster_alone(folder: Path, tmp_path: Path):
    """Its end took 10 s, and removed what the scheduler has on disk."""
    done = run_with_keywords(FORKING, folder, tmp_path)
    assert done.stdout == "3 True\nTrue running\n", done.stderr
    assert not done.stderr


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"memory": "lots"}, "memory: 'lots' is not an amount of memory"),
        (
            {"memory": "1GB", "processes": 16, "cores": 16},
            "a job's memory of 1,000,000,000 bytes is 62,500,000 for each of its 16 workers",
        ),
        ({"walltime": "soon"}, "walltime"),
        ({"interface": "ib7"}, "no interface ib7 with an IPv4 address. It has: .*lo"),
        (
            {"gpus_per_job": 2, "job_extra_directives": ["--gres=gpu:1"]},
            "gpus_per_job=2 and the directive '--gres=gpu:1' both request GPUs",
        ),
        ({"gpus_per_job": -1}, "gpus_per_job=-1 is not a number of GPUs"),
        ({"gpus_per_job": 0, "device": "cuda"}, "need at least one"),
        ({"gpus_per_job": 3, "nodes_per_job": 2}, "cannot be shared evenly"),
        ({"colour": "red"}, "unknown keyword colour"),
        ({"worker_command": "dask_cuda.cli"}, "takes the place of dask_cuda.cli"),
        ({"nanny": False}, "every worker has a nanny"),
        ({"worker_extra_args": ["--colour", "red"]}, "worker_extra_args: .*--colour"),
        ({"worker_extra_args": ["--name", "ann"]}, "named after their jobs"),
        ({"host": "10.0.0.1"}, "belongs to the scheduler: scheduler_options"),
        ({"cores": 0}, "cores=0"),
        ({"poll_interval": -1}, "poll_interval: -1 is not a time. Accepted: 90s"),
        ({"poll_interval": timedelta(0)}, "poll_interval: 0.0 is not a time"),
        ({"start_timeout": "nan"}, "start_timeout: 'nan' is not a time"),
        ({"memory": 0}, "memory: 0 is not an amount of memory for a job. Accepted: .*bytes$"),
        ({"memory": "auto"}, "memory: 'auto' is not an amount of memory for a job"),
        (
            {"job_extra_directives": "--qos=x"},
            re.escape("job_extra_directives='--qos=x' is a text: give a list, ['--qos=x']"),
        ),
        ({"n_workers": -1}, "n_workers=-1 is not a number of workers: 0, 1, 2, …"),
        ({"n_workers": "2"}, "n_workers='2' is not a number of workers"),
        ({"nodes_per_job": "2"}, "nodes_per_job='2' is not a number of nodes: 1, 2, 3, …"),
    ],
)
def test_bad_input_starts_nothing(folder: Path, keywords: dict, message: str):
    with pytest.raises(UsageError, match=message):
        make(folder, **keywords)
    assert not folder.exists()


def test_directives_written_for_dask_jobqueue_count(folder: Path):
    keywords = {"device": "auto", "cores": 8, "memory": "8GiB", "shared_temp_directory": folder}
    keywords |= {"job_extra_directives": ["--gres=gpu:a100:4"]}
    with hpcdask.SLURMCUDACluster(**keywords) as cluster:
        script = cluster.job_script()
        assert script.count("gpu") == 1
        assert "#SBATCH --gres=gpu:a100:4\n" in script
        assert "--workers 4" in script


def test_a_comment_of_ones_own_is_replaced_and_told(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    keywords = {"cores": 8, "memory": "8GiB", "shared_temp_directory": folder}
    keywords |= {"job_extra_directives": ["--qos=x", "--comment mine"]}
    with hpcdask.SLURMCUDACluster(**keywords) as cluster:
        script = cluster.job_script()
        assert script.index("--comment mine") < script.index('--comment="hpcdask:')
    said = capsys.readouterr().err.splitlines()
    (line,) = [line for line in said if "comment" in line]
    assert line.startswith("hpcdask: warning: the directive '--comment mine' has no effect")


@pytest.mark.parametrize(
    ("directive", "workers"),
    [
        ("--gres=nvme:500,gpu:4", 4),
        ("--gpus-per-node=a100:2", 2),
        ("-G 6", 3),
        ("--gres=nvme:500 -G 6", 3),
    ],
)
def test_directives_for_each_of_two_nodes(folder: Path, directive: str, workers: int):
    keywords = {"cores": 8, "memory": "8GiB", "shared_temp_directory": folder, "nodes_per_job": 2}
    keywords |= {"job_extra_directives": [directive]}
    with hpcdask.SLURMCUDACluster(**keywords) as cluster:
        assert f"--workers {workers}" in cluster.job_script()  # of one node


def test_a_local_job_of_several_nodes_is_refused(folder: Path):
    with pytest.raises(UsageError, match="nodes_per_job=2: jobs of several nodes are for SLURM"):
        make(folder, nodes_per_job=2)


def test_bad_numbers_submit_nothing(folder: Path):
    with make(folder) as cluster:
        with pytest.raises(UsageError, match="minimum of 3 workers is above the maximum of 2"):
            cluster.adapt(minimum=3, maximum=2)
        with pytest.raises(UsageError, match="-1 is not a number of workers"):
            cluster.scale(-1)
        assert not cluster.jobs()
    with pytest.raises(UsageError, match="closed"):
        cluster.scale(1)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"n": "2"}, "scale: n='2' is not a number of workers: 0, 1, 2, …"),
        ({"n": 1.5}, "scale: n=1.5 is not a number of workers"),
        ({"jobs": "2"}, "scale: jobs='2' is not a number of jobs"),
        ({"cores": -4}, "scale: cores=-4 is not a number of cores"),
    ],
)
def test_scale_takes_numbers_only(folder: Path, keywords: dict, message: str):
    with make(folder) as cluster:
        with pytest.raises(UsageError, match=re.escape(message)):
            cluster.scale(**keywords)
        assert not cluster.jobs()


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"interval": "soon"}, "interval: 'soon' is not a time"),
        ({"target_duration": 0}, "target_duration: 0 is not a time"),
        ({"minimum": -1}, "adapt: minimum=-1 is not a number of workers: 0, 1, 2, …"),
        ({"minimum_jobs": -1}, "adapt: minimum_jobs=-1 is not a number of jobs"),
        ({"maximum": "2"}, "adapt: maximum='2' is not a number of workers"),
        ({"maximum": 1}, "adapt: the maximum of 1 workers is less than a job, which has 2"),
        ({"maximum_memory": "1MB"}, "is less than a job, which has 2"),
        (
            {"minimum": 3, "maximum": 3},
            "minimum of 4 workers is above the maximum of 2, in whole jobs",
        ),
    ],
)
def test_a_bad_option_of_adapt_is_told_and_forgotten(folder: Path, keywords: dict, message: str):
    with make(folder, processes=2, cores=2) as cluster:
        with pytest.raises(UsageError, match=re.escape(message)):
            cluster.adapt(**keywords)
        assert cluster.adapt(maximum=2).maximum == 2


def test_adapt_counts_in_whole_jobs(folder: Path):
    """A maximum of 3 workers in jobs of 2 became two jobs, which are 4."""
    with make(folder, processes=2, cores=2) as cluster:
        adaptive = cluster.adapt(minimum=1, maximum=3)
        assert (adaptive.minimum, adaptive.maximum) == (2, 2)
        adaptive = cluster.adapt(maximum_jobs=2)
        assert (adaptive.minimum, adaptive.maximum) == (0, 4)
        assert cluster.adapt(maximum=0).maximum == 0
    with make(folder, cores=49) as cluster:  # 98 times 1/49 is less than 2
        assert cluster.adapt(maximum_cores=98).maximum == 2


def test_importing_dask_jobqueue_leaves_ctrl_c_alone(folder: Path):
    before = signal.getsignal(signal.SIGINT)
    with make(folder):
        assert signal.getsignal(signal.SIGINT) is before


def test_nothing_of_the_current_folder_goes_before_what_is_installed(tmp_path, monkeypatch):
    """A stranger may have put it there; what lies there alone is found all the same."""
    put_modules(tmp_path, "hpcdask", "distributed", "yaml", "multiprocessing")
    (tmp_path / "only_here.py").write_text("ANSWER = 42")
    monkeypatch.setenv("OWNED", str(tmp_path / "owned"))
    monkeypatch.chdir(tmp_path)

    def answer() -> int:
        import only_here

        return only_here.ANSWER

    folder = tmp_path / "clusters"
    with (
        hpcdask.LocalCUDAJobCluster(
            1,
            device="cpu",
            cores=1,
            memory="1GiB",
            shared_temp_directory=str(folder),
            scheduler_options={"dashboard": False, "dashboard_address": ":0"},
        ) as cluster,
        cluster.get_client() as client,
    ):
        assert client.submit(answer).result(timeout=60) == 42
        path = cluster.scheduler.local_directory
        assert os.stat(Path(path).parents[0]).st_uid == os.getuid()
        assert f"hpcdask-{os.getuid()}-" in path
    assert not Path(path).exists()
    assert not (tmp_path / "owned").exists()
