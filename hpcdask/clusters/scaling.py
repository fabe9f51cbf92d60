"""How many workers a cluster has: asked for by hand or by the work."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection
from typing import Any

from distributed.core import Status
from distributed.deploy.adaptive import Adaptive
from distributed.deploy.cluster import Cluster
from distributed.scheduler import WorkerState

from hpcdask.errors import HpcdaskError, UsageError
from hpcdask.queues.base import Queue
from hpcdask.spec import parse_memory

from .keeper import Keeper
from .options import JobOptions


def job_of(state: WorkerState) -> str:
    """A worker's job, by which workers come and go together: the name without the last number."""
    return str(state.name).rpartition("-")[0]


class JobAdaptive(Adaptive):
    """distributed's adaptive scaling, whose way down is the cluster's own."""

    cluster: Scaling

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
        """Wish for more workers; why that fails is told by the cluster."""
        with contextlib.suppress(HpcdaskError):
            await self.cluster._scale(n, by_hand=False)


class Scaling(Cluster):
    """The part of a cluster that wishes for workers.

    Attributes
    ----------
    queue, options, keeper
        The door to the queue, what a job is, and who keeps the jobs; None before the start.
    """

    queue: Queue
    options: JobOptions
    keeper: Keeper | None

    def scale(
        self,
        n: int | None = None,
        jobs: int = 0,
        memory: str | int | None = None,
        cores: int | None = None,
    ) -> Any:
        """Ask for this many workers, and wait until the queue has their jobs.

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
            The queue does not take the jobs, or does not answer. A limit of the site is a warning,
            and tried again later.
        """
        size = self.options.workers
        workers = max(
            n or 0,
            jobs * size,
            math.ceil((parse_memory(memory, "memory") or 0) / self._worker_memory()),
            math.ceil((cores or 0) / self._worker_threads()),
        )
        if workers < 0 or (n or 0) < 0 or jobs < 0:
            raise UsageError(f"scale: {min(n or 0, jobs)} is not a number of workers")
        self._running_keeper()
        if workers:
            self.queue.check()
        return self.sync(self._scale, workers)

    async def _scale(self, n: int, *, by_hand: bool = True) -> None:
        keeper = self._running_keeper()
        if by_hand:
            keeper.forgive()
        keeper.want(math.ceil(n / self.options.workers))
        await keeper.settle(by_hand=by_hand)

    def _scale_down(self, names: Collection[str]) -> None:
        self._running_keeper().dismiss(names)

    def _running_keeper(self) -> Keeper:
        if self.keeper is None or self.status not in (Status.starting, Status.running):
            raise UsageError("this cluster is closed: make a new one")
        return self.keeper

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

        Parameters
        ----------
        minimum, maximum
            Workers.
        minimum_jobs, maximum_jobs, minimum_memory, maximum_memory, minimum_cores, maximum_cores
            The same in jobs, bytes of host memory or threads of all workers together.
        Adaptive
            Class that decides.
        **kwargs
            Passed to `distributed.deploy.adaptive.Adaptive`.

        Raises
        ------
        UsageError
            `minimum` is above `maximum`, or there is no such queueing system on this machine.
        """
        size, memory = self.options.workers, self._worker_memory()
        threads = self._worker_threads()
        low = [minimum or 0]
        high: list[float] = [math.inf if maximum is None else maximum]
        if minimum_jobs is not None:
            low.append(minimum_jobs * size)
        if maximum_jobs is not None:
            high.append(maximum_jobs * size)
        if minimum_memory is not None:
            low.append(math.ceil((parse_memory(minimum_memory, "minimum_memory") or 0) / memory))
        if maximum_memory is not None:
            high.append((parse_memory(maximum_memory, "maximum_memory") or 0) // memory)
        if minimum_cores is not None:
            low.append(math.ceil(minimum_cores / threads))
        if maximum_cores is not None:
            high.append(maximum_cores // threads)
        if max(low) > min(high) or max(low) < 0:
            raise UsageError(
                f"adapt: the minimum of {max(low)} workers is above the maximum of {min(high):g}"
            )
        keeper = self._running_keeper()
        self.queue.check()
        keeper.forgive()
        if size > 1:
            kwargs.setdefault("worker_key", job_of)
        return super().adapt(Adaptive, minimum=max(low), maximum=min(high), **kwargs)

    def _worker_memory(self) -> int:
        return max(1, self.options.spec.memory_limit or int(self.options.job.worker_memory))

    def _worker_threads(self) -> int:
        return self.options.spec.nthreads or 1

    @property
    def plan(self) -> set[str]:
        """Names of the workers that are wanted, for adaptive scaling."""
        return set(self.keeper.ledger.names()) if self.keeper else set()

    @property
    def requested(self) -> set[str]:
        """Names of the workers that are asked for."""
        return self.plan

    @property
    def observed(self) -> set[str]:
        """Names of the workers that are connected."""
        jobs = self.keeper.ledger.connected().values() if self.keeper else ()
        return {str(state.name) for states in jobs for state in states}
