"""Blocks of workers with the same stack."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from dask.utils import format_time

from hpcdask.node.observe import Frame, ProcessView, ThreadView

from .look import Report, WorkerLook

#: Functions below which a stack is a Dask task's own, seen in distributed 2026.7, and a file on
#: the way there.
TASK, TASK_SPEC = ("_run_task_simple", "_run_actor"), "dask/_task_spec.py"
#: Function of hpcdask that calls a rank of a gang.
GANG = "call_rank"
#: Parts of paths that are not the user's own.
LIBRARIES = ("distributed/", "lib/python", "python3.", "asyncio/", "hpcdask/")
#: Files in which an event loop waits for messages.
LOOP = "asyncio/base_events.py"
IDLE = ("selectors.py", LOOP)
#: Texts for states of workers.
STATES = {
    "gone": "have no process",
    "stopped": "are stopped",
    "silent": "do not answer",
    "paused": "are paused, short of host memory",
}
#: Share of looks from which on a process computes.
BUSY = 0.7


@dataclass
class Block:
    """Workers, by name, with the same stack.

    `frames` are innermost first, those of a Dask task without Dask's own; `what` says what the
    workers do if there are no frames. `tasks` are the seconds since the start of each Dask task,
    zero if unknown.
    """

    what: str
    frames: list[Frame]
    workers: dict[str, WorkerLook]
    tasks: dict[str, float] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Number of its Dask tasks, or of its workers where they are not known."""
        return len(self.tasks) or len(self.workers)

    @property
    def in_gang(self) -> bool:
        """Return whether its Dask tasks are ranks of a gang."""
        return any(frame.function == GANG for frame in self.frames)

    @property
    def is_busy(self) -> bool:
        """Return whether one of its workers computes."""
        return any(worker.process.busy >= BUSY for worker in self.workers.values())

    def longest(self) -> str:
        """Return the Dask task that runs for longest: ``work-4c1a for 16m 29s``."""
        key = max(self.tasks, key=self.tasks.__getitem__)
        return f"{key} for {format_time(self.tasks[key])}" if self.tasks[key] else key


def blocks(report: Report) -> list[Block]:
    """Return all workers that were reached, the largest blocks first."""
    found: dict[Any, Block] = {}
    for worker in report.workers:
        for block in _activities(worker, report):
            same = found.setdefault((block.what, *map(str, own(block.frames))), block)
            same.workers |= block.workers
            same.tasks |= block.tasks
    return sorted(found.values(), key=lambda one: (not one.frames, -len(one.workers)))


def _activities(worker: WorkerLook, report: Report) -> Iterator[Block]:
    """Yield what each Dask task of a worker does, or else what the worker does."""
    what, me, process = STATES.get(worker.state, ""), {worker.name: worker}, worker.process
    runs = [one for one in process.threads if any(frame.function in TASK for frame in one.frames)]
    for thread in runs:
        below = takewhile(lambda frame: frame.function not in TASK, thread.frames)
        frames = [frame for frame in below if not frame.file.endswith(TASK_SPEC)]
        yield Block(what, frames, {**me}, _task_of(worker, thread, report))
    if runs:
        return
    loop = loop_thread(process)
    if not worker.work and loop and not is_waiting(loop):
        yield Block(what, loop.frames, me)
    elif worker.work.get("fetches_from"):
        yield Block(what or "fetch data from other workers", [], me)
    else:
        yield Block(what or "run no Dask task", [], me)


def _task_of(worker: WorkerLook, thread: ThreadView, report: Report) -> dict[str, float]:
    """Return the Dask task of a thread with its seconds, by the worker or else the scheduler."""
    if key := worker.work.get("running", {}).get(str(thread.ident)):
        return {key: worker.work["seconds"].get(key, 0)}
    processing = report.known_workers.get(worker.name, {}).get("processing", {})
    return dict(processing) if len(processing) == 1 else {}


def loop_thread(process: ProcessView) -> ThreadView | None:
    """Return the thread of a worker's or scheduler's event loop."""
    for thread in process.threads:
        if any(frame.file.endswith(LOOP) for frame in thread.frames):
            return thread
    return None


def main_thread(process: ProcessView) -> ThreadView | None:
    """Return the main thread, which faulthandler writes last."""
    return process.threads[-1] if process.threads else None


def is_waiting(thread: ThreadView) -> bool:
    """Return whether an event loop waits for messages, as it should."""
    return bool(thread.frames) and thread.frames[0].file.endswith(IDLE)


def own(frames: Sequence[Frame]) -> Sequence[Frame]:
    """Return the lines that are not of Python or Dask, which polls; all where there is no other."""
    return [one for one in frames if not any(part in one.file for part in LIBRARIES)] or frames


def place(frames: Sequence[Frame]) -> str:
    """Return the innermost line that is the user's own, or at least not of Python or Dask."""
    for frame in own(frames):
        return f"{frame}: {frame.text}" if frame.text else str(frame)
    return "?"
