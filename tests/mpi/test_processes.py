"""The processes of a rank: which of them end with it, and which it does without."""

from __future__ import annotations

import json
import os
import signal

import psutil
import pytest

from launching import wait_for
from running import Site, under

START = """
import os, subprocess, sys, time
from distributed import Client, WorkerPlugin
from distributed.client import FutureCancelledError
client = Client()
def show(name, value):
    print(name, value, flush=True)
"""


@under("alone")
def test_another_session_outlives_a_rank_that_is_killed(site: Site):
    """As a job that the program has submitted, on the same node, or a terminal multiplexer."""
    body = """
quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
other = subprocess.Popen(["sleep", "300"], start_new_session=True, **quiet)
own = subprocess.Popen(["sleep", "300"])
show("ready", [other.pid, own.pid])
time.sleep(300)
"""
    run = site.start(program=START + body, n=1)
    other, own = map(psutil.Process, json.loads(run.line("ready")))
    run.signal(signal.SIGKILL)
    run.end()
    wait_for(lambda: not own.is_running() or own.status() == "zombie", 30, "its child to end")
    assert other.is_running()
    other.kill()
    site.check_nothing_left()


@under("alone")
def test_a_run_in_a_run_ends_with_it(site: Site):
    (site.folder / "inner.py").write_text(f"{START}print('inner', flush=True); time.sleep(300)")
    body = """
subprocess.run([sys.executable, "-m", "hpcdask.run", "--device", "cpu", "inner.py"])
"""
    run = site.start(program=START + body, n=1)
    run.line("inner", timeout=60)
    run.signal(signal.SIGKILL)
    run.end()
    site.check_nothing_left()


@under("alone")
@pytest.mark.parametrize("which", ["janitor", "fork server"])
def test_a_run_goes_on_without(which: str, site: Site):
    """Regression: without its fork server the exit code was 255."""
    body = """
show("ready", 1)
while not os.path.exists("go"):
    time.sleep(0.05)
client.restart()
total = None
while total is None:
    try:
        total = client.submit(sum, [1, 2]).result()
    except FutureCancelledError:  # distributed told of the restart only after it
        pass
assert total == 3
"""
    run = site.start(program=START + body, n=1)
    run.line("ready")
    children = psutil.Process(run.process.pid).children()
    known = {
        "janitor": lambda one: os.getsid(one.pid) == one.pid,
        "fork server": lambda one: "forkserver" in " ".join(one.cmdline()),
    }
    (process,) = filter(known[which], children)
    process.kill()
    (site.folder / "go").touch()
    run.end(code=0)
    site.check_nothing_left()


@under("alone")
def test_a_killed_agent_is_told_also_if_it_has_not_read_a_signal(site: Site):
    run = site.start("--scheduler-file", "cluster.json")
    run.line("hpcdask: scheduler at", stream="err", timeout=60)
    file = json.loads((site.folder / "cluster.json").read_text())
    agent = psutil.Process(file["hpcdask"]["pid"])
    agent.suspend()
    run.signal(signal.SIGTERM)
    agent.kill()
    ended = run.end(code=1)
    assert "the process that manages the workers of" in ended.err
    assert "was killed by SIGKILL" in ended.err
    site.check_nothing_left()


def test_the_end_of_a_run_waits_for_teardowns(site: Site):
    """Regression: after two seconds workers were killed, and what they wrote was cut off."""
    body = """
class Writes(WorkerPlugin):
    def setup(self, worker):
        self.name = worker.name
    async def teardown(self, worker):
        import asyncio
        await asyncio.sleep(3)
        with open(f"written-{self.name}", "w") as file:
            file.write("all")
client.register_plugin(Writes())
"""
    site.run(program=START + body)
    assert [path.read_text() for path in site.folder.glob("written-*")] == ["all"] * 2


@under("alone")
def test_memory_of_slurm_and_what_a_program_starts(site: Site):
    """The limit of the workers is what SLURM grants for each GPU: no cgroup confines memory here.

    What a program starts, such as a job that it submits, does not connect to its cluster.
    """
    body = """
show("names", [name for name in os.environ if name.startswith(("DASK_", "HPCDASK_SCHEDULER"))])
assert client.submit(sum, [1, 2]).result() == 3
assert Client().submit(sum, [1, 2]).result() == 3
workers = client.scheduler_info()["workers"].values()
show("MiB", sum(worker["memory_limit"] for worker in workers) >> 20)
"""
    env = {"SLURM_JOB_ID": "7", "SLURM_MEM_PER_GPU": "700", "SLURM_GPUS_ON_NODE": "2"}
    ended = site.run(program=START + body, n=1, env=env)
    assert "names []" in ended.out
    assert 1390 <= ended.told("MiB") <= 1400, str(ended)
