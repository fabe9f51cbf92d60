"""Numbers of workers: those that `scale` and `adapt` are asked for, and those that the work needs.

Workers come and go by whole jobs, in groups; a cluster without groups has one, whose name is empty.
"""

from __future__ import annotations

import difflib
import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import TYPE_CHECKING, Any

from distributed.deploy.adaptive import Adaptive
from distributed.scheduler import TaskPrefix, TaskState

from hpcdask.client.gang_scheduler import workers_wanted
from hpcdask.errors import UsageError
from hpcdask.spec.parsing import parse_memory, whole_number

from . import retire

if TYPE_CHECKING:
    from .cluster import JobCluster
    from .controller import Group
    from .options import JobOptions

Call = Callable[..., Any]
Groups = Mapping[str, "JobOptions"]
Values = Mapping[str, Any]
#: Least and most workers of a group.
Bounds = tuple[int, float]
#: Part of the workers' memory above which they are too few, as for distributed.
FULL = 0.6

# What is asked for


def wishes(scale: Call, groups: Groups, given: Values, named: Values) -> dict[str, int]:
    """Return the workers that a cluster's `scale` is asked for, by group. Raises UsageError.

    `given` is its own keywords, of which the one with the most workers counts.
    """
    _check_names(scale, groups, given, named)
    if "" not in groups:
        return {name: whole_number(n, f"scale: {name}", 0) for name, n in named.items()}
    numbers = [_in_workers(groups[""], f"scale: {name}", n) for name, n in given.items() if n]
    return {"": math.ceil(max(numbers, default=0))}


def bounds(adapt: Call, groups: Groups, given: Values, named: Values) -> dict[str, Bounds]:
    """Return the least and most workers that a cluster's `adapt` is asked for, in whole jobs.

    `given` is the bounds of a cluster without groups, of which the strictest counts; `named` those
    of groups. The lower bound is rounded up, the upper one down. Raises UsageError.
    """
    _check_names(adapt, groups, given, named)
    found = {}
    if job := groups.get(""):
        known = {name: value for name, value in given.items() if value not in (None, math.inf)}
        numbers = {name: _in_workers(job, f"adapt: {name}", known[name]) for name in known}
        least = [n for name, n in numbers.items() if name.startswith("minimum")]
        most = [n for name, n in numbers.items() if name.startswith("maximum")]
        found[""] = _whole_jobs(max(least, default=0), min(most, default=math.inf), job.workers)
    for name, value in named.items():
        if not isinstance(value, tuple | list) or len(value) != 2:
            raise UsageError(f"adapt: {name}={value!r} is not a least and a most number: (0, 16)")
        low, high = (
            default if one in (None, math.inf) else whole_number(one, f"adapt: {name}", 0)
            for one, default in zip(value, (0, math.inf), strict=True)
        )
        found[name] = _whole_jobs(low, high, groups[name].workers)
    return found


def _check_names(call: Call, groups: Groups, given: Values, named: Values) -> None:
    """Raise UsageError for unknown groups, and for a number whose group is not named."""
    names, do = list(filter(None, groups)), call.__name__
    if unknown := [name for name in named if name not in names]:
        near = difflib.get_close_matches(unknown[0], signature(call).parameters, 1, 0.5)
        hint = f"Did you mean {near[0]}? " if near else ""
        there = f"There are {', '.join(names)}" if names else "This cluster has no groups"
        raise UsageError(f"{do}: no keyword and no group {', '.join(unknown)}. {hint}{there}")
    if names and (not named or any(value not in (None, 0, math.inf) for value in given.values())):
        wanted = ", ".join(f"{name}=…" for name in names)
        raise UsageError(f"{do}: this cluster has groups, so name them: {do}({wanted})")


def _in_workers(job: JobOptions, name: str, value: Any) -> float:
    """Convert a number of workers, jobs or cores, or memory, to workers."""
    unit = name.rpartition("_")[2].rpartition(" ")[2]
    if unit == "memory":
        if job.spec.memory_limit is None:  # only the job learns of it
            raise UsageError(
                "the workers' memory is not known here, since directives request it: count "
                "workers, jobs or cores, or give memory=…"
            )
        each = max(1, job.spec.memory_limit or int(job.job.worker_memory))
        return (parse_memory(value, name) or 0) / each
    if unit == "jobs":
        return whole_number(value, name, 0) * job.workers
    if unit == "cores":
        return whole_number(value, name, 0) / (job.spec.nthreads or 1)
    return whole_number(value, name, 0)


def _whole_jobs(low: float, high: float, size: int) -> Bounds:
    least, most = math.ceil(low / size) * size, high if high == math.inf else high // size * size
    if least > most or 0 < high < size:
        raise UsageError(
            f"adapt: between a minimum of {low:.3g} and a maximum of {high:.3g} workers there is "
            f"no whole number of jobs, each of which has {size}"
        )
    return least, most if most == math.inf else int(most)


# What the work needs


def demands(
    groups: Sequence[Group], most: Mapping[str, float], target_duration: float, gangs: int = 0
) -> dict[str, int]:
    """Return how many workers each group needs.

    What several groups can run, such as Dask tasks that ask for no resources and `gangs` of so many
    workers, counts for the first of them up to its limit in `most`, and what is left for the next.
    """
    scheduler, found = groups[0].controller.scheduler, {}
    waiting: Sequence[TaskState] = [*scheduler.queued, *scheduler.unrunnable]
    for group in groups:
        able: dict[bool, list[TaskState]] = {True: [], False: []}
        for ts in waiting:
            able[group.can_run(ts)].append(ts)
        needed, limit = _demand(group, able[True], target_duration), most[group.name]
        kept = round(len(able[True]) * min(1.0, limit / needed)) if needed else 0
        waiting = able[False] + able[True][kept:]
        found[group.name] = max(needed, int(min(gangs, limit)))
        gangs = max(0, gangs - found[group.name])
    return found


def _demand(group: Group, waiting: Sequence[TaskState], target_duration: float) -> int:
    """Return how many workers a group needs so that its Dask tasks take `target_duration` seconds.

    Workers that are not idle are needed, too. The rule is that of distributed's
    `Scheduler.adaptive_target`, for a part of the scheduler.
    """
    scheduler, connected = group.controller.scheduler, group.connected()
    workers = [ws for states in connected.values() for ws in states]
    unknown_s, prefixes = scheduler.UNKNOWN_TASK_DURATION, Counter[TaskPrefix]()
    prefixes.update(ts.prefix for ts in waiting)
    waiting_s = sum(
        count * (max(0, one.duration_average) or max(0, 2 * one.max_exec_time) or unknown_s)
        for one, count in prefixes.items()
    )
    threads = math.ceil((sum(ws.occupancy for ws in workers) + waiting_s) / target_duration)
    # a few long Dask tasks do not use many threads
    threads = min(threads, len(waiting) + sum(len(ws.processing) for ws in workers))
    if not workers:
        return max(threads, min(1, len(waiting)))
    needed = math.ceil(threads * len(workers) / sum(ws.nthreads for ws in workers))
    if sum(ws.nbytes for ws in workers) > FULL * sum(ws.memory_limit for ws in workers) > 0:
        needed = max(needed, 2 * len(workers))
    idle = retire.closable(scheduler, group.job_of)
    return max(needed, sum(len(states) for job, states in connected.items() if job not in idle))


class JobAdaptive(Adaptive):
    """Adaptive scaling of groups, each between its own `bounds`, by whole jobs.

    A group gets more workers at once, and fewer once `wait_count` looks in a row agree.
    """

    cluster: JobCluster

    def __init__(self, cluster: JobCluster, bounds: Mapping[str, Bounds], **more: Any) -> None:
        assert cluster.controller is not None
        self.controller = cluster.controller
        least, most = (sum(some) for some in zip(*bounds.values(), strict=True))
        super().__init__(cluster, minimum=least, maximum=most, **more)
        self.bounds = dict(bounds)
        self._looks = {name: deque[int](maxlen=max(1, self.wait_count)) for name in bounds}

    def needed(self) -> dict[str, int]:
        """Return how many workers of each group the work and the gangs need."""
        groups, gangs = self.controller.groups.values(), workers_wanted(self.controller.scheduler)
        return demands(list(groups), self.cluster.limits(), self.target_duration, gangs)

    async def adapt(self) -> None:
        """Wish for what each group needs, and do not wait: the next look may find less."""
        needed = self.needed()
        for name, (least, most) in self.bounds.items():
            group, looks = self.controller.groups[name], self._looks[name]
            looks.append(int(max(least, min(most, needed[name]))))
            planned = len(group.names())
            if looks[-1] > planned:
                group.want(looks[-1])
            elif len(looks) == looks.maxlen and max(looks) < planned:
                group.want(max(looks))
