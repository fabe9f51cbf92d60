"""How many workers a cluster has: asked for by hand or by the work."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import inspect
import math
from collections.abc import Collection, Mapping
from typing import Any

from distributed.core import Status
from distributed.deploy.adaptive import Adaptive
from distributed.deploy.cluster import Cluster
from distributed.scheduler import WorkerState

from hpcdask.client.gang_scheduler import MOST_WORKERS, workers_wanted
from hpcdask.errors import UsageError
from hpcdask.queues.base import Queue
from hpcdask.spec.parsing import parse_memory

from .controller import JobController
from .keywords import number, seconds
from .messages import SHUT_DOWN
from .options import JobOptions

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
    """How many workers a bound is: `each` for one of what it counts, or one for a `share`."""
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


class JobAdaptive(Adaptive):
    """distributed's adaptive scaling, whose way down is the cluster's own."""

    cluster: Scaling

    async def target(self) -> int:
        """As many as the work needs, or the gangs that run or wait."""
        controller = self.cluster.controller
        gangs = 0 if controller is None else workers_wanted(controller.state.scheduler)
        return max(int(await super().target()), gangs)

    async def workers_to_close(self, target: int) -> list[str]:
        """Of those that stay: the others go by themselves, or are not the cluster's."""
        staying = self.observed & self.plan
        names = [name for name in await super().workers_to_close(target) if name in staying]
        return names[: max(0, len(staying) - target)]

    async def scale_down(self, workers: Collection[str]) -> None:  # type: ignore[override]
        """End the jobs of these workers without losing what they hold."""
        if workers:
            self.cluster._scale_down(workers)
        # Less than a job is kept. distributed would count its names from the start, each from
        # another one, so that they never came together; they stay due for as long as it names them
        for name in self.plan.intersection(workers):
            self.close_counts[name] = self.wait_count

    async def scale_up(self, n: int) -> None:  # type: ignore[override]
        """Wish for more workers, and do not wait: the next look may find fewer to be enough."""
        with contextlib.suppress(UsageError):  # the cluster is closed
            self.cluster._wish(n)


class Scaling(Cluster):
    """The part of a cluster that wishes for workers; `controller` is None before the start."""

    queue: Queue
    options: JobOptions
    controller: JobController | None = None

    def scale(
        self,
        n: int | None = None,
        jobs: int = 0,
        memory: str | int | None = None,
        cores: int | None = None,
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

        Raises
        ------
        UsageError
            There is no such queueing system on this machine.
        Refused, QueueError
            The queue does not take the jobs, or does not answer. A limit of the site is only a
            warning: the cluster tries again later.
        """
        workers = max(
            number(n or 0, "scale: n", "workers"),
            number(jobs or 0, "scale: jobs", "jobs") * self.options.workers,
            math.ceil((parse_memory(memory, "memory") or 0) / self._worker_memory()),
            math.ceil(number(cores or 0, "scale: cores", "cores") / self._worker_threads()),
        )
        self._running_controller()
        if workers:
            self.queue.check()
        if not self.asynchronous:
            return self.sync(self._scale, workers)
        scaling = asyncio.ensure_future(self._scale(workers))
        _scalings.add(scaling)
        scaling.add_done_callback(lambda _: scaling.cancelled() or scaling.exception())
        scaling.add_done_callback(_scalings.discard)
        return scaling

    def _tell_most_workers(self, controller: JobController) -> None:
        """Let gangs know how many workers there may come to be."""

        def most() -> float:
            adaptive = self._adaptive
            if controller.failure is not None:
                return 0
            if adaptive is not None and adaptive.state in ("starting", "running"):
                return float(adaptive.maximum)
            return len(self.plan)

        controller.state.scheduler.extensions[MOST_WORKERS] = most

    def _wish(self, n: int) -> JobController:
        controller = self._running_controller()
        controller.set_target(math.ceil(n / self.options.workers))
        return controller

    async def _scale(self, n: int) -> None:
        self._running_controller().reset_failures()
        await self._wish(n).wait_submitted()

    def _scale_down(self, names: Collection[str]) -> None:
        self._running_controller().dismiss(names)

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
        """Let the number of workers follow the work.

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
            ``memory_ratio`` of `distributed.deploy.adaptive.Adaptive`.

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
        if Adaptive is JobAdaptive:
            _check_names(kwargs)
        low = self._bounds("minimum", 0, minimum, minimum_jobs, minimum_memory, minimum_cores)
        high = self._bounds(
            "maximum", math.inf, maximum, maximum_jobs, maximum_memory, maximum_cores
        )
        least, most = _whole_jobs(max(low), min(high), self.options.workers)
        kwargs |= _times(kwargs)
        controller = self._running_controller()
        self.queue.check()
        controller.reset_failures()
        if self.options.workers > 1:
            kwargs.setdefault("worker_key", job_of)
        return super().adapt(Adaptive, minimum=least, maximum=most, **kwargs)

    def _bounds(
        self, name: str, default: float, workers: Any, jobs: Any, memory: Any, cores: Any
    ) -> list[float]:
        """What each of a bound's four forms is in workers, `default` where it is not given."""
        size, threads = self.options.workers, self._worker_threads()
        amount = parse_memory(memory, f"{name}_memory")
        return [
            _workers(workers, name, "workers", default=default),
            _workers(jobs, f"{name}_jobs", "jobs", each=size, default=default),
            default if amount is None else amount / self._worker_memory(),
            _workers(cores, f"{name}_cores", "cores", share=threads, default=default),
        ]

    def _worker_memory(self) -> int:
        return max(1, self.options.spec.memory_limit or int(self.options.job.worker_memory))

    def _worker_threads(self) -> int:
        return self.options.spec.nthreads or 1

    @property
    def plan(self) -> set[str]:
        """Names of the workers that are wanted, for adaptive scaling."""
        return set(self.controller.state.names()) if self.controller else set()

    #: Names of the workers that are asked for.
    requested = plan

    @property
    def observed(self) -> set[str]:
        """Names of the workers that are connected."""
        jobs = self.controller.state.connected().values() if self.controller else ()
        return {str(state.name) for states in jobs for state in states}
