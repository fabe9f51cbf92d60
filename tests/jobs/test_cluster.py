"""Clusters of jobs with processes of this machine as the queue: the state machine of all."""

from __future__ import annotations

import asyncio
import gc
import json
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
from collections.abc import Callable
from pathlib import Path

import dask
import psutil
import pytest
from distributed import Client
from distributed.core import Status

import hpcdask
from clock import stretched
from hpcdask.clusters import controller
from hpcdask.errors import ClusterError, JobsFailed, QueueError, Refused, UsageError
from hpcdask.jobs.folder import ClusterFolder, list_clusters
from hpcdask.queues.job_state import OVER, JobState
from hpcdask.queues.local import LocalQueue
from hpcdask.stacks.diagnose import diagnose
from hpcdask.stacks.look import find, look
from launching import (
    decide_again,
    run_cli,
    wait_for,
    walk,
)
from slurm_login import pids, states
from strangers import put_modules

ONE = {"device": "cpu", "cores": 1, "processes": 1, "memory": "512MiB", "poll_interval": 0.3}


def keys(base: Path) -> list[Path]:
    return [path for path in walk(base) if path.name.endswith("keys")]


def make(folder: Path, **keywords) -> hpcdask.LocalCUDAJobCluster:
    return hpcdask.LocalCUDAJobCluster(**{**ONE, "shared_temp_directory": str(folder), **keywords})


@pytest.mark.parametrize("secure", [True, False])
def test_a_client_exchanges_data_with_the_workers_themselves(folder: Path, secure: bool):
    """The scheduler notes what it is asked to gather or to scatter."""
    security = {} if secure else {"security": False}
    with make(folder, **security) as cluster, Client(cluster) as client:
        cluster.scale(1)  # none was there to be tried
        wait_for(lambda: client.direct_to_workers, 180, "a worker to be reached")
        there = client.scatter([1, 2])
        assert sum(client.gather(there)) == 3
        assert not {event["action"] for _, event in client.get_events("all")} & {
            "gather",
            "scatter",
        }


def test_scale_up_and_down(folder: Path):
    on_ctrl_c = signal.getsignal(signal.SIGINT)
    prologue = ["export GREETING='it''s me'"]
    with make(folder, job_script_prologue=prologue) as cluster, cluster.get_client() as client:
        assert signal.getsignal(signal.SIGINT) is on_ctrl_c  # dask-jobqueue would set its own
        assert cluster.jobs() == ()
        assert not cluster.job_logs()
        preview = cluster.job_script()
        cluster.scale(2)
        (script,) = folder.glob("*/script.sh")
        assert script.read_text() == preview
        assert prologue[0] in preview
        submitted = ClusterFolder.open(script.parent).submitted()
        assert list(submitted) == [job.id for job in cluster.jobs()]
        assert len(cluster.jobs()) == 2  # there when `scale` returns

        def pages(dask_worker) -> str:
            return dask_worker.http_server.address

        client.wait_for_workers(2, timeout=180)
        assert client.submit(sum, [1, 2]).result(timeout=180) == 3
        wait_for(lambda: states(cluster) == [JobState.RUNNING] * 2, 10, "both to run")
        assert "2 running" in repr(cluster)
        assert "2 running" in cluster._repr_html_()

        def listed() -> bool:
            rows = json.loads(run_cli("list", "--jobs", "--json", "--folder", folder).stdout)
            jobs = {row["job"]: row["state"] for row in rows if row["cluster"] == cluster.id}
            return jobs == {job.id: "running" for job in cluster.jobs()}

        wait_for(listed, 20, "the list to say that both run")
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
        cluster.scale(0)  # though nobody is left to take the results
        wait_for(lambda: set(states(cluster)) == {JobState.COMPLETED}, 30, "all to end")
    logs = [path for path in walk(folder) if path.suffix == ".log"]
    assert logs
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in logs)


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


@pytest.mark.long
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


def test_a_worker_that_takes_too_much_memory_is_told_of_by_that(
    folder: Path, capfd: pytest.CaptureFixture[str]
):
    """Regression: the notebook read "killed by SIGKILL" and nothing of memory."""
    with make(folder, n_workers=1, memory="400MiB") as cluster, cluster.get_client() as client:
        client.wait_for_workers(1, timeout=180)
        taking = client.submit(lambda: (b"x" * 2**29, time.sleep(60))[1], pure=False)
        told: list[str] = []

        def heard() -> bool:
            told.append(capfd.readouterr().err)
            return "used more than its 400.00 MiB of memory (memory=" in "".join(told)

        wait_for(heard, 60, "the nanny's line")
        taking.cancel()


def test_several_workers_per_job_come_and_go_together(folder: Path):
    """`worker_extra_args` of dask-jobqueue reach them, too."""
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


@pytest.mark.long
def test_scale_in_an_event_loop_works_without_await_too(folder: Path):
    """`scale` of distributed's clusters does so, too."""

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


@pytest.mark.long
def test_a_cluster_closes_with_its_scheduler(folder: Path, capsys: pytest.CaptureFixture[str]):
    """Regression: it went on submitting jobs that found no scheduler."""
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
    """Regression: after Ctrl-C in `close` nothing ended the jobs before the notebook's end."""
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


def test_a_close_that_failed_can_be_repeated(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Regression: the second call returned without a word while jobs lived."""
    cancel, errors = LocalQueue.cancel, [QueueError("scancel did not answer")] * 100

    async def refuse(self, ids) -> None:
        if errors:
            raise errors.pop()
        await cancel(self, ids)

    monkeypatch.setattr(LocalQueue, "cancel", refuse)
    monkeypatch.setattr(controller, "CLOSE_S", 0.3)
    cluster = make(folder, job_script_prologue=["trap '' TERM; sleep 1000"])
    cluster.scale(1)
    with pytest.raises(QueueError, match="these jobs are still in the queue"):
        cluster.close()
    with pytest.raises(QueueError, match="these jobs are still in the queue"):
        cluster.close()
    errors.clear()
    monkeypatch.setattr(controller, "CLOSE_S", 60.0)
    cluster.close()
    assert cluster.status == Status.closed
    assert states(cluster) == [JobState.CANCELLED]
    assert [one.ended is None for one in list_clusters(folder)] == [False]


def test_a_refusal_is_raised_once_and_shown_by_all_views(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    async def refuse(self, script: str, count: int) -> list[str]:
        raise Refused("Invalid account")

    monkeypatch.setattr(LocalQueue, "submit", refuse)
    with pytest.raises(Refused, match="Invalid account") as error:
        make(folder, n_workers=1)
    assert len(error.traceback) < 7
    with make(folder) as cluster:
        with pytest.raises(Refused, match="Invalid account") as error:
            cluster.scale(1)
        assert len(error.traceback) < 7
        assert "Invalid account" not in capfd.readouterr().err
        assert "Invalid account" in repr(cluster)
        told = ClusterFolder.open(folder / cluster.id)
        wait_for(lambda: told.report().problem, 20, "it to be told")
        words = [sys.executable, "-m", "hpcdask", "list", "--json", "--folder", str(folder)]
        (row,) = json.loads(subprocess.check_output(words))
        assert row["why"] == "the cluster submits no more jobs: Invalid account"
        words[4] = "--jobs"
        shown = subprocess.run(words, capture_output=True, text=True, check=True)
        line = f"{cluster.id}: the cluster submits no more jobs: Invalid account"
        assert line in shown.stderr.splitlines()
        report = asyncio.run(look(find(cluster.id, str(folder))))
        assert "The cluster submits no more jobs: Invalid account" in diagnose(report)
        cluster.scale(0)
        wait_for(lambda: not told.report().problem, 20, "it to be over")


def test_what_is_told_at_the_start(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    """Of a link with a variable that is not set; regression: of a folder that all may write in."""
    (project := tmp_path / "project").mkdir()
    project.chmod(0o777)
    monkeypatch.chdir(project)
    link = "{NOT_SET_HERE}proxy/{port}/status"
    with dask.config.set({"distributed.dashboard.link": link}), make(folder) as cluster:
        assert re.search(r"dashboard http://127.0.0.1:\d+/status\)", repr(cluster))
        assert cluster.dashboard_link in repr(cluster)
    told = capfd.readouterr().err
    assert f"warning: workers import no modules from {project}" in told
    assert f"(mode 777): chmod o-w {project}" in told
    assert told.count("NOT_SET_HERE, which is not set here") == 1


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
def test_work_longer_than_the_walltime(folder: Path):
    """Of many Dask tasks, it goes on."""
    limit = max(24, stretched(12))  # time for a new job to come and take over
    with make(folder, walltime=f"{limit}s") as cluster, cluster.get_client() as client:
        cluster.scale(2)
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


def test_a_comment_of_ones_own_is_replaced_and_told(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    keywords = {"cores": 8, "memory": "8GiB", "shared_temp_directory": folder}
    keywords |= {"job_extra_directives": ["--qos=x", "--comment mine"]}
    with hpcdask.SLURMCUDACluster(**keywords) as cluster:
        script = cluster.job_script()
        assert script.index("--comment mine") < script.index("--comment=hpcdask:")
    said = capsys.readouterr().err.splitlines()
    (line,) = [line for line in said if "comment" in line]
    assert line.startswith("hpcdask: warning: the directive '--comment mine' has no effect")


def test_adapt_counts_in_whole_jobs_and_bad_numbers_submit_nothing(folder: Path):
    """Regression: a maximum of 3 workers in jobs of 2 became two jobs, which are 4."""
    with make(folder, processes=2, cores=2) as cluster:
        with pytest.raises(UsageError, match="-1 is not a whole number"):
            cluster.scale(-1)
        for keywords, message in [
            ({"interval": "soon"}, "interval: 'soon' is not a time"),
            ({"minimum": -1}, "adapt: minimum: -1 is not a whole number of at least 0"),
            (
                {"maximum": 1},
                "maximum of 1 workers there is no whole number of jobs, each of which",
            ),
            ({"maximum_memory": "200MB"}, "there is no whole number of jobs"),
            ({"minimum": 3, "maximum": 2}, "minimum of 3 and a maximum of 2 workers there is no"),
            ({"minimum": 3, "maximum": 3}, "minimum of 3 and a maximum of 3 workers there is no"),
        ]:
            with pytest.raises(UsageError, match=re.escape(message)):
                cluster.adapt(**keywords)
        for keywords, bounds in [
            ({"minimum": 1, "maximum": 3}, (2, 2)),
            ({"maximum_jobs": 2}, (0, 4)),
            ({"maximum": 0, "interval": "2 s", "target_duration": 3, "wait_count": 1}, (0, 0)),
        ]:
            adaptive = cluster.adapt(**keywords)
            assert (adaptive.minimum, adaptive.maximum) == bounds
        assert (adaptive.wait_count, adaptive.interval) == (1, 2)
        assert not cluster.jobs()
    with pytest.raises(UsageError, match="closed"):
        cluster.scale(1)
    with make(folder, cores=49) as cluster:  # 98 times 1/49 is less than 2
        assert cluster.adapt(maximum_cores=98).maximum == 2


def test_nothing_of_the_current_folder_goes_before_what_is_installed(tmp_path, monkeypatch):
    """A stranger may have put modules there; those that are nowhere else are still found."""
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
