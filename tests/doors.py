"""What tests of doors to queueing systems share: a job, its script, waiting for a state."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpcdask.clusters.configuration import import_job_class
from hpcdask.queues.base import Queue, Request
from hpcdask.queues.job_state import QueueState, QueueStatus
from launching import wait_for

TAG = "hpcdask:ab12cd34"


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


def wait_for_state(queue: Queue, job: str, *states: QueueState, timeout: float = 30) -> QueueStatus:
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
