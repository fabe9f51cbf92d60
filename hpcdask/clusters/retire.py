"""Requests to the scheduler, in the same event loop, when workers come to their end.

The comments name what distributed does not document; ``tests/jobs/test_retire.py`` has all of it.
"""

from __future__ import annotations

import asyncio
import inspect
import pickle
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

from distributed import Scheduler, Status
from distributed.active_memory_manager import RetireWorker
from distributed.metrics import time
from distributed.scheduler import TaskState, WorkerState

POLL_S = 0.05
#: States of Dask tasks that could run and have no worker.
WAITING = ("no-worker", "queued")


def ignore_removed(scheduler: Scheduler) -> None:
    """Ignore requests that were on their way when their worker was removed: the handler breaks."""
    name = "request-refresh-who-has"
    answer = scheduler.stream_handlers[name]

    def answer_connected(*, worker: str, **request: Any) -> None:
        if worker in scheduler.stream_comms:
            answer(worker=worker, **request)

    scheduler.stream_handlers[name] = answer_connected


async def retire(
    scheduler: Scheduler, names: Collection[str], *, deadline_s: float
) -> frozenset[str]:
    """Make workers finish, hand over what they alone hold, and close; return those that are gone.

    A worker that nobody can relieve, or that is not ready in time, goes on as before, so the caller
    can try again. Calls for different workers may overlap.
    """
    leaving = {ws.address for ws in _workers(scheduler, names)}
    try:
        async with asyncio.timeout(deadline_s):
            # All at once: otherwise one would hand over to the next.
            drained = await _drain(scheduler, leaving)
            await asyncio.gather(*(_see_off(scheduler, address) for address in drained))
    except TimeoutError:
        pass
    finally:
        for address in leaving & set(scheduler.workers):
            _take_back(scheduler, address)
    return frozenset(names) - {str(ws.name) for ws in scheduler.workers.values()}


async def _drain(scheduler: Scheduler, addresses: Collection[str]) -> set[str]:
    """Give workers no new Dask tasks, and copy what only they hold; return those that are done."""
    # Without what logs a traceback where the deadline cuts it off.
    retire_workers = inspect.unwrap(type(scheduler).retire_workers)
    keywords = {"workers": list(addresses), "close_workers": False, "remove": False}
    try:
        return set(await retire_workers(scheduler, **keywords))
    except KeyError:  # a worker died meanwhile
        return set()


async def _see_off(scheduler: Scheduler, address: str) -> None:
    """Wait until a drained worker has finished what it runs, hand that over too, and close it."""
    while (ws := scheduler.workers.get(address)) is not None:
        heartbeats = set()
        while ws.processing and ws.status != Status.closed:
            heartbeats.add(ws.last_seen)
            if len(heartbeats) > 2:
                # The second heartbeat from here on was sent after it stopped taking Dask tasks:
                # what it does not run by then, it will not run.
                _release_waiting(scheduler, ws, f"hpcdask-retire-{time()}")
            await asyncio.sleep(POLL_S)
        if not await _drain(scheduler, {address}):
            return
        # Without a pause between this look and the end, two that leave cannot rely on each other.
        if not any(len(ts.who_has or ()) == 1 for ts in ws.has_what):
            stimulus_id = f"hpcdask-retire-{time()}"
            await scheduler.remove_worker(address, stimulus_id=stimulus_id, expected=True)


def _take_back(scheduler: Scheduler, address: str) -> None:
    """Make a worker that does not leave useful again."""
    # A policy that was interrupted would go on to empty the worker.
    memory_manager = scheduler.extensions.get("amm")
    if memory_manager is not None:
        for policy in list(memory_manager.policies):
            if isinstance(policy, RetireWorker) and policy.address == address:
                memory_manager.policies.discard(policy)
    # As `retire_workers` does it when it gives up; the worker confirms. It is repeated here since
    # that only goes back to the status which it found.
    message = {"op": "worker-status-change", "status": Status.running.name}
    scheduler.worker_send(address, message | {"stimulus_id": f"hpcdask-take-back-{time()}"})


async def force_out(scheduler: Scheduler, names: Collection[str], *, expected: bool = True) -> None:
    """Remove workers at once; Dask computes elsewhere what they hold or run.

    An end that is not `expected`, by the walltime, counts as a failure of the Dask tasks that run
    there, which distributed's ``allowed-failures`` bounds.
    """
    stimulus_id = f"hpcdask-force-out-{'emptied' if expected else 'walltime'}-{time()}"
    leaving = _workers(scheduler, names)
    for ws in leaving:
        # The handler of a worker's own message: else the first one's tasks go to the next.
        scheduler.handle_worker_status_change(Status.closing_gracefully, ws, stimulus_id)
    if not expected:
        for ws in leaving:
            _release_waiting(scheduler, ws, stimulus_id)
    keywords: dict[str, Any] = {"stimulus_id": stimulus_id, "expected": expected}
    await asyncio.gather(*(scheduler.remove_worker(ws.address, **keywords) for ws in leaving))


def _workers(scheduler: Scheduler, names: Collection[str]) -> list[WorkerState]:
    return [ws for ws in scheduler.workers.values() if str(ws.name) in names]


def _release_waiting(scheduler: Scheduler, ws: WorkerState, stimulus_id: str) -> None:
    """Give other workers the Dask tasks that this worker's last heartbeat did not show running."""
    waiting = [ts.key for ts in ws.processing if ts not in ws.executing]
    scheduler.transitions(dict.fromkeys(waiting, "released"), stimulus_id)


def fail_waiting(
    scheduler: Scheduler,
    error: Exception,
    which: Callable[[TaskState], bool] = lambda ts: True,
    states: Collection[str] = WAITING,
) -> bool:
    """Fail the Dask tasks that could run and have no worker with `error`, and what depends on them.

    Return whether there are some.
    """
    stimulus_id, known = f"hpcdask-fail-waiting-{time()}", scheduler.tasks
    waiting = [ts.key for ts in known.values() if ts.state in states and which(ts)]
    for key in waiting:
        if key not in known or known[key].state not in states:
            continue  # the failure of another has released it
        # As the scheduler's own timeout for tasks without workers does it.
        recommendations = scheduler.transition(
            key,
            "erred",
            stimulus_id,
            exception=pickle.dumps(error),
            exception_text=str(error),
            traceback_text="",
            cause=key,
        )
        scheduler.transitions(recommendations, stimulus_id)
    return bool(waiting)


def closable(scheduler: Scheduler, job_of: Callable[[str], str | None]) -> list[str]:
    """Return the jobs whose workers the scheduler's rules may close, the least data first.

    `job_of` maps a worker's name to its job; None for others' workers.
    """
    sizes = Counter(job_of(str(ws.name)) for ws in scheduler.workers.values())

    def key(ws: WorkerState) -> Any:
        return job_of(str(ws.name)) or ws.name

    names = scheduler.workers_to_close(key=key, attribute="name")
    # The scheduler leaves a worker out, not its job.
    complete = Counter(job_of(str(name)) for name in names)
    return [job for job, size in complete.items() if job is not None and size == sizes[job]]
