"""The processes of a rank: which of them end with it, and which it does without."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import psutil
import pytest

from launching import wait_for
from running import Site

START = """
import os, subprocess, sys, time
from distributed import Client, WorkerPlugin
client = Client()
def show(name, value):
    print(name, value, flush=True)
"""


def program(site: Site, body: str) -> str:
    (site.folder / "program.py").write_text(START + body)
    return "program.py"


@pytest.mark.parametrize("site", ["alone"], indirect=True)
def test_another_session_outlives_a_rank_that_is_killed(site: Site):
    """As a job that the program has submitted, on the same node, or a terminal multiplexer."""
    body = """
quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
other = subprocess.Popen(["sleep", "300"], start_new_session=True, **quiet)
own = subprocess.Popen(["sleep", "300"])
show("ready", [other.pid, own.pid])
time.sleep(300)
"""
    run = site.start(program(site, body), n=1, find=False)
    other, own = map(psutil.Process, eval(run.line("ready")))
    run.signal(signal.SIGKILL)
    ended = run.end()
    wait_for(lambda: not own.is_running() or own.status() == "zombie", 30, "its child to end")
    assert other.is_running()
    other.kill()
    site.check_nothing_left(ended.at, within=30)


@pytest.mark.parametrize("site", ["alone"], indirect=True)
def test_a_run_in_a_run_ends_with_it(site: Site):
    (site.folder / "inner.py").write_text(f"{START}print('inner', flush=True); time.sleep(300)")
    body = """
subprocess.run([sys.executable, "-m", "hpcdask.run", "--device", "cpu", "inner.py"])
"""
    run = site.start(program(site, body), n=1, find=False)
    run.line("inner", timeout=60)
    run.signal(signal.SIGKILL)
    ended = run.end()
    site.check_nothing_left(ended.at, within=30)


@pytest.mark.parametrize("site", ["alone"], indirect=True)
def test_a_run_goes_on_without_its_janitor(site: Site):
    body = """
show("ready", 1)
while not os.path.exists("go"):
    time.sleep(0.05)
client.restart()
assert client.submit(sum, [1, 2]).result() == 3
"""
    run = site.start(program(site, body), n=1, find=False)
    run.line("ready")
    rank = psutil.Process(run.process.pid)
    (janitor,) = (one for one in rank.children() if os.getsid(one.pid) == one.pid)
    janitor.kill()
    (site.folder / "go").touch()
    ended = run.end()
    assert ended.code == 0, str(ended)
    site.check_nothing_left(ended.at)


@pytest.mark.parametrize("site", ["alone"], indirect=True)
def test_a_killed_agent_is_told_also_if_it_has_not_read_a_signal(site: Site):
    run = site.start("--scheduler-file", "cluster.json", "--device", "cpu")
    run.line("hpcdask: scheduler at", stream="err", timeout=60)
    file = json.loads((site.folder / "cluster.json").read_text())
    agent = psutil.Process(file["hpcdask"]["pid"])
    agent.suspend()
    run.signal(signal.SIGTERM)
    agent.kill()
    ended = run.end()
    assert ended.code == 1, ended
    assert "the process that manages the workers of" in ended.err
    assert "was killed by SIGKILL" in ended.err
    site.check_nothing_left(ended.at, within=30)


@pytest.mark.parametrize("site", ["openmpi"], indirect=True)
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
    ended = site.run(program(site, body), find=False)
    assert ended.code == 0, str(ended)
    assert [path.read_text() for path in Path(site.folder).glob("written-*")] == ["all"] * 2


@pytest.mark.parametrize("site", ["alone"], indirect=True)
def test_what_a_program_starts_does_not_connect_to_its_cluster(site: Site):
    """A job that it submits has its environment."""
    body = """
show("names", [name for name in os.environ if name.startswith(("DASK_", "HPCDASK_SCHEDULER"))])
assert client.submit(sum, [1, 2]).result() == 3
assert Client().submit(sum, [1, 2]).result() == 3
"""
    ended = site.run(program(site, body), n=1, find=False)
    assert ended.code == 0, str(ended)
    assert "names []" in ended.out


@pytest.mark.parametrize("site", ["alone"], indirect=True)
def test_memory_that_slurm_grants_for_each_gpu_is_the_workers_limit(site: Site):
    """Regression: the limit was the host's where no cgroup confines memory."""
    body = """
workers = client.scheduler_info()["workers"].values()
show("MiB", sum(worker["memory_limit"] for worker in workers) >> 20)
"""
    env = {"SLURM_JOB_ID": "7", "SLURM_MEM_PER_GPU": "700", "SLURM_GPUS_ON_NODE": "2"}
    ended = site.run(program(site, body), n=1, find=False, env=env)
    assert ended.code == 0, str(ended)
    assert 1390 <= int(ended.out.split("MiB ")[1].split()[0]) <= 1400, str(ended)
