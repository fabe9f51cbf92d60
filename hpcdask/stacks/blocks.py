"""Blocks of workers with the same stack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dask.utils import format_time

from hpcdask.node.observe import Frame, ProcessView, ThreadView

from .look import Report, WorkerLook

#: Functions below which a stack is a Dask task's own, seen in distributed 2026.7, and files on the
#: way there.
TASK = ("_run_task_simple", "_run_actor")
WAYS = ("dask/_task_spec.py", "hpcdask/client/gang.py")
GANG = "call_rank"
#: Parts of paths that are not the user's own.
LIBRARIES = ("distributed/", "lib/python", "python3.", "asyncio/", "hpcdask/")
#: Files in which an event loop waits for messages.
IDLE = ("selectors.py", "asyncio/base_events.py")
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
    """Workers with the same stack.

    `frames` are innermost first, those of a Dask task without Dask's own; `what` says what the
    workers do if there are no frames. `keys` has their Dask tasks, with the seconds since the start
    of each where that is known.
    """

    what: str
    frames: list[Frame]
    workers: list[WorkerLook]
    keys: list[tuple[str, float | None]] = field(default_factory=list)
    in_gang: bool = False

    @property
    def names(self) -> list[str]:
        """Names of its workers."""
        return [one.name for one in self.workers]

    @property
    def count(self) -> int:
        """Number of its Dask tasks, or of its workers where they are not known."""
        return len(self.keys) or len(self.workers)

    @property
    def is_busy(self) -> bool:
        """Return whether one of its workers computes."""
        return any(one.process.busy >= BUSY for one in self.workers)

    def longest(self) -> tuple[str, float | None]:
        """Return the Dask task that runs for longest."""
        return max(self.keys, key=lambda one: one[1] or 0.0)


def blocks(report: Report) -> list[Block]:
    """Return all workers that were reached, the largest blocks first."""
    found: dict[Any, Block] = {}
    for worker in report.workers:
        for block in _blocks_of(worker, report):
            same = (block.what, tuple(map(str, own(block.frames))), block.in_gang)
            known = found.setdefault(same, block)
            if known is not block:
                known.workers += [worker] if worker is not known.workers[-1] else []
                known.keys += block.keys
    return sorted(found.values(), key=lambda one: (not one.frames, -len(one.workers)))


def _blocks_of(worker: WorkerLook, report: Report) -> list[Block]:
    """Return a block for each Dask task of a worker, or one for the worker."""
    process, what = worker.process, STATES.get(worker.state, "")
    found = [
        Block(
            what,
            frames,
            [worker],
            _key_of(worker, thread, report),
            in_gang=any(frame.function == GANG for frame in thread.frames),
        )
        for thread in process.threads
        if (frames := _task_frames(thread)) is not None
    ]
    if found:
        return found
    thread = loop_thread(process)
    if worker.work is None and thread is not None and not is_waiting(thread):
        return [Block(what, thread.frames, [worker])]
    fetches = (worker.work or {}).get("fetches_from")
    idle = "fetch data from other workers" if fetches else "run no Dask task"
    return [Block(what or idle, [], [worker])]


def _task_frames(thread: ThreadView) -> list[Frame] | None:
    """Return a Dask task's own part of a thread's stack; None where the thread runs none."""
    ends = [place for place, frame in enumerate(thread.frames) if frame.function in TASK]
    if not ends:
        return None
    frames = thread.frames[: ends[0]]
    while frames and frames[-1].file.endswith(WAYS):
        frames = frames[:-1]
    return frames


def _key_of(
    worker: WorkerLook, thread: ThreadView, report: Report
) -> list[tuple[str, float | None]]:
    """Return the Dask task of a thread with its seconds, by the worker or else the scheduler."""
    work = worker.work or {}
    if key := work.get("running", {}).get(str(thread.ident)):
        return [(key, work.get("seconds", {}).get(key))]
    if seen := report.known_workers.get(worker.name):
        running = {**dict.fromkeys(seen["processing"]), **seen["seconds"]}
        if len(running) == 1:
            ((key, seconds),) = running.items()
            return [(key, seconds and seconds + seen["silent_s"])]
    return []


def loop_thread(process: ProcessView) -> ThreadView | None:
    """Return the thread of a worker's or scheduler's event loop."""
    for thread in process.threads:
        if any(frame.file.endswith("asyncio/base_events.py") for frame in thread.frames):
            return thread
    return None


def main_thread(process: ProcessView) -> ThreadView | None:
    """Return the thread of a program: the one that began with a module."""
    for thread in process.threads:
        outermost = thread.frames[-1].function if thread.frames else ""
        if outermost == "<module>" or outermost.startswith("_run_module"):
            return thread
    return process.threads[-1] if process.threads else None


def is_waiting(thread: ThreadView) -> bool:
    """Return whether an event loop waits for messages, as it should."""
    return bool(thread.frames) and thread.frames[0].file.endswith(IDLE)


def own(frames: Sequence[Frame]) -> Sequence[Frame]:
    """Return the lines that are not of Python or Dask, which polls; all where there is no other."""
    return [one for one in frames if not any(part in one.file for part in LIBRARIES)] or frames


def place(frames: Sequence[Frame]) -> str:
    """Return the innermost line that is the user's own, or at least not of Python or Dask."""
    frame = next(iter(own(frames)), None)
    return "?" if frame is None else f"{frame}: {frame.text}" if frame.text else str(frame)


def duration(seconds: float | None) -> str:
    """Return ``for 16m 29s``; empty if it is not known."""
    return "" if seconds is None else f"for {format_time(seconds)}"
