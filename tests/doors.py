"""What tests of doors to queueing systems share: a job, its script, waiting for a state."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distributed import Client

from hpcdask.clusters.options import import_job_class
from hpcdask.queues.base import Queue, Request
from hpcdask.queues.job_state import JobState, QueueStatus
from launching import run_cli, wait_for

TAG = "hpcdask:ab12cd34"
#: Says that it runs, and which job it is.
SAY = 'echo "$HPCDASK_JOB_ID" >"said-$HPCDASK_JOB_ID"'
#: What jobs need for an mpirun of the tests.
PROLOGUE = [f'PATH="{Path(sys.executable).parent}:$PATH"']
PROLOGUE += [f"export {name}_ALLOW_RUN_AS_ROOT=1" for name in ("OMPI", "PRTE")]
PROLOGUE += [f"export {name}_ALLOW_RUN_AS_ROOT_CONFIRM=1" for name in ("OMPI", "PRTE")]
PROGRAM = """
import sys
from distributed import Client
with Client() as client:
    print(sys.argv[1:], len(client.nthreads()), "worker")
sys.exit(5)
"""


def make_job(kind: str, **keywords: Any) -> Any:
    """Return dask-jobqueue's Job, such as PBSJob of ``make_job("PBS", cores=2)``."""
    job_class = import_job_class((kind.lower(), f"{kind}Job"))
    job = {"cores": 1, "memory": "100MB", "job_script_prologue": [], **keywords}
    return job_class("tls://host:8786", "hpcdask", **job)


def preamble(queue: Queue) -> list[str]:
    """Return a line like those that a cluster writes before the user's prologue."""
    return [f"export HPCDASK_JOB_ID={queue.job_id} HPCDASK_RESTARTS={queue.restarts}"]


def write_script(
    queue: Queue,
    job: Any,
    folder: Path,
    command: str,
    *,
    name: str = "dask worker",
    gpus: int = 0,
    tag: str = TAG,
) -> str:
    """Write a job script into a folder where its logs go too, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    request = Request(name=name, tag=tag, folder=str(folder), gpus=gpus)
    path = folder / "script.sh"
    path.write_text(queue.script(job, request, preamble(queue), command))
    return str(path)


def ask(queue: Queue, job: str) -> QueueStatus | None:
    """What the queue says of a job, or its accounting of one that has left."""

    async def both() -> dict[str, QueueStatus]:
        return await queue.query([job]) or await queue.departed([job])

    return asyncio.run(both()).get(job)


def wait_for_state(queue: Queue, job: str, *states: JobState, timeout: float = 30) -> QueueStatus:
    """Wait until the queue shows a job in one of these states."""

    def reached() -> QueueStatus | None:
        seen = ask(queue, job)
        return seen if seen and seen.state in states else None

    return wait_for(reached, timeout, f"job {job} to be {' or '.join(states)}", interval=0.3)


def submit(queue: Queue, script: str, count: int = 1) -> list[str]:
    """Submit with the door."""
    return asyncio.run(queue.submit(script, count))


def cancel(queue: Queue, jobs: Sequence[str]) -> None:
    """Cancel with the door."""
    asyncio.run(queue.cancel(jobs))


def check_cluster(cluster_class: type, queue: Queue, folder: Path, **keywords: Any) -> None:
    """Check that a cluster of jobs goes up, computes, goes down, and leaves no job."""
    usual = {"device": "cpu", "cores": 1, "memory": "500MB", "job_name": "my jobs"}
    usual["scheduler_options"] = {"dashboard_address": ":0"}
    usual["shared_temp_directory"] = str(folder / "shared; folder")
    with cluster_class(**usual, **keywords) as cluster, Client(cluster) as client:
        cluster.scale(2)
        client.wait_for_workers(2, timeout=180)
        assert client.submit(sum, [1, 2]).result(timeout=180) == 3
        assert len(asyncio.run(queue.tagged())) == 2
        cluster.scale(1)
        wait_for(lambda: len(asyncio.run(queue.tagged())) == 1, 30, "one job to end")
    wait_for(lambda: asyncio.run(queue.tagged()) == {}, 10, "no job to be left")


def check_submit(system: str, queue: Queue, folder: Path, env: Mapping[str, str]) -> None:
    """Check that ``hpcdask submit --wait`` gives the program's output and exit code."""
    (folder / "program.py").write_text(PROGRAM)
    prologue = [word for line in PROLOGUE for word in ("--prologue", line)]
    words = ["--gpus-per-node", "0", "--run", "--device cpu", "program.py", "a word"]
    done = run_cli(
        *("submit", "--system", system, "--wait", *prologue, *words),
        code=5,
        cwd=folder,
        env={**os.environ, **env, "HOME": str(folder)},
    )
    # not the last line: what a client leaves in its event loop may be reported behind it
    assert "['a word'] 1 worker" in done.stdout.splitlines()
    assert asyncio.run(queue.tagged()) == {}
