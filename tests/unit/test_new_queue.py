"""A queueing system that hpcdask has never heard of: one module, and one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

#: The two files that bring it: the line, an entry point, and the module.
FILES = {
    "toysite-1.0.dist-info/entry_points.txt": "[hpcdask.queues]\ntoy = toysite:TOY\n",
    "toysite.py": """
from hpcdask.queues.base import Queue
from hpcdask.queues.helpers import fold
from hpcdask.queues.job_state import JobState
from hpcdask.queues.registry import System

TOY = System("toysite:ToyQueue", "ToyCUDACluster", "TOY_JOB")
STATES = {"waits": (JobState.PENDING, ""), "runs": (JobState.RUNNING, "")}


class ToyQueue(Queue):
    title = "Toy"
    jobqueue = ("toy", "dask_jobqueue.pbs.PBSJob")
    keywords = ("colour",)
    programs = ("toysub", "toystat", "toydel")
    job_id = '"$TOY_JOB"'
    gpu_example = "#PBS -l toys=1"

    def __init__(self, colour="red"):
        self.colour = colour

    def with_gpus(self, lines, request):
        return [*lines, f"#PBS -l toys={request.gpus}"]

    def with_directives(self, lines, job, request):
        return [*lines, f"#PBS -tag {request.tag}", f"#PBS -colour {self.colour}"]

    async def submit(self, script, count):
        return [(await self.take(script, r"^toy-\\d+$", "toysub", script))[0]]

    async def query(self, ids):
        rows = [line.split() for line in (await self.answer("toystat")).splitlines()]
        return {job: fold(job, word, STATES, lambda: None) for job, word in rows if job in ids}

    async def tagged(self):
        return {}
""",
}
PROGRAM = """
import asyncio, inspect, os
import dask

import hpcdask
from hpcdask.queues.registry import how_to_request, job_id
from hpcdask.queues.registry import queue_class

queue = queue_class("toy")()
assert asyncio.run(queue.submit("script.sh", 1)) == ["toy-7"]
found = asyncio.run(queue.query(["toy-7", "toy-8", "toy-9"]))
assert [job.state for job in found.values()] == ["pending", "running", "unknown"], found
asyncio.run(queue.cancel(["toy-7"]))

os.environ["TOY_JOB"] = "toy-7"
assert job_id() == "toy-7.r0"
assert "#PBS -l toys=1" in how_to_request(job_id())
del os.environ["TOY_JOB"]

assert "Toy grants" in inspect.getdoc(hpcdask.ToyCUDACluster)
assert {"walltime", "device", "colour"} <= set(inspect.signature(hpcdask.ToyCUDACluster).parameters)
dask.config.set({"jobqueue.toy.walltime": "00:07:00"})
given = dict(cores=2, memory="1GiB", shared_temp_directory=".")
with hpcdask.ToyCUDACluster(**given, colour="blue") as cluster:
    script = cluster.job_script()
for line in ("-l toys=1", "-l walltime=00:07:00", "-colour blue"):
    assert f"#PBS {line}\\n" in script, script
assert 'HPCDASK_JOB_ID="$TOY_JOB"' in script, script

from hpcdask.cli import main

main(["submit", "--system", "toy", "--dry-run", "--gpus-per-node", "4", "program.py"])
"""
COMMANDS = {
    "toysub": "echo Welcome; echo toy-7",
    "toystat": "echo toy-7 waits; echo toy-8 runs; echo toy-9 dreams",
    "toydel": "exit 0",
}


def test_two_files_add_a_queueing_system(tmp_path: Path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    for name, text in COMMANDS.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o700)
    (tmp_path / "program.py").touch()
    places = {name: f"{tmp_path}:{os.environ.get(name, '')}" for name in ("PATH", "PYTHONPATH")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=tmp_path,
        env={**os.environ, **places, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    script = done.stdout
    assert "#PBS -N program.py\n" in script
    assert "#PBS -l toys=4\n" in script
    assert 'hpcdask-"$TOY_JOB".log' in script
    assert script.endswith("exec mpirun -n 4 " + script.partition("mpirun -n 4 ")[2])
