"""Number of a cluster's workers: asked for by hand or by the work."""

from __future__ import annotations

import asyncio
import difflib
import inspect
import math
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping
from typing import Any

from distributed.core import Status
from distributed.deploy.adaptive import Adaptive
from distributed.deploy.cluster import Cluster
from distributed.scheduler import WorkerState

from hpcdask.client.gang_scheduler import MOST_WORKERS
from hpcdask.errors import HpcdaskError, UsageError
from hpcdask.queues.base import Queue
from hpcdask.security.ports import PER_SCHEDULER, check_size
from hpcdask.spec.parsing import parse_memory
from hpcdask.upstream import distributed as upstream

from .adaptive import GroupsAdaptive, JobAdaptive
from .controller import JobController
from .display import JobTable
from .groups import GroupSpec
from .keywords import number, seconds
from .messages import SHUT_DOWN

#: What distributed's `Adaptive` takes beside the bounds. It takes other words too, and drops them.
ADAPTIVE = ("interval", "memory_ratio", "target_duration", "wait_count", "worker_key")
#: Calls of `scale` under way: the event loop itself holds tasks weakly.
_scalings: set[asyncio.Future[None]] = set()


def job_of(state: WorkerState) -> str:
    """A worker's job, by which workers come and go together: the name without the last number."""
    return str(state.name).rpartition("-")[0]


def _workers(
    value: Any, name: str, of: str, *, each: int = 1, share: int = 1, default: float = 0
) -> float:
    """Convert a bound to workers: multiply by `each`, divide by `share`."""
    if value is None or value == math.inf:
        return default
    return number(value, f"adapt: {name}", of) * each / share


def _whole_jobs(low: float, high: float, size: int) -> tuple[int, float]:
    """The bounds in workers of whole jobs: the lower one rounded up, the upper one down."""
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


def _group_bounds(name: str, value: Any, size: int) -> tuple[int, float]:
    """The least and most workers of a group, in whole jobs."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise UsageError(f"adapt: {name}={value!r} is not a least and a most number: (0, 16)")
    low, high = value
    return _whole_jobs(
        _workers(low, name, "workers"), _workers(high, name, "workers", default=math.inf), size
    )


def _check_names(given: Collection[str]) -> None:
    bounds = [
        name for name in inspect.signature(Scaling.adapt).parameters if name[:3] in ("min", "max")
    ]
    for name in given:
        if name not in ADAPTIVE:
            near = difflib.get_close_matches(name, [*bounds, *ADAPTIVE], 1, 0.5)
            hint = f"did you mean {near[0]}? " if near else ""
            raise UsageError(
                f"adapt: unknown keyword {name}: {hint}There are {', '.join([*bounds, *ADAPTIVE])}"
            )


def _times(given: Mapping[str, Any]) -> dict[str, Any]:
    """The times among the keywords in seconds; they may be texts."""
    return {
        name: seconds(given[name], f"adapt: {name}")
        for name in ("interval", "target_duration")
        # an interval of 0 is for who adapts by hand
        if given.get(name) or (name in given and name != "interval")
    }


async def wait_unless(
    workers: Coroutine[Any, Any, None],
    why_not: Callable[[], Awaitable[HpcdaskError | None]],
    jobs: Callable[[], JobTable],
) -> None:
    """Wait for workers, or raise why they will not come; a wait that is too long tells of jobs."""
    waiting = asyncio.ensure_future(workers)
    try:
        while not waiting.done():
            if (failure := await why_not()) is not None:
                raise failure
            await asyncio.wait([waiting], timeout=0.1)
        await waiting
    except TimeoutError as error:
        error.add_note(f"Jobs: {jobs().counts() or 'none'}")
        raise
    finally:
        waiting.cancel()


class Scaling(Cluster):
    """The part of a cluster that wishes for workers; `controller` is None before the start."""

    queue: Queue
    groups: dict[str, GroupSpec]
    controller: JobController | None = None

    def scale(
        self,
        n: int | None = None,
        jobs: int = 0,
        memory: str | int | None = None,
        cores: int | None = None,
        **groups: int,
    ) -> Any:
        """Ask for a number of workers, and wait until the queue has their jobs.

        The number is rounded up to whole jobs. If you give several parameters, the one that results
        in the most workers counts. In an event loop the call returns at once; await what it returns
        to wait for the queue.

        Parameters
        ----------
        n
            Workers.
        jobs
            Jobs.
        memory
            Host memory of all workers together, in bytes or as text.
        cores
            Threads of all workers together.
        **groups
            In a cluster with groups, the workers of each, as in ``scale(gpu=8, cpu=32)``, in place
            of the other parameters. Groups that are not named stay as they are.

        Raises
        ------
        UsageError
            There is no such group, or no such queueing system on this machine.
        Refused, QueueError
            The queue does not take the jobs, or does not answer. A limit of the site is only a
            warning: the cluster tries again later.
        """
        given = {"n": n, "jobs": jobs, "memory": memory, "cores": cores}
        self._check_groups("scale", groups, [name for name, value in given.items() if value])
        wishes = {name: number(n, f"scale: {name}", "workers") for name, n in groups.items()}
        if one := self.groups.get(""):
            wishes[""] = max(
                number(n or 0, "scale: n", "workers"),
                number(jobs or 0, "scale: jobs", "jobs") * one.size,
                math.ceil((parse_memory(memory, "memory") or 0) / one.worker_memory),
                math.ceil(number(cores or 0, "scale: cores", "cores") / one.worker_threads),
            )
        self._running_controller()
        if any(wishes.values()):
            self.queue.check()
        if not self.asynchronous:
            return self.sync(self._scale, wishes)
        scaling = asyncio.ensure_future(self._scale(wishes))
        _scalings.add(scaling)
        scaling.add_done_callback(lambda _: scaling.cancelled() or scaling.exception())
        scaling.add_done_callback(_scalings.discard)
        return scaling

    def _check_groups(self, call: str, named: Collection[str], unnamed: Collection[str]) -> None:
        """Refuse groups that there are not, and what leaves open which group it is for."""
        names = [name for name in self.groups if name]
        if unknown := [name for name in named if name not in names]:
            there = f"There are {', '.join(names)}" if names else "This cluster has no groups"
            raise UsageError(f"{call}: no group {', '.join(unknown)}. {there}")
        if names and (unnamed or not named):
            raise UsageError(
                f"{call}: this cluster has groups, so name them: "
                f"{call}({', '.join(f'{name}=…' for name in names)})"
            )

    def _tell_most_workers(self, controller: JobController) -> None:
        """Tell gangs how many workers there may come to be."""

        def most() -> float:
            limits, groups = self._limits(), controller.groups
            return sum(limits[name] for name, one in groups.items() if one.failure is None)

        controller.scheduler.extensions[MOST_WORKERS] = most

    def _limits(self) -> dict[str, float]:
        """Return how many workers each group may come to have without further ado."""
        adaptive = upstream.adaptive(self)
        limits: dict[str, float] = {name: len(self._names([name])) for name in self.groups}
        if adaptive is not None and adaptive.state in ("starting", "running"):
            each = adaptive.groups if isinstance(adaptive, GroupsAdaptive) else {"": adaptive}
            limits |= {name: one.maximum for name, one in each.items()}
        return limits

    def _wish(self, workers: int | Mapping[str, int]) -> JobController:
        """Set the number of workers, or that of each of these groups."""
        wishes = workers if isinstance(workers, Mapping) else {"": workers}
        controller = self._running_controller()
        for name, n in wishes.items():
            controller.groups[name].set_target(math.ceil(n / self.groups[name].size))
        return controller

    async def _scale(self, wishes: Mapping[str, int]) -> None:
        controller = self._running_controller()
        self._check_ports(wishes)
        for name in wishes:
            controller.groups[name].reset_failures()
        await self._wish(wishes).wait_submitted(wishes)

    def _check_ports(self, wishes: Mapping[str, int]) -> None:
        """Refuse more workers of this machine than the range of ports has room for."""
        if not self.queue.is_local or self.controller is None:
            return
        wanted = {
            name: one.state.wanted * one.state.size for name, one in self.controller.groups.items()
        }
        specs = [group.options.spec for group in self.groups.values()]
        check_size(
            specs[0].port_range,
            sum({**wanted, **wishes}.values()),
            ucx=all(spec.protocol == "ucx" for spec in specs),
            more=PER_SCHEDULER,
            where="on this machine",
            option="port_range",
        )

    def _scale_down(self, names: Collection[str]) -> None:
        self._running_controller().groups[""].dismiss(names)

    def _too_few(self, n_workers: int) -> HpcdaskError | None:
        """Why there will not be so many workers; None if they may come."""
        groups = self.controller.groups.values() if self.controller else ()
        failed = [group for group in groups if group.failure is not None]
        left = self._names(one.state.group for one in groups if one not in failed)
        there = left | self.observed
        if failed and (len(failed) == len(groups) or len(there) < n_workers):
            return failed[0].failure
        return None

    def _running_controller(self) -> JobController:
        if self.controller is None or self.status not in (Status.starting, Status.running):
            failure = self.controller.failure if self.controller else None
            shut_down = failure is not None and str(failure) == SHUT_DOWN
            raise UsageError(SHUT_DOWN if shut_down else "this cluster is closed: make a new one")
        return self.controller

    def adapt(  # type: ignore[override]
        self,
        *,
        minimum: int | None = 0,
        maximum: int | float | None = math.inf,
        minimum_jobs: int | None = None,
        maximum_jobs: int | None = None,
        minimum_memory: str | int | None = None,
        maximum_memory: str | int | None = None,
        minimum_cores: int | None = None,
        maximum_cores: int | None = None,
        Adaptive: type[Adaptive] = JobAdaptive,
        **kwargs: Any,
    ) -> Adaptive:
        """Make the number of workers follow the work.

        Minimums are rounded up to whole jobs, maximums down. The strictest bound counts.

        Parameters
        ----------
        minimum, maximum : int
            Bound in workers. Default: 0, and no maximum.
        minimum_jobs, maximum_jobs : int
            Bound in jobs.
        minimum_memory, maximum_memory : str or int
            Bound in host memory of all workers together.
        minimum_cores, maximum_cores : int
            Bound in threads of all workers together.
        Adaptive : type
            Class that decides.
        **kwargs
            ``interval``, ``target_duration`` (times), ``wait_count``, ``worker_key`` and
            ``memory_ratio`` of `distributed.deploy.adaptive.Adaptive`. In a cluster with groups,
            the least and most workers of each, as in ``adapt(gpu=(0, 16), cpu=(0, 64))``, in place
            of the other bounds. Groups that are not named stay as they are.

        Returns
        -------
        distributed.deploy.adaptive.Adaptive
            Its ``stop()`` ends adaptive scaling, and the workers stay. `scale` does not end it: the
            next look overrules the number.

        Raises
        ------
        UsageError
            A keyword is unknown, a value is not understood, `minimum` is above `maximum`,
            `maximum` is less than one job, or this machine has no such queueing system.
        """
        if "" not in self.groups:
            given = {name: one for name, one in locals().items() if name[:3] in ("min", "max")}
            for_all = [name for name, one in given.items() if one not in (None, 0, math.inf)]
            return self._adapt_groups(kwargs, for_all + ["Adaptive"] * (Adaptive != JobAdaptive))
        if Adaptive is JobAdaptive:
            _check_names(kwargs)
        low = self._bounds("minimum", 0, minimum, minimum_jobs, minimum_memory, minimum_cores)
        high = self._bounds(
            "maximum", math.inf, maximum, maximum_jobs, maximum_memory, maximum_cores
        )
        least, most = _whole_jobs(max(low), min(high), self.groups[""].size)
        return self._start_adaptive(Adaptive, [""], minimum=least, maximum=most, **kwargs)

    def _adapt_groups(self, given: dict[str, Any], for_all: Collection[str]) -> Adaptive:
        named = {name: given.pop(name) for name in list(given) if name not in ADAPTIVE}
        self._check_groups("adapt", named, for_all)
        bounds = {
            name: _group_bounds(name, value, self.groups[name].size)
            for name, value in named.items()
        }
        return self._start_adaptive(GroupsAdaptive, bounds, bounds=bounds, **given)

    def _start_adaptive(
        self, kind: type[Adaptive], names: Collection[str], **keywords: Any
    ) -> Adaptive:
        keywords |= _times(keywords)
        controller = self._running_controller()
        self.queue.check()
        for name in names:
            controller.groups[name].reset_failures()
        if any(self.groups[name].size > 1 for name in names):
            keywords.setdefault("worker_key", job_of)
        return super().adapt(kind, **keywords)

    def _bounds(
        self, name: str, default: float, workers: Any, jobs: Any, memory: Any, cores: Any
    ) -> list[float]:
        """Return each of a bound's four forms in workers, `default` where it is not given."""
        one = self.groups[""]
        amount = parse_memory(memory, f"{name}_memory")
        return [
            _workers(workers, name, "workers", default=default),
            _workers(jobs, f"{name}_jobs", "jobs", each=one.size, default=default),
            default if amount is None else amount / one.worker_memory,
            _workers(cores, f"{name}_cores", "cores", share=one.worker_threads, default=default),
        ]

    @property
    def plan(self) -> set[str]:
        """Names of the workers that are wanted, for adaptive scaling."""
        return self._names(self.groups)

    #: Names of the workers that are asked for.
    requested = plan

    @property
    def observed(self) -> set[str]:
        """Names of the workers that are connected."""
        return self._connected(self.groups)

    def _names(self, groups: Iterable[str]) -> set[str]:
        """Names of the workers of these groups that are wanted."""
        known = self.controller.groups if self.controller else {}
        return {name for group in groups if group in known for name in known[group].state.names()}

    def _connected(self, groups: Iterable[str]) -> set[str]:
        """Names of those that are connected."""
        known = self.controller.groups if self.controller else {}
        states = [known[group].state for group in groups if group in known]
        return {str(ws.name) for one in states for jobs in one.connected().values() for ws in jobs}
