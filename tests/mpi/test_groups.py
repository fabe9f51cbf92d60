"""Ranks on GPUs beside ranks on the CPU, and `hpcdask list` of runs, with real launchers.

The GPUs are NVML's stand-ins, on which no context is made.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import psutil
import pytest

from launching import needs, run_cli, stand_in_gpus, wait_for
from running import Site, under

pytestmark = pytest.mark.mpi

PLAIN = ("--rmm-pool-size", "0", "--device-memory-limit", "0")
SHOW = """
from distributed import Client

def where():
    import os
    return os.environ["CUDA_VISIBLE_DEVICES"]

with Client() as client:
    workers = client.sync(client.scheduler.identity, n_workers=-1)["workers"]
    devices = client.run(where)
    for address, worker in workers.items():
        print("worker", *worker["resources"], devices[address] or "none", flush=True)
    for kind in ("GPU", "CPU"):
        print(kind, client.submit(where, resources={kind: 1}, pure=False).result() or "none")
"""


@needs("cuda")
@under("openmpi", "mpich")
def test_two_ranks_on_gpus_and_two_on_the_cpu(site: Site, tmp_path: Path) -> None:
    options = (*PLAIN, "--groups", "gpu:2 cpu:2")
    env = stand_in_gpus(tmp_path, 2)
    done = site.run(*options, program=SHOW, n=4, device="auto", env=env)
    told = Counter(line for line in done.out.splitlines() if line.startswith("worker"))
    assert told == {
        "worker GPU GPU-00000000": 1,
        "worker GPU GPU-00000001": 1,
        "worker CPU none": 2,
    }, done
    assert "\nGPU GPU-0000000" in done.out
    assert "\nCPU none" in done.out
    assert "4 workers on 1 node (2 x Fake, 2 x CPU), tcp" in done.err, done
    site.check_nothing_left()


@needs("cuda")
@under("openmpi", "mpich")
def test_numbers_that_do_not_fit(site: Site, tmp_path: Path) -> None:
    env = stand_in_gpus(tmp_path, 1)
    done = site.run("--groups", "gpu:1 cpu:2", n=2, device="auto", env=env, code=2)
    (error,) = done.errors
    assert "--groups gpu:1 cpu:2 is for 3 ranks with a worker on each node" in error
    assert "has 2 (1 GPU, " in error
    assert "start 3 there, or change the numbers" in error
    site.check_nothing_left()


def listed() -> list[dict]:
    rows = json.loads(run_cli("list", "--json").stdout)
    return [row for row in rows if row["kind"] == "run"]


@pytest.mark.long
@pytest.mark.parametrize("end", ["shutdown", "term", "kill"])
def test_a_run_is_listed_while_it_is_there(
    site: Site, end: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HPCDASK_HOME", str(tmp_path))
    run = site.start("--scheduler-file", "mine.json", env={"HPCDASK_HOME": str(tmp_path)})
    run.line("hpcdask: scheduler at", stream="err")
    (row,) = listed()
    file = str(site.folder / "mine.json")
    assert (row["name"], row["state"], row["file"]) == ("mine.json", "running", file), row
    wait_for(lambda: listed()[0]["workers"] == 2, 20, "both workers to be listed")
    assert row["host"] == os.uname().nodename
    assert row["why"].startswith("2 workers, ")
    if end == "shutdown":
        code = "import hpcdask; hpcdask.connect('mine.json').shutdown()"
        subprocess.run([sys.executable, "-c", code], cwd=site.folder, check=True)
    elif end == "term":
        psutil.Process(run.rank_pids()[0]).send_signal(signal.SIGTERM)
    else:
        for _, pid in sorted(run.rank_pids().items()):  # rank 0, or it would notice the other's
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(pid).kill()
    run.end()
    wait_for(lambda: not listed(), 20, "it to be off the list")
    assert not list(site.folder.glob("mine.json*"))
    assert not list(Path(tmp_path, "runs").iterdir())


@under("alone")
def test_a_run_is_known_by_its_program(
    site: Site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HPCDASK_HOME", str(tmp_path))
    options = ("--device", "cpu", "--scheduler-file", "mine.json")
    run = site.start(*options, "waits.py", env={"HPCDASK_HOME": str(tmp_path)})
    run.line("ready")
    (row,) = listed()
    assert row["program"] == "waits.py"
    assert f"waits.py, {site.folder}/mine.json on " in row["why"]
    done = run_cli("stacks", "none", code=2)
    since = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
    assert re.search(rf"There are: .*\b\d+ \(waits\.py, since {since}\)", done.stderr), done
    run.signal(signal.SIGTERM)
    run.end()
