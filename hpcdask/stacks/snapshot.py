"""Snapshot of the scheduler's work, taken in its event loop, so only where that answers."""

from __future__ import annotations

from collections import Counter
from typing import Any

from distributed import Scheduler
from distributed.metrics import time

from hpcdask.client import gang_scheduler

#: Number of Dask tasks that are listed.
MOST = 10


def snapshot(dask_scheduler: Scheduler) -> dict[str, Any]:
    """Return workers, Dask tasks, locks and gangs, as plain values; seconds are until now."""
    now = time()
    states: Counter[str] = Counter()
    for prefix in dask_scheduler.task_prefixes.values():
        states.update(prefix.states)
    return {
        "workers": {str(ws.name): _worker(ws, now) for ws in dask_scheduler.workers.values()},
        "states": {
            state: count
            for state, count in states.items()
            if count and state not in ("released", "forgotten")
        },
        "unrunnable": [str(ts.key) for ts in list(dask_scheduler.unrunnable)[:MOST]],
        "waiting": _waiting(dask_scheduler),
        "locks": _locks(dask_scheduler),
        "gangs": gang_scheduler.describe(dask_scheduler),
    }


def _worker(ws: Any, now: float) -> dict[str, Any]:
    return {
        "address": ws.address,
        "host": ws.host,
        "status": ws.status.name,
        "silent_s": now - ws.last_seen,
        "memory": ws.metrics.get("memory", 0),
        "limit": ws.memory_limit,
        "processing": [str(ts.key) for ts in list(ws.processing)[:MOST]],
        "seconds": {str(ts.key): seconds for ts, seconds in ws.executing.items()},
    }


def _waiting(scheduler: Scheduler) -> dict[str, list[str]]:
    """Return some Dask tasks that wait for running ones, with these."""
    found: dict[str, list[str]] = {}
    for ts in scheduler.tasks.values():
        waits = ts.waiting_on or ()
        if ts.state == "waiting" and any(one.state != "waiting" for one in waits):
            found[str(ts.key)] = [str(one.key) for one in list(waits)[:MOST]]
            if len(found) == MOST:
                break
    return found


def _locks(scheduler: Scheduler) -> dict[str, dict[str, int]]:
    """Return Dask's locks and semaphores that are waited for; seen in distributed 2026.7."""
    semaphores: Any = scheduler.extensions.get("semaphores")
    pending = dict(semaphores.metrics["pending"]) if semaphores else {}
    return {
        str(name): {"waiting": count, "held": len(semaphores.leases.get(name, ()))}
        for name, count in pending.items()
        if count > 0
    }
