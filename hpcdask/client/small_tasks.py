"""Short Dask tasks with small results go to workers in groups.

The scheduler queues tasks that nothing has to be fetched for, and sends a worker the next one when
it has finished one. For tasks of a millisecond, that costs more than they do: their messages, and
the time in which the worker waits. What is long or holds memory is sent as ever.

A worker gets several that follow each other. dask deals them out in turn, one to each worker, so
that a sum of neighbours has to fetch most of them.
"""

from __future__ import annotations

from typing import Any

import dask.config
from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin

from hpcdask.upstream import distributed

#: Seconds of a short task, bytes of a small result.
SHORT_S, SMALL_NBYTES = 0.005, 65536
#: How many a worker has for each of its threads, and with how many threads choosing it is cheap.
GROUP, MOST_THREADS = 64, 256
SATURATION = "distributed.scheduler.worker-saturation"


class SmallTasks(SchedulerPlugin):
    """Fills workers' queues when one runs dry or half of all is done, if the next tasks are small.

    ``distributed.scheduler.worker-saturation`` counts for other tasks, and for all if it was
    configured.
    """

    name = "hpcdask-small-tasks"

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler: Any = scheduler
        self._large: set[str] = set()
        self._events = 0
        self._fill = distributed.replace_filling(scheduler, self._maybe_fill)

    @classmethod
    def watch(cls, scheduler: Scheduler) -> None:
        """Do so for this scheduler, before its first worker."""
        if dask.config.get(SATURATION) == distributed.USUAL_SATURATION:
            scheduler.add_plugin(cls(scheduler))

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        """Remember of which kind results are large."""
        if finish == "memory" and (kwargs.get("nbytes") or 0) > SMALL_NBYTES:
            self._large.add(self._scheduler.tasks[key].prefix.name)

    def _are_small(self) -> bool:
        """Whether the next one is. What may have killed its worker goes without neighbours."""
        task = self._scheduler.queued.peek()
        short = 0 <= task.prefix.duration_average <= SHORT_S
        return short and task.prefix.name not in self._large and not task.suspicious

    def _maybe_fill(self, *, stimulus_id: str) -> None:
        scheduler = self._scheduler
        if not scheduler.queued:
            return
        most = GROUP * scheduler.total_nthreads
        if scheduler.total_nthreads <= MOST_THREADS and self._are_small():
            self._events += 1
            if 2 * self._events <= most and not scheduler.idle_task_count:
                return
            self._events = 0
            each = self._workers(in_turn=len(scheduler.queued) > most)
            distributed.send_queued(scheduler, each, GROUP, self._are_small, stimulus_id)
        self._fill(stimulus_id=stimulus_id)

    def _workers(self, *, in_turn: bool) -> list[list[Any]]:
        """Those to fill one by one, the one with least to do first; or all together."""
        workers = sorted(self._scheduler.running, key=_load)
        if in_turn:
            return [[worker] for worker in workers if _load(worker) <= GROUP / 2]
        return [[worker for worker in workers if _load(worker) < GROUP]]


def _load(worker: Any) -> float:
    """Tasks for each of its threads, but for those that left them to wait for others."""
    load: float = (len(worker.processing) - len(worker.long_running)) / worker.nthreads
    return load
