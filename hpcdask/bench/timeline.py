"""What every thread of every worker did when, during one run."""

from __future__ import annotations

import contextlib
import heapq
from collections.abc import Iterator
from typing import Any

import distributed
from dask.utils import key_split
from distributed.diagnostics.task_stream import TaskStreamPlugin
from distributed.metrics import time

#: More than this a picture does not show, and a JSON line should not hold.
MAX_ENTRIES = 4_000
#: Dask tasks that the scheduler keeps; one has about three entries.
MAX_TASKS = 200_000
#: Not the dashboard's, which may be there as well.
NAME = "hpcdask-timeline"


@contextlib.contextmanager
def recorded(client: distributed.Client) -> Iterator[dict[str, Any]]:
    """Record what the workers do while the block runs; meant for a run that is not timed.

    The yielded dict is filled when the block ends: ``entries`` are the `MAX_ENTRIES` longest, in
    the order of their starts, in seconds of the scheduler's clock; ``left_out`` counts the others.
    A ``"transfer"`` is before the Dask task it is for, beside what the thread computes.
    """
    found: dict[str, Any] = {"entries": [], "left_out": 0}
    began = client.run_on_scheduler(_start)
    finished = False
    try:
        yield found
        finished = True
    finally:
        told = client.run_on_scheduler(_stop, began=began)
        if finished:
            found.update(told)


def _start(dask_scheduler: Any) -> float:
    dask_scheduler.add_plugin(TaskStreamPlugin(dask_scheduler, maxlen=MAX_TASKS), name=NAME)
    return float(time())


def _stop(dask_scheduler: Any, began: float) -> dict[str, Any]:
    plugin = dask_scheduler.plugins[NAME]
    dask_scheduler.remove_plugin(name=NAME)
    names = {address: str(worker.name) for address, worker in dask_scheduler.workers.items()}
    return _entries(plugin.collect(), names, began, plugin.index - len(plugin.buffer))


def _entries(
    messages: list[dict[str, Any]], names: dict[str, str], began: float, n_forgotten: int
) -> dict[str, Any]:
    """Turn distributed's messages into entries; pure."""
    threads: dict[str, dict[int, int]] = {}
    entries = [
        {
            "worker": names.get(message["worker"], message["worker"]),
            "thread": _number(threads.setdefault(message["worker"], {}), message["thread"]),
            "start": round(step["start"] - began, 6),
            "stop": round(step["stop"] - began, 6),
            "name": key_split(message["key"]),
            "action": step["action"],
        }
        for message in messages
        for step in message["startstops"]
    ]
    kept = heapq.nlargest(MAX_ENTRIES, entries, key=lambda entry: entry["stop"] - entry["start"])
    kept.sort(key=lambda entry: (entry["start"], entry["worker"], entry["thread"]))
    return {"entries": kept, "left_out": len(entries) - len(kept) + n_forgotten}


def _number(seen: dict[int, int], thread: int) -> int:
    return seen.setdefault(thread, len(seen))
