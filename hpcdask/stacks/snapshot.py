"""Snapshot of the scheduler's work, taken in its event loop, so only where that answers."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import Any

from distributed import Scheduler
from distributed.metrics import time

from hpcdask.client import gang_scheduler

#: Number of Dask tasks that are listed.
MOST = 10


def snapshot(dask_scheduler: Scheduler) -> dict[str, Any]:
    """Return workers, Dask tasks, locks and gangs, as plain values; seconds are until now."""
    tasks = dask_scheduler.tasks.values()
    waiting = (
        ts
        for ts in tasks
        if ts.state == "waiting" and any(one.state != "waiting" for one in ts.waiting_on or ())
    )
    # Dask's locks are semaphores; seen in distributed 2026.7
    semaphores: Any = dask_scheduler.extensions.get("semaphores")
    pending = dict(semaphores.metrics["pending"]) if semaphores else {}
    return {
        "workers": {str(ws.name): _worker(ws) for ws in dask_scheduler.workers.values()},
        "states": dict(Counter(ts.state for ts in tasks if ts.state != "released")),
        "unrunnable": _keys(dask_scheduler.unrunnable),
        "waiting": {str(ts.key): _keys(ts.waiting_on) for ts in islice(waiting, MOST)},
        "locks": {
            str(name): {"waiting": count, "held": len(semaphores.leases.get(name, ()))}
            for name, count in pending.items()
            if count > 0
        },
        "gangs": gang_scheduler.describe(dask_scheduler),
    }


def _worker(ws: Any) -> dict[str, Any]:
    silent_s = time() - ws.last_seen
    running = {str(ts.key): seconds + silent_s for ts, seconds in ws.executing.items()}
    return {
        "host": ws.host,
        "silent_s": silent_s,
        "processing": dict.fromkeys(_keys(ws.processing), 0) | running,
    }


def _keys(tasks: Any) -> list[str]:
    """Return the keys of the first Dask tasks."""
    return [str(ts.key) for ts in islice(tasks, MOST)]
