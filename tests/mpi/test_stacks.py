"""`hpcdask stacks`: dead-locks made on purpose are named, whoever of the run still answers."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import deadlocks
from clock import PATIENCE
from hanging import Hanging, hanging_run
from hpcdask.stacks.diagnose import diagnose
from launching import openmpi_launcher, wait_for

pytestmark = [pytest.mark.mpi, pytest.mark.slow]
SIZE = 3


@pytest.fixture(scope="module")
def whole() -> Iterator[Hanging]:
    options = ("--memory-limit", "600MB", "--nthreads", "2")
    with hanging_run(openmpi_launcher(), SIZE, *options, device="cpu") as hanging:
        yield hanging


@pytest.fixture
def hanging(whole: Hanging) -> Iterator[Hanging]:
    """The run, whose workers start anew after each test."""
    yield whole
    whole.start_anew(SIZE)


@pytest.mark.long
def test_locks_of_dask_that_two_tasks_want_in_two_orders(hanging: Hanging):
    pairs = [("a.there", "b.there"), ("b.there", "a.there")]
    tasks = [
        hanging.client.submit(deadlocks.cluster_locks, *pair, workers=[name], pure=False)
        for pair, name in zip(pairs, hanging.workers, strict=False)
    ]
    hanging.wait_until_there("a.there", "b.there")
    report, text = hanging.look(likely="2 Dask tasks wait for a lock of Dask")
    assert "deadlocks.py" in diagnose(report)[0]
    assert "'a.there' (1 waits)" in diagnose(report)[0]
    assert "each most likely holds what another wants" in diagnose(report)[0]
    which = f"2 workers ({', '.join(hanging.workers[:2])}): 2 Dask tasks, such as cluster_locks-"
    assert which in text, text
    assert "  cluster_locks (" in text, text
    assert f"1 worker ({hanging.workers[2]}): run no Dask task" in text
    del tasks


@pytest.mark.long
def test_locks_of_a_process_that_two_threads_want_in_two_orders(hanging: Hanging):
    names = ["inner.there", "outer.there"]
    tasks = hanging.client.map(deadlocks.process_locks, names, workers=hanging.workers[:1])
    hanging.wait_until_there(*names)
    report, _ = hanging.look(likely="2 Dask tasks on ")
    where = f"{hanging.workers[0]} wait for a lock of the worker's process at process_locks ("
    assert where in diagnose(report)[0]
    del tasks


def test_a_rank_that_never_comes_to_the_barrier_of_its_gang(hanging: Hanging):
    with hanging.gang("barrier", SIZE):
        likely = f"A gang of {SIZE} is in a dead-lock: ranks 0-1 at come_to_"
        report, text = hanging.look(likely=likely)
        assert "rank 2 at" in diagnose(report)[0], text
        assert not report.unreached


@pytest.mark.long
def test_workers_that_are_full(hanging: Hanging):
    """Each of them holds what Dask does not know of, above the limit at which it pauses."""
    full = hanging.client.map(deadlocks.full, [0.87 + i / 1000 for i in range(SIZE)], pure=False)
    wait_for(lambda: {one["status"] for one in hanging.infos()} == {"paused"}, 60, "a pause")
    more = hanging.client.map(deadlocks.nothing, range(10))
    report, text = hanging.look(likely=f"Workers {', '.join(hanging.workers)} are full and paused")
    assert f"{SIZE} workers" in text
    assert report.work["states"].keys() & {"no-worker", "queued", "waiting", "processing"}
    hanging.client.run(deadlocks.forget)
    del full, more


@pytest.mark.long
def test_a_worker_that_is_stopped(hanging: Hanging):
    name = hanging.workers[1]
    (address,) = (one for one, its in hanging.addresses().items() if its == name)
    worker = psutil.Process(hanging.client.run(os.getpid)[address])
    worker.suspend()
    try:
        report, text = hanging.look(likely=f"Worker {name} on {socket.gethostname()} is stopped")
        assert f"1 worker ({name}): are stopped" in text
        assert f"kill -CONT {worker.pid}" in text
        assert not report.unreached
    finally:
        worker.resume()


def test_a_loop_in_c_that_holds_python_s_lock(hanging: Hanging):
    task = hanging.client.submit(deadlocks.compiled, "c.there", workers=hanging.workers[:1])
    hanging.wait_until_there("c.there")
    report, text = hanging.look(likely=f"Worker {hanging.workers[0]} is in a loop of compiled code")
    assert "compiled (" in diagnose(report)[0]
    assert "deadlocks.py" in diagnose(report)[0]
    assert f"(Dask task {task.key}" in diagnose(report)[0]
    assert f"1 worker ({hanging.workers[0]}): do not answer, Dask task {task.key}" in text


def test_a_scheduler_that_does_not_answer(hanging: Hanging):
    """All the same, workers and what they do are there, and the scheduler's line."""
    task = hanging.client.submit(deadlocks.works, "w.there", workers=hanging.workers[:1])
    hanging.wait_until_there("w.there")
    path = Path(hanging.site.folder / "s.there")

    def stick(dask_scheduler: object) -> None:
        import time

        path.touch()
        while path.exists():
            time.sleep(0.1)

    client = hanging.client
    client.loop.add_callback(client.run_on_scheduler, stick, asynchronous=True)
    hanging.wait_until_there("s.there")
    report, text = hanging.look(likely="The scheduler's event loop does not answer: it is at stick")
    assert not report.work
    assert "scheduler: no answer within" in text
    assert f"Dask task {task.key} for " in text
    path.unlink()


def test_the_command(hanging: Hanging):
    done = subprocess.run(
        [sys.executable, "-m", "hpcdask", "stacks", hanging.file],
        capture_output=True,
        text=True,
        timeout=PATIENCE * 60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{hanging.file}: {SIZE} workers reached\n\nScheduler (process ")
    assert f"{SIZE} workers ({', '.join(hanging.workers)}): run no Dask task" in done.stdout
    assert done.stdout.endswith("Most likely:\n  - Nothing is known to be wrong\n")
