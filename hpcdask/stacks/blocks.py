"""Workers that do the same are one block: its stack, a count and names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpcdask.node.observe import STOPPED, Frame, ProcessView, ThreadView

from .look import Report, WorkerLook

#: Where a Dask task's own part of a stack begins, seen in distributed 2026.7, and what else of the
#: way there says nothing.
TASK = ("_run_task_simple", "_run_actor")
WAYS = ("dask/_task_spec.py", "hpcdask/client/gang.py")
GANG = "call_rank"
#: Parts of paths that are not the user's own.
LIBRARIES = ("distributed/", "lib/python", "python3.", "asyncio/", "hpcdask/")
#: From this share of looks on a process computes.
BUSY = 0.7
#: Lines of a stack that are shown.
LINES = 8


@dataclass
class Block:
    """Workers that do the same.

    `frames` are innermost first, those of a Dask task without Dask's own; `what` they do if there
    are none to show. `keys` has their Dask tasks, and the seconds since the start of each where
    that is known. The gang's ranks have `in_gang`.
    """

    what: str
    frames: list[Frame]
    workers: list[WorkerLook] = field(default_factory=list)
    keys: list[tuple[str, float | None]] = field(default_factory=list)
    in_gang: bool = False
    in_lock: bool = False
    owns_gil: bool = False

    @property
    def names(self) -> list[str]:
        """Its workers."""
        return [one.name for one in self.workers]

    def longest(self) -> tuple[str, float | None]:
        """The Dask task that runs for longest."""
        return max(self.keys, key=lambda one: one[1] or 0.0)


def task_frames(thread: ThreadView) -> list[Frame] | None:
    """A Dask task's own part of a thread's stack; None where the thread runs none."""
    functions = [frame.function for frame in thread.frames]
    ends = [functions.index(name) for name in TASK if name in functions]
    if not ends:
        return None
    frames = thread.frames[: min(ends)]
    while frames and frames[-1].file.endswith(WAYS):
        frames = frames[:-1]
    return frames


def loop_thread(process: ProcessView) -> ThreadView | None:
    """The thread of a worker's or scheduler's event loop."""
    for thread in process.threads:
        if any(frame.file.endswith("asyncio/base_events.py") for frame in thread.frames):
            return thread
    return None


def main_thread(process: ProcessView) -> ThreadView | None:
    """The thread of a program: the one that began with a module."""
    for thread in process.threads:
        outermost = thread.frames[-1].function if thread.frames else ""
        if outermost == "<module>" or outermost.startswith("_run_module"):
            return thread
    return process.threads[-1] if process.threads else None


def is_waiting(thread: ThreadView) -> bool:
    """Return whether an event loop waits for messages, as it should."""
    idle = ("selectors.py", "asyncio/base_events.py")
    return bool(thread.frames) and thread.frames[0].file.endswith(idle)


def blocks(report: Report) -> list[Block]:
    """All workers that were reached, the largest blocks first."""
    found: dict[Any, Block] = {}
    for worker in report.workers:
        for block in _of_worker(worker, report.work):
            same = (block.what, tuple(map(str, own(block.frames))), block.in_gang)
            known = found.setdefault(same, block)
            if known is not block:
                known.workers += [one for one in block.workers if one is not known.workers[-1]]
                known.keys += block.keys
                known.in_lock |= block.in_lock
                known.owns_gil |= block.owns_gil
    return sorted(found.values(), key=lambda one: (not one.frames, -len(one.workers)))


def _of_worker(worker: WorkerLook, work: Mapping[str, Any] | None) -> list[Block]:
    process, told = worker.process, worker.work or {}
    if not process.state:
        return [Block("have no process", [], [worker])]
    what = "are stopped" if process.state in STOPPED else ""
    if not what and worker.work is None:
        what = "do not answer"
    if told.get("status") == "paused":
        what = "are paused, short of host memory"
    made = [
        _of_task(worker, thread, frames, work, what)
        for thread in process.threads
        if (frames := task_frames(thread)) is not None
    ]
    if made:
        return made
    thread = loop_thread(process)
    if worker.work is None and thread is not None and not is_waiting(thread):
        gil = bool(thread.owns_gil)
        return [Block(what, thread.frames, [worker], owns_gil=gil)]
    if not what and told.get("fetches_from"):
        what = "fetch data from other workers"
    return [Block(what or "run no Dask task", [], [worker])]


def _of_task(
    worker: WorkerLook,
    thread: ThreadView,
    frames: list[Frame],
    work: Mapping[str, Any] | None,
    what: str,
) -> Block:
    told = worker.work or {}
    key = told.get("running", {}).get(str(thread.ident), "")
    seconds = told.get("seconds", {}).get(key)
    if not key and (seen := ((work or {}).get("workers", {})).get(worker.name)):
        running = {**dict.fromkeys(seen["processing"]), **seen["seconds"]}
        if len(running) == 1:
            ((key, seconds),) = running.items()
            seconds = seconds and seconds + seen["silent_s"]
    return Block(
        what,
        frames,
        [worker],
        keys=[(key, seconds)] if key else [],
        in_gang=any(frame.function == GANG for frame in thread.frames),
        in_lock=bool(thread.in_lock),
        owns_gil=bool(thread.owns_gil),
    )


def duration(seconds: float | None) -> str:
    """``for 3 min``; empty if it is not known."""
    if seconds is None:
        return ""
    if seconds < 100:
        return f"for {seconds:.0f} s"
    return f"for {seconds / 60:.0f} min" if seconds < 6000 else f"for {seconds / 3600:.1f} h"


def own(frames: Sequence[Frame]) -> Sequence[Frame]:
    """The lines that are not of Python or Dask, which polls; all where there is no other."""
    return [one for one in frames if not any(part in one.file for part in LIBRARIES)] or frames


def place(frames: Sequence[Frame]) -> str:
    """The innermost line that is the user's own, or at least not of Python or Dask."""
    frame = next(iter(own(frames)), None)
    if frame is None:
        return "?"
    return f"{frame}: {frame.text}" if frame.text else str(frame)
