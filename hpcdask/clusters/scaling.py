"""Numbers of workers: those that `scale` and `adapt` are asked for, and those that the work needs.

Workers come and go by whole jobs, in groups; a cluster without groups has one, whose name is empty.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import math
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from distributed.deploy.adaptive import Adaptive
from distributed.scheduler import TaskState

from hpcdask.client.gang_scheduler import workers_wanted
from hpcdask.errors import UsageError
from hpcdask.spec.parsing import parse_memory

from . import retire
from .keywords import ADAPTIVE, number, seconds

if TYPE_CHECKING:
    from .cluster import JobCluster
    from .group import Group
    from .options import JobOptions

#: Part of the workers' memory above which they are too few, and waiting Dask tasks whose time is
#: estimated one by one; as distributed does both.
FULL, SAMPLE = 0.6, 100

# What is asked for


def wishes(
    groups: Mapping[str, JobOptions], given: Mapping[str, Any], named: Mapping[str, int]
) -> dict[str, int]:
    """Return the workers that `scale` is asked for, by group.

    `given` is its own keywords, of which the one with the most workers counts. Raises UsageError.
    """
    given = {name: value for name, value in given.items() if value}
    _check_groups(groups, "scale", named, given)
    if "" not in groups:
        return {name: number(n, f"scale: {name}", "workers") for name, n in named.items()}
    return {"": math.ceil(max(_in_workers(groups[""], "scale", given), default=0))}


def bounds(
    groups: Mapping[str, JobOptions], given: Mapping[str, Any], named: Mapping[str, Any]
) -> dict[str, tuple[int, float]]:
    """Return the least and most workers that `adapt` is asked for, by group, in whole jobs.

    `given` is the bounds of a cluster without groups, of which the strictest counts; `named` those
    of groups. Raises UsageError.
    """
    found: dict[str, list[list[float]]] = {}
    if "" in groups:
        found[""] = [
            _in_workers(groups[""], "adapt", {name: given[name] for name in given if bound in name})
            for bound in ("minimum", "maximum")
        ]
    else:
        for_all = [name for name, value in given.items() if value not in (None, 0, math.inf)]
        _check_groups(groups, "adapt", named, for_all)
    for name, value in named.items():
        if not isinstance(value, tuple | list) or len(value) != 2:
            raise UsageError(f"adapt: {name}={value!r} is not a least and a most number: (0, 16)")
        found[name] = [
            [] if one in (None, math.inf) else [number(one, f"adapt: {name}", "workers")]
            for one in value
        ]
    return {
        name: _whole_jobs(max(least, default=0), min(most, default=math.inf), groups[name].workers)
        for name, (least, most) in found.items()
    }


def _check_groups(
    groups: Collection[str], call: str, named: Collection[str], unnamed: Collection[str]
) -> None:
    """Raise UsageError for unknown groups, and for a number whose group is not named."""
    names = [name for name in groups if name]
    if unknown := [name for name in named if name not in names]:
        there = f"There are {', '.join(names)}" if names else "This cluster has no groups"
        raise UsageError(f"{call}: no group {', '.join(unknown)}. {there}")
    if names and (unnamed or not named):
        raise UsageError(
            f"{call}: this cluster has groups, so name them: "
            f"{call}({', '.join(f'{name}=…' for name in names)})"
        )


def _in_workers(one: JobOptions, call: str, given: Mapping[str, Any]) -> list[float]:
    """Convert numbers of workers, jobs or cores, and memory, to workers. None means no number."""
    found: list[float] = []
    for name, value in given.items():
        unit = name.rpartition("_")[2]
        if value is None or value == math.inf:
            continue
        if unit == "memory":
            amount = parse_memory(value, name)
            found += [] if amount is None else [amount / one.worker_memory]
        elif unit == "jobs":
            found.append(number(value, f"{call}: {name}", "jobs") * one.workers)
        elif unit == "cores":
            found.append(number(value, f"{call}: {name}", "cores") / one.worker_threads)
        else:
            found.append(number(value, f"{call}: {name}", "workers"))
    return found


def _whole_jobs(low: float, high: float, size: int) -> tuple[int, float]:
    """Return the bounds in workers of whole jobs: the lower one rounded up, the upper one down."""
    if 0 < high < size:
        raise UsageError(
            f"adapt: the maximum of {high:.3g} workers is less than a job, which has {size}"
        )
    least = math.ceil(low / size) * size
    most = high if high == math.inf else int(high // size) * size
    if least > most:
        whole = f", in whole jobs of {size}" if size > 1 else ""
        raise UsageError(
            f"adapt: the minimum of {least} workers is above the maximum of {most:g}{whole}"
        )
    return least, most


def check_adaptive(adapt: Callable[..., Any], given: Collection[str]) -> None:
    """Raise UsageError for keywords of `adapt` that distributed would drop."""
    known = [name for name in inspect.signature(adapt).parameters if name[:3] in ("min", "max")]
    known += ADAPTIVE
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1, 0.5)
            hint = f"did you mean {near[0]}? " if near else ""
            raise UsageError(f"adapt: unknown keyword {name}: {hint}There are {', '.join(known)}")


def times(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the times among the keywords in seconds; they may be texts."""
    return {
        name: seconds(given[name], f"adapt: {name}")
        for name in ("interval", "target_duration")
        # an interval of 0 is for who adapts by hand
        if given.get(name) or (name in given and name != "interval")
    }


# What the work needs


def demand(group: Group, waiting: Sequence[TaskState], target_duration: float) -> int:
    """Return how many workers a group needs so that its Dask tasks take `target_duration` seconds.

    The rule is that of distributed's `Scheduler.adaptive_target`, for a part of the scheduler.
    """
    workers = [ws for states in group.connected().values() for ws in states]
    unknown_s = group.controller.scheduler.UNKNOWN_TASK_DURATION
    sample = waiting[:SAMPLE]
    known_s = [(ts.prefix.duration_average, 2 * ts.prefix.max_exec_time) for ts in sample]
    sampled_s = sum(next((one for one in some if one > 0), unknown_s) for some in known_s)
    waiting_s = sampled_s * len(waiting) / max(1, len(sample))
    threads = math.ceil((sum(ws.occupancy for ws in workers) + waiting_s) / target_duration)
    # a few long Dask tasks do not use many threads
    threads = min(threads, len(waiting) + sum(len(ws.processing) for ws in workers))
    if not workers:
        return max(threads, min(1, len(waiting)))
    needed = math.ceil(threads * len(workers) / sum(ws.nthreads for ws in workers))
    if sum(ws.nbytes for ws in workers) > FULL * sum(ws.memory_limit for ws in workers) > 0:
        needed = max(needed, 2 * len(workers))
    return needed


def demands(
    groups: Sequence[Group],
    most: Mapping[str, float],
    target_duration: float,
    gangs: int = 0,
) -> dict[str, int]:
    """Return how many workers each group needs.

    What several groups can run, such as Dask tasks that ask for no resources and `gangs` of so many
    workers, counts for the first of them up to its limit in `most`, and what is left for the next.
    """
    scheduler = groups[0].controller.scheduler
    waiting: dict[tuple[str, ...], list[TaskState]] = {}
    for ts in (*scheduler.queued, *scheduler.unrunnable):
        able = tuple(group.name for group in groups if group.can_run(ts))
        waiting.setdefault(able, []).append(ts)
    found = {}
    for group in groups:
        limit = most[group.name]
        mine = [names for names in waiting if group.name in names]
        needed = demand(group, [ts for names in mine for ts in waiting[names]], target_duration)
        for names in mine:
            passed_on = round(len(waiting[names]) * max(0.0, 1 - limit / needed)) if needed else 0
            waiting[names] = waiting[names][:passed_on]
        found[group.name] = max(needed, int(min(gangs, limit)))
        gangs = max(0, gangs - found[group.name])
    return found


class JobAdaptive(Adaptive):
    """Adaptive scaling of a group: up at once, down by whole jobs once `wait_count` looks agree."""

    cluster: JobCluster

    def __init__(self, cluster: JobCluster, group: str = "", **keywords: Any) -> None:
        super().__init__(cluster, **keywords)
        self.group = group
        self.groups: dict[str, JobAdaptive] = {group: self}
        self._rules = {"key": self.worker_key, "memory_ratio": keywords.get("memory_ratio")}
        self._looks: deque[int] = deque(maxlen=max(1, self.wait_count))

    async def target(self) -> int:
        """Return the number of workers that the work and the gangs need, or that are not idle."""
        controller = self.cluster.controller
        assert controller is not None
        scheduler, group = controller.scheduler, controller.groups[self.group]
        needed = demands(
            list(controller.groups.values()),
            self.cluster.limits(),
            self.target_duration,
            workers_wanted(scheduler),
        )
        idle = retire.closable(scheduler, group.job_of, **self._rules)
        busy = [ws for job, states in group.connected().items() if job not in idle for ws in states]
        return max(needed[self.group], len(busy))

    async def recommendations(self, target: int) -> dict[str, Any]:
        """Return whether to have more or fewer workers, and how many."""
        self._looks.append(target)
        planned, most = len(self.cluster.names([self.group])), max(self._looks)
        if target > planned:
            return {"status": "up", "n": target}
        if len(self._looks) == self._looks.maxlen and most < planned:
            return {"status": "down", "n": most}
        return {"status": "same"}

    async def scale_up(self, n: int) -> None:  # type: ignore[override]
        """Wish for so many workers, and do not wait: the next look may find fewer to be enough."""
        with contextlib.suppress(UsageError):  # the cluster is closed
            self.cluster.wish({self.group: n})

    scale_down = scale_up  # type: ignore[assignment]


class GroupsAdaptive(JobAdaptive):
    """Adaptive scaling of several groups, each between `bounds` of its own."""

    def __init__(
        self,
        cluster: JobCluster,
        bounds: Mapping[str, tuple[int, float]],
        interval: Any = None,
        **keywords: Any,
    ) -> None:
        super().__init__(cluster, interval=interval, **keywords)
        self.groups = {
            name: JobAdaptive(cluster, name, interval=0, minimum=least, maximum=most, **keywords)
            for name, (least, most) in bounds.items()
        }

    async def adapt(self) -> None:
        """Look at each group."""
        for one in self.groups.values():
            await one.adapt()
