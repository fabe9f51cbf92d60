"""Short Dask tasks with small results go to workers in groups.

The scheduler queues tasks that nothing has to be fetched for, and sends a worker the next one when
it has finished one. For tasks of a millisecond, that costs more than they do: their messages, and
the time in which the worker waits. What is long or holds memory is sent as ever.

A worker gets several that follow each other. dask deals them out in turn, one to each worker, so
that a sum of neighbours has to fetch most of them.
"""

from __future__ import annotations

from functools import partial
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
        self._usual = scheduler.WORKER_SATURATION
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
        scheduler = self._scheduler
        prefix = scheduler.queued.peek().prefix
        short = 0 <= prefix.duration_average <= SHORT_S
        return short and prefix.name not in self._large and scheduler.total_nthreads <= MOST_THREADS

    def _maybe_fill(self, *, stimulus_id: str) -> None:
        scheduler = self._scheduler
        small = bool(scheduler.queued) and self._are_small()
        size = GROUP if small else self._usual
        if size != scheduler.WORKER_SATURATION:
            scheduler.WORKER_SATURATION = size
            for worker in list(scheduler.running):
                scheduler.check_idle_saturated(worker)
        if not scheduler.queued:
            return
        self._events += 1
        if (
            not small
            or 2 * self._events > GROUP * scheduler.total_nthreads
            or scheduler.idle
            or not all(map(_unfinished, scheduler.idle_task_count))
        ):
            self._events = 0
            fill = partial(self._fill, stimulus_id=stimulus_id)
            if small and len(scheduler.queued) > GROUP * scheduler.total_nthreads:
                distributed.fill_in_turn(scheduler, self._with_less_than_half(), fill)
            else:
                fill()

    def _with_less_than_half(self) -> list[Any]:
        return [
            worker
            for worker in self._scheduler.idle_task_count
            if 2 * _unfinished(worker) <= GROUP * worker.nthreads
        ]


def _unfinished(worker: Any) -> int:
    """Tasks a worker has, but for those that left its threads to wait for others."""
    return len(worker.processing) - len(worker.long_running)
