"""`python -m hpcdask.worker`, as a job of a queue runs it: workers, their end, the exit code."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import struct
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path

import psutil
import pytest
from distributed import Client, LocalCluster, wait

from hpcdask import worker as job_options
from hpcdask.errors import ClusterError, UsageError
from hpcdask.node import job_agent
from hpcdask.queues import registry
from hpcdask.queues.registry import systems
from hpcdask.security import private
from hpcdask.security.credentials import (
    create_credentials,
    load_credentials,
    save_credentials,
    to_security,
)
from launching import needs, stand_in_gpus, wait_for
from running import Running, Site, no_launcher

HOST = os.uname().nodename
SCHEDULER = """
import sys
from distributed import LocalCluster
from hpcdask.security.credentials import load_credentials, to_security
access = to_security(load_credentials(sys.argv[1]))
cluster = LocalCluster(n_workers=0, security=access, protocol="tls://", host="127.0.0.1",
                       dashboard_address=":0")
print("at", cluster.scheduler_address, flush=True)
sys.stdin.read()
"""


class JobSite(Site):
    """Where a test's jobs run, and what they need to reach the scheduler."""

    def __init__(self, keys: Path) -> None:
        super().__init__(no_launcher())
        self.keys = keys
        self.address = "tls://127.0.0.1:1"

    def job(
        self,
        *arguments: str,
        job: str = "4711_3",
        device: str = "cpu",
        env: Mapping[str, str] | None = None,
    ) -> Running:
        """Start what a job's script starts."""
        command = ["python", "-m", "hpcdask.worker", "--scheduler", self.address]
        command += ["--keys", str(self.keys), "--cluster", "ab12", "--device", device]
        return self.popen(*command, *arguments, env={"HPCDASK_JOB_ID": job, **(env or {})})


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cluster") / "keys"
    save_credentials(create_credentials(), str(folder))
    return folder


@pytest.fixture
def site(keys: Path) -> Iterator[JobSite]:
    with JobSite(keys) as site:
        yield site


@pytest.fixture
def client(site: JobSite) -> Iterator[Client]:
    """A client of a scheduler in this process, where the site's jobs find it."""
    access = to_security(load_credentials(str(site.keys)))
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


def workers_of(client: Client) -> dict[str, dict]:
    """By address. The client's scheduler_info() is at times replaced by one without workers."""
    return client.sync(client.scheduler.identity, n_workers=-1)["workers"]


def names(client: Client) -> set[str]:
    return {worker["name"] for worker in workers_of(client).values()}


def start_one(site: JobSite, client: Client, job: str, *arguments: str, count: int = 1) -> Running:
    """Start a job, and wait until its workers are there."""
    running = site.job("--workers", str(count), *arguments, job=job)
    wait_until_up(running, client, *(f"ab12-{job}-0-{index}" for index in range(count)))
    return running


def wait_until_up(job: Running, client: Client, *workers: str) -> None:
    job.wait_for(lambda: {*workers} <= names(client), " ".join(workers))
    client.run(os.getpid, nanny=True)  # a nanny answers when its worker is up


def pid_of(client: Client, name: str) -> int:
    workers = workers_of(client)
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
    ended = running.end(code=code)
    assert not ended.foreign_lines, ended
    said = [line for line in ended.err.splitlines() if line.startswith("hpcdask: ")]
    for line, part in zip(said[1:], lines, strict=True):
        assert part in line, ended
    if not any(other.process.poll() is None for other in running.site.runs):
        running.site.check_nothing_left()


# Names, and the orderly end


@pytest.mark.long
def test_the_workers_of_a_job(site, client):
    """Without a queue and a GPU they compute on the CPU, and say so."""
    env = {"HPCDASK_RESTARTS": "1", "CUDA_VISIBLE_DEVICES": ""}
    job = site.job("--workers", "2", device="auto", env=env)
    wait_until_up(job, client, "ab12-4711_3-1-0", "ab12-4711_3-1-1")
    cores = len(os.sched_getaffinity(0))
    workers = workers_of(client).values()
    assert {worker["nthreads"] for worker in workers} == {max(1, cores // 2)}
    assert len({worker["memory_limit"] for worker in workers}) == 1
    assert all(client.run(gc.isenabled).values())  # it is off during the imports
    assert sum(client.gather(client.map(lambda x: x + 1, range(10)))) == 55
    client.cluster.close()
    ended = job.end(code=0)
    bare, line = [one for one in ended.err.splitlines() if one.startswith("hpcdask: ")]
    assert bare.startswith("hpcdask: no GPU here, so workers compute on the CPU"), ended
    start = f"hpcdask: job 4711_3 on {HOST}: 2 workers on {cores} core"
    assert line.startswith(start), ended
    assert line.endswith(", tcp"), ended
    assert not ended.out
    site.check_nothing_left()


@pytest.mark.long
def test_a_job_ends_as_a_whole_and_loses_nothing(site, client, tmp_path):
    job = start_one(site, client, "1", "--nthreads", "1", count=2)
    values = client.map(counted(tmp_path), range(20))
    wait(values)
    start_one(site, client, "2", "--nthreads", "1")
    client.retire_workers(names=["ab12-1-0-1"], close_workers=True)
    end_of_one(job, 0, "worker ab12-1-0-1 ended, so job 1 ends as a whole, with ab12-1-0-0")
    assert names(client) == {"ab12-2-0-0"}
    assert client.gather(values) == list(range(20))
    assert len(list(tmp_path.iterdir())) == 20


# The scheduler is not there


def test_no_scheduler_at_the_start(site):
    told = f"error: job 4711_3 on {HOST}: no answer from the scheduler at tls://127.0.0.1:1 within"
    end_of_one(site.job("--death-timeout", "1s"), 1, f"{told} 1 s: ")


@contextlib.asynccontextmanager
async def answering(answer: bytes) -> AsyncIterator[str]:
    """The address of a server that is none of Dask's."""

    async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            writer.write(answer)
            await reader.read(-1)
        finally:
            writer.close()

    async with await asyncio.start_server(meet, "127.0.0.1", 0) as server, asyncio.timeout(60):
        yield f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (b"", "no answer from the scheduler at .* within 0.5 s: TimeoutError. See"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "no answer from the scheduler at .* within 0.5 s: "),
        (struct.pack("<QQ", 1, 3) + b"\xc1ab", "no answer from the scheduler at .*: "),
    ],
)
async def test_what_answers_at_the_address_is_no_scheduler(answer: bytes, told: str):
    """Regression: the port of another program gave a traceback."""
    async with answering(answer) as address:
        with pytest.raises(ClusterError, match=told) as error:
            await job_agent.connect_to_scheduler(address, 0.5, {})
        assert "\n" not in str(error.value)
    gc.collect()  # distributed leaves the connection open


def test_a_scheduler_that_does_not_know_the_keys(site, client, tmp_path):
    site.keys = tmp_path / "keys"
    save_credentials(create_credentials(), str(site.keys))
    end_of_one(site.job("--death-timeout", "2s"), 1, f"scheduler at {site.address}")


def test_a_killed_scheduler_ends_the_job(site):
    scheduler = site.popen("python", "-c", SCHEDULER, str(site.keys), stdin=-1)
    site.address = scheduler.line("at ")
    job = site.job("--workers", "2", "--death-timeout", "20s")
    access = to_security(load_credentials(str(site.keys)))
    with Client(site.address, security=access) as client:
        job.wait_for(lambda: len(names(client)) == 2, "two workers")
        tasks = [client.submit(time.sleep, 600, pure=False)]
        job.wait_for(lambda: any(client.processing().values()), "one busy and one idle worker")
    shell = psutil.Process(scheduler.process.pid)
    (shell.children() or [shell])[0].kill()
    ended = job.end(code=1)  # distributed may print a closed stream before
    (error,) = ended.errors
    assert f"job 4711_3 on {HOST}: the scheduler at" in error
    site.check_nothing_left()
    del tasks


# Signals


def test_a_signal_hands_over(site, client, tmp_path):
    job = start_one(site, client, "1")
    values = client.map(counted(tmp_path), range(50))
    wait(values)
    start_one(site, client, "2")
    job.signal(signal.SIGINT)
    end_of_one(job, 130, "SIGINT: job 1 hands over what its workers hold")
    assert names(client) == {"ab12-2-0-0"}
    assert client.gather(values) == list(range(50))
    assert len(list(tmp_path.iterdir())) == 50


@pytest.mark.long
def test_what_nobody_can_take_waits_for_a_replacement(site, client, tmp_path):
    job = start_one(site, client, "1")
    value = client.submit(counted(tmp_path), 7)
    wait(value)
    job.signal(signal.SIGTERM)
    job.line("hpcdask: SIGTERM", stream="err")
    start_one(site, client, "2")
    end_of_one(job, 143, "SIGTERM: job 1 hands over what its workers hold")
    assert value.result() == 7
    assert len(list(tmp_path.iterdir())) == 1


def test_a_signal_while_there_is_no_scheduler(site):
    job = site.job("--death-timeout", "60s")
    job.line("hpcdask: job", stream="err")
    job.signal(signal.SIGTERM)
    end_of_one(job, 143, "SIGTERM")


SPILLS = """
import contextlib, os, time
def dask_setup(worker):
    if os.fork() == 0:
        while True:
            with contextlib.suppress(OSError):  # a folder above it goes at this moment
                os.makedirs(os.path.join(worker.local_directory, "spilled"), exist_ok=True)
            time.sleep(0.001)
"""


def test_what_outlives_the_workers_leaves_no_scratch_folder(site, client):
    """Regression: the folder was removed before such a process, which made it again."""
    preload = site.folder / "spills.py"
    preload.write_text(SPILLS)
    job = start_one(site, client, "1", "--preload", str(preload))
    job.signal(signal.SIGTERM)
    end_of_one(job, 143, "SIGTERM")


# Lost workers and jobs


def test_a_killed_worker_comes_back_under_its_name(site, client, tmp_path):
    job = start_one(site, client, "1", "--nthreads", "1", count=2)
    both = names(client)
    total = client.submit(sum, client.map(counted(tmp_path), range(100)))
    pid = pid_of(client, "ab12-1-0-1")
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not psutil.pid_exists(pid), 10, "the worker's death")
    job.wait_for(lambda: names(client) == both, "the worker again", timeout=60)
    assert pid_of(client, "ab12-1-0-1") != pid
    assert total.result() == sum(range(100))
    client.restart(timeout=180)
    assert names(client) == both
    assert len(client.retire_workers(close_workers=True)) == 2
    job.end(code=0)


def test_a_killed_job_leaves_nothing(site, client):
    job = site.job("--workers", "2")
    job.wait_for(lambda: len(names(client)) == 2, "two workers")
    tasks = [client.submit(time.sleep, 600, pure=False) for _ in range(2)]
    job.wait_for(lambda: any(client.processing().values()), "a busy worker")
    job.signal(signal.SIGKILL)
    job.end(code=-signal.SIGKILL)
    site.check_nothing_left()
    del tasks


# Bad input


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--no-such-option"], "No such option"),
        (["program.py"], "unexpected extra argument"),
        (["--workers", "0"], "--workers"),
        (["--nthreads", "none"], "--nthreads: 'none' is not a whole number"),
        (["--memory-limit", "much"], "--memory-limit: 'much' is not an amount of memory"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_options(keys, arguments, text):
    access = ["--scheduler", "tls://10.0.0.1:8786", "--keys", str(keys), "--cluster", "ab12"]
    with pytest.raises(UsageError) as error:
        job_options.parse([*access, *arguments])
    assert text in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--local-directory", "/dev/null/scratch"], "cannot write in /dev/null/scratch"),
        (["--keys", "/no/such/file"], "the key file /no/such/file is gone"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_bad_input_ends_before_anything_starts(site, arguments, text):
    ended = site.job(*arguments).end(code=2)
    assert len(ended.err.splitlines()) == 1, ended
    assert text in ended.errors[0], ended
    site.check_nothing_left()


# Devices

#: The GPUs here have no memory from which RMM could make a pool.
NO_POOL = ("--rmm-pool-size", "0")


@pytest.fixture
def gpus(tmp_path: Path) -> Iterator[Callable[..., dict[str, str]]]:
    """Make an environment with so many GPUs, which no other test has."""
    machine = f"GPU-{uuid.uuid4().hex}-"
    yield lambda count, **more: {**stand_in_gpus(tmp_path, count, machine), **more}
    for lock in Path(private.node_folder("gpus")).glob(f"hpcdask-{os.getuid()}-{machine}*.lock"):
        lock.unlink()


def devices_of(client: Client) -> dict[str, str]:
    """Each worker's name and the GPU that CUDA would show it."""
    found = client.run(
        lambda dask_worker: (dask_worker.name, os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    )
    return dict(found.values())


@needs("cuda")
def test_each_worker_has_a_gpu_of_its_own(site, client, gpus):
    """Regression: two threads that loaded a lazy module of CuPy waited for each other for ever."""
    env = gpus(2, SLURM_JOB_ID="4711")
    job = site.job("--workers", "2", *NO_POOL, device="auto", env=env)
    wait_until_up(job, client, "ab12-4711_3-0-0", "ab12-4711_3-0-1")
    shown = [gpu["uuid"] for gpu in json.loads(env["FAKE_NVML"])]
    assert devices_of(client) == {f"ab12-4711_3-0-{n}": shown[n] for n in range(2)}
    kinds = client.run(lambda: [type(one).__name__ for one in sys.modules.values()])
    assert not any("_LazyModule" in found for found in kinds.values())
    client.cluster.close()
    end = job.end(code=0)
    assert f"2 workers on 2 GPUs (Fake {shown[0]}, {shown[1]}), tcp" in end.err, end
    assert "visible" not in end.err


@needs("cuda")
def test_two_jobs_of_a_node_take_different_gpus(site, client, gpus):
    env = gpus(3)
    jobs = [site.job(*NO_POOL, job=str(n), device="cuda", env=env) for n in range(2)]
    for job in jobs:
        job.wait_for(lambda: len(names(client)) == 2, "a worker of each job")
    assert len(set(devices_of(client).values())) == 2
    line = jobs[0].line("hpcdask: 3 GPUs are visible to job 0, which needs 1: took", stream="err")
    assert line.startswith(devices_of(client)["ab12-0-0-0"])
    jobs[0].signal(signal.SIGKILL)
    jobs[0].end()
    # 1 free, 1 free again
    third = site.job("--workers", "2", *NO_POOL, job="2", device="cuda", env=env)
    wait_until_up(third, client, "ab12-2-0-0", "ab12-2-0-1")
    assert len(set(devices_of(client).values())) == 3


@needs("cuda")
@pytest.mark.parametrize(
    ("count", "workers", "device", "text"),
    [
        (0, "1", "cuda", "1 worker and no GPU here. This job (4711) got none: request them"),
        (1, "2", "auto", "2 workers and only 1 GPU here"),
    ],
)
def test_too_few_gpus(site, gpus, count, workers, device, text):
    more = {} if count else {"CUDA_VISIBLE_DEVICES": ""}
    env = gpus(count, SLURM_JOB_ID="4711", **more)
    ended = site.job("--workers", workers, device=device, env=env).end(code=2)
    assert len(ended.err.splitlines()) == 1, ended
    assert text in ended.errors[0], ended


# Several nodes


def test_only_slurm_starts_a_job_on_several_nodes(site, tmp_path):
    nodes = tmp_path / "nodes"
    nodes.write_text("node1\nnode1\nnode2\n")
    env = {"PBS_JOBID": "4711.server", "PBS_NODEFILE": str(nodes)}
    ended = site.job(job="4711.server", env=env).end(code=2)
    assert "it has 2 nodes, and only under SLURM" in ended.errors[0], ended


def of_jobs() -> set[str]:
    """Return the variables by which queueing systems name their jobs."""
    named = {name for system in systems().values() for name in (system.job, *system.parts)}
    return {*registry.FLUX, *named} - {""}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, (f"{HOST}-{os.getpid()}", 0)),
        ({"SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": "2"}, ("17", 2)),
        ({"PBS_JOBID": "17[3].server"}, ("17[3].server", 0)),
        ({"HPCDASK_JOB_ID": "17_3", "SLURM_JOB_ID": "19"}, ("17_3", 0)),
        ({"HPCDASK_JOB_ID": "17_3", "HPCDASK_RESTARTS": "1"}, ("17_3", 1)),
    ],
)
def test_the_identity_of_a_job(monkeypatch, environ, expected):
    for name in [*of_jobs(), "HPCDASK_JOB_ID", "HPCDASK_RESTARTS", "SLURM_RESTART_COUNT"]:
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert job_options.identity() == expected


async def test_a_scheduler_that_hangs_is_not_waited_for(monkeypatch, capsys):
    """Regression: a job stayed for 30 s after SIGTERM, when queues kill it."""
    monkeypatch.setattr(job_agent, "ANSWER_DEADLINE_S", 0.1)
    async with answering(b"") as address:
        assert await job_agent.hand_over(address, {}, ["a"]) == set()
    assert "does not take over what the workers hold: it does not answer" in capsys.readouterr().err
