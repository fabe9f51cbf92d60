"""A queueing system that hpcdask has never heard of: one module, and one line in the registry."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TOY = """
from hpcdask.queues.base import Queue
from hpcdask.queues.helpers import fold
from hpcdask.queues.job_state import QueueState

STATES = {"waits": (QueueState.PENDING, ""), "runs": (QueueState.RUNNING, "")}


class ToyQueue(Queue):
    title = "Toy"
    jobqueue = ("pbs", "PBSJob")
    programs = ("toysub", "toystat", "toydel")
    canceller = "toydel"
    job_id = '"$TOY_JOB"'
    gpu_example = "#PBS -l toys=1"

    def with_directives(self, lines, job, request):
        gpus = [f"#PBS -l toys={request.gpus}"] if request.gpus else []
        return [*lines, *gpus, f"#PBS -tag {request.tag}"]

    async def submit(self, script, count):
        return [(await self.take(script, r"^toy-\\d+$", "toysub", script))[0]]

    async def query(self, ids):
        rows = [line.split() for line in (await self.answer("toystat")).splitlines()]
        return {job: fold(job, word, STATES, lambda: None) for job, word in rows if job in ids}

    async def tagged(self):
        return {}
"""
PROGRAM = """
import asyncio, inspect, os, sys
import hpcdask.queues
from hpcdask.queues import registry

hpcdask.queues.__path__.append(sys.argv[1])
registry.SYSTEMS["toy"] = registry.System("ToyCUDACluster", "TOY_JOB")

import hpcdask
from hpcdask.queues.environment import how_to_request, job_id

queue = registry.queue_class("toy")()
assert asyncio.run(queue.submit("script.sh", 1)) == ["toy-7"]
found = asyncio.run(queue.query(["toy-7", "toy-8", "toy-9"]))
assert [job.state for job in found.values()] == ["pending", "running", "unknown"], found
asyncio.run(queue.cancel(["toy-7"]))

os.environ["TOY_JOB"] = "toy-7"
assert job_id() == "toy-7.r0"
assert "#PBS -l toys=1" in how_to_request(job_id())
del os.environ["TOY_JOB"]

assert "Toy grants" in inspect.getdoc(hpcdask.ToyCUDACluster)
assert "ToyCUDACluster" in dir(hpcdask.clusters.classes)
assert {"walltime", "device"} <= set(inspect.signature(hpcdask.ToyCUDACluster).parameters)
with hpcdask.ToyCUDACluster(cores=2, memory="1GiB", shared_temp_directory=sys.argv[1]) as cluster:
    script = cluster.job_script()
assert "#PBS -l toys=1\\n" in script, script
assert 'HPCDASK_JOB_ID="$TOY_JOB"' in script, script

from hpcdask.cli import main

main(["submit", "--system", "toy", "--dry-run", "--gpus-per-node", "4", "program.py"])
"""
COMMANDS = {
    "toysub": "echo Welcome; echo toy-7",
    "toystat": "echo toy-7 waits; echo toy-8 runs; echo toy-9 dreams",
    "toydel": "exit 0",
}


def test_a_module_and_a_line_make_a_queueing_system(tmp_path: Path):
    (tmp_path / "toy.py").write_text(TOY)
    (tmp_path / "program.py").touch()
    for name, text in COMMANDS.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o700)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path)},
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
