"""`python -m hpcdask.worker`, as a job of a queue runs it: workers, their end, the exit code."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil
import pytest
from distributed import Client, LocalCluster, get_worker, wait

from hpcdask import security
from hpcdask.spec import to_argv
from launching import wait_for
from running import Running, Site, no_launcher

FAKES = Path(__file__).parents[1] / "fakes"
SCHEDULER = """
import sys
from distributed import LocalCluster
from hpcdask import security
access = security.to_security(security.load_credentials(sys.argv[1]))
cluster = LocalCluster(n_workers=0, security=access, protocol="tls://", host="127.0.0.1",
                       dashboard_address=":0")
print("at", cluster.scheduler_address, flush=True)
sys.stdin.read()
"""
QUEUE_VARIABLES = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NUM_NODES": "1"}


class JobSite(Site):
    """Where a test's jobs run, and what they need to reach the scheduler."""

    def __init__(self, keys: Path) -> None:
        super().__init__(no_launcher())
        self.keys = keys
        self.address = "tls://127.0.0.1:1"

    def job(
        self,
        *arguments: str,
        job: str | None = "4711_3",
        device: str = "cpu",
        env: Mapping[str, str] | None = None,
        **kwargs,
    ) -> Running:
        """Start what a job's script starts."""
        command = ["python", "-m", "hpcdask.worker", "--scheduler", self.address]
        command += ["--keys", str(self.keys), "--cluster", "ab12", "--device", device]
        identity = {"HPCDASK_JOB_ID": job} if job else {}
        process = self.launcher.popen(
            1,
            *command,
            *arguments,
            env={**self.env, **identity, **(env or {})},
            cwd=self.folder,
            **kwargs,
        )
        self._runs.append(Running(self, process))
        return self._runs[-1]

    def program(self, *command: str, **kwargs) -> Running:
        """Start another program of the test."""
        process = self.launcher.popen(1, *command, env=self.env, cwd=self.folder, **kwargs)
        self._runs.append(Running(self, process))
        return self._runs[-1]


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cluster") / "keys"
    security.save_credentials(security.create_credentials(), str(folder))
    return folder


@pytest.fixture
def site(keys: Path) -> Iterator[JobSite]:
    with JobSite(keys) as site:
        yield site


@pytest.fixture
def client(site: JobSite) -> Iterator[Client]:
    """A client of a scheduler in this process, where the site's jobs find it."""
    access = security.to_security(security.load_credentials(str(site.keys)))
    with (
        LocalCluster(
            n_workers=0,
            security=access,
            protocol="tls://",
            host="127.0.0.1",
            dashboard_address=":0",
            silence_logs="ERROR",
        ) as cluster,
        Client(cluster) as client,
    ):
        site.address = cluster.scheduler_address
        yield client


def names(client: Client) -> set[str]:
    return {worker["name"] for worker in client.scheduler_info(n_workers=-1)["workers"].values()}


def start_one(site: JobSite, client: Client, job: str, *arguments: str, **kwargs) -> Running:
    """Start a job, and wait until its first worker is there."""
    running = site.job(*arguments, job=job, **kwargs)
    running.wait_for(lambda: f"ab12-{job}-0-0" in names(client), f"the worker of job {job}")
    return running


def pid_of(client: Client, name: str) -> int:
    workers = client.scheduler_info(n_workers=-1)["workers"]
    address = next(address for address, worker in workers.items() if worker["name"] == name)
    return client.run(os.getpid, workers=[address])[address]


def counted(folder: Path) -> Callable[[int], int]:
    """A function that leaves a file for each time that it is computed."""

    def value(number: int) -> int:  # made here, so that it travels by value
        (folder / f"{number}-{time.time_ns()}").touch()
        return number

    return value


def end_of_one(running: Running, code: int, *lines: str) -> None:
    """Check how a job ended: its code, and the lines after the first."""
    ended = running.end()
    assert ended.code == code, ended
    assert not ended.foreign_lines, ended
    said = ended.err.splitlines()
    assert len(said) == 1 + len(lines), ended
    for line, part in zip(said[1:], lines, strict=True):
        assert part in line, ended
    if not any(other.process.poll() is None for other in running.site._runs):
        running.site.check_nothing_left(ended.at)


# Names, and the orderly end


def test_the_workers_of_a_job(site, client):
    job = site.job("--workers", "2", env={"HPCDASK_RESTARTS": "1"})
    expected = {"ab12-4711_3-1-0", "ab12-4711_3-1-1"}
    job.wait_for(lambda: names(client) == expected, "two workers")
    cores = len(os.sched_getaffinity(0))
    workers = client.scheduler_info(n_workers=-1)["workers"].values()
    assert {worker["nthreads"] for worker in workers} == {max(1, cores // 2)}
    assert len({worker["memory_limit"] for worker in workers}) == 1
    assert sum(client.gather(client.map(lambda x: x + 1, range(10)))) == 55
    ended_at = time.time()
    client.cluster.close()
    ended = job.end()
    assert ended.code == 0, ended
    line = f"hpcdask: job 4711_3 on {os.uname().nodename}: 2 workers on {cores} core"
    assert ended.err.startswith(line), ended
    assert ended.err.endswith(", tcp\n"), ended
    assert ended.err.count("\n") == 1, ended
    assert not ended.out
    site.check_nothing_left(ended_at, within=5)


@pytest.mark.parametrize("close", [True, False], ids=["closed", "only removed"])
def test_retired_workers_end_their_job(site, client, close):
    job = site.job("--workers", "2")
    job.wait_for(lambda: len(names(client)) == 2, "two workers")
    assert len(client.retire_workers(close_workers=close)) == 2
    end_of_one(job, 0)


def test_a_job_ends_as_a_whole_and_loses_nothing(site, client, tmp_path):
    job = start_one(site, client, "1", "--workers", "2", "--nthreads", "1")
    job.wait_for(lambda: len(names(client)) == 2, "two workers")
    values = client.map(counted(tmp_path), range(20))
    wait(values)
    start_one(site, client, "2", "--nthreads", "1")
    client.retire_workers(names=["ab12-1-0-1"], close_workers=True)
    end_of_one(job, 0, "worker ab12-1-0-1 ended, so job 1 ends as a whole")
    assert names(client) == {"ab12-2-0-0"}
    assert client.gather(values) == list(range(20))
    assert len(list(tmp_path.iterdir())) == 20


# The scheduler is not there


def test_no_scheduler_at_the_start(site):
    start = time.time()
    job = site.job("--death-timeout", "2s")
    end_of_one(job, 1, f"error: job 4711_3 on {os.uname().nodename}: no answer from the scheduler")
    assert time.time() - start < 15


def test_a_scheduler_that_does_not_know_the_keys(site, client, tmp_path):
    site.keys = tmp_path / "keys"
    security.save_credentials(security.create_credentials(), str(site.keys))
    end_of_one(site.job("--death-timeout", "3s"), 1, f"scheduler at {site.address}")


@pytest.fixture
def killable(site: JobSite) -> Running:
    """A scheduler in a process of its own."""
    running = site.program("python", "-c", SCHEDULER, str(site.keys), stdin=-1)
    site.address = running.line("at ")
    return running


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_a_killed_scheduler_ends_the_job(site, killable, busy):
    job = site.job("--workers", "2", "--death-timeout", "20s")
    access = security.to_security(security.load_credentials(str(site.keys)))
    with Client(site.address, security=access, asynchronous=False) as client:
        job.wait_for(lambda: len(names(client)) == 2, "two workers")
        if busy:
            tasks = [client.submit(time.sleep, 600, pure=False) for _ in range(2)]
            job.wait_for(lambda: any(client.processing().values()), "a busy worker")
        client.cluster = None
    shell = psutil.Process(killable.process.pid)
    (shell.children() or [shell])[0].kill()
    end_of_one(job, 1, f"error: job 4711_3 on {os.uname().nodename}: the scheduler at")
    if busy:
        del tasks


# Signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_hands_over(site, client, tmp_path, number):
    job = start_one(site, client, "1")
    values = client.map(counted(tmp_path), range(50))
    wait(values)
    start_one(site, client, "2")
    job.signal(number)
    end_of_one(job, 128 + number, "job 1 hands over what its workers hold")
    assert names(client) == {"ab12-2-0-0"}
    assert client.gather(values) == list(range(50))
    assert len(list(tmp_path.iterdir())) == 50


def test_what_nobody_can_take_waits_for_a_replacement(site, client, tmp_path):
    job = start_one(site, client, "1")
    value = client.submit(counted(tmp_path), 7)
    wait(value)
    job.signal(signal.SIGTERM)
    job.line("hpcdask: SIGTERM", stream="err")
    start_one(site, client, "2")
    end_of_one(job, 143, "SIGTERM")
    assert value.result() == 7
    assert len(list(tmp_path.iterdir())) == 1


def test_the_second_signal_ends_at_once(site, client):
    job = start_one(site, client, "1")
    value = client.submit(lambda: 7)
    wait(value)
    job.signal(signal.SIGTERM)
    job.line("hpcdask: SIGTERM", stream="err")
    time.sleep(0.4)  # what comes together counts once
    at = job.signal(signal.SIGTERM)
    ended = job.end()
    assert ended.code == 143
    site.check_nothing_left(at, within=5)
    del value


def test_a_signal_while_there_is_no_scheduler(site):
    job = site.job("--death-timeout", "60s")
    job.line("hpcdask: job", stream="err")
    job.signal(signal.SIGTERM)
    end_of_one(job, 143, "SIGTERM")
