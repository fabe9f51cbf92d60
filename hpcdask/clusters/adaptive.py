"""distributed's adaptive scaling, of a cluster or of each of its groups."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from distributed.core import Status
from distributed.deploy.adaptive import Adaptive

from hpcdask.client.gang_scheduler import workers_wanted
from hpcdask.errors import UsageError

from . import demand

if TYPE_CHECKING:
    from .scaling import Scaling


class JobAdaptive(Adaptive):
    """distributed's adaptive scaling, whose way down is the cluster's own."""

    cluster: Scaling

    async def target(self) -> int:
        """Return the number of workers that the work needs, or the gangs that run or wait."""
        controller = self.cluster.controller
        gangs = 0 if controller is None else workers_wanted(controller.scheduler)
        return max(int(await super().target()), gangs)

    async def workers_to_close(self, target: int) -> list[str]:
        """Return the workers to close among the cluster's own that do not leave by themselves."""
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


class GroupOfWorkers:
    """Group that `JobAdaptive` asks in the place of the cluster and of the scheduler."""

    controller = None  # the demand has the gangs

    def __init__(self, cluster: Scaling, name: str) -> None:
        self._cluster = cluster
        self._name = name
        self.scheduler_comm = self

    @property
    def status(self) -> Status:
        """The cluster's."""
        return self._cluster.status

    @property
    def plan(self) -> set[str]:
        """Names of the workers that are wanted."""
        return self._cluster._names([self._name])

    #: Names of the workers that are asked for.
    requested = plan

    @property
    def observed(self) -> set[str]:
        """Names of the workers that are connected."""
        return self._cluster._connected([self._name])

    def _wish(self, n: int) -> None:
        self._cluster._wish({self._name: n})

    def _scale_down(self, names: Collection[str]) -> None:
        self._cluster._running_controller().groups[self._name].dismiss(names)

    # What is asked of the scheduler

    async def adaptive_target(self, target_duration: float) -> int:
        """Return how many workers the group needs."""
        controller = self._cluster._running_controller()
        return demand.targets(
            [group.state for group in controller.groups.values()],
            self._cluster._limits(),
            target_duration=target_duration,
            gangs=workers_wanted(controller.scheduler),
        )[self._name]

    async def workers_to_close(self, **rules: Any) -> list[str]:
        """Names of workers that may be closed."""
        group = self._cluster._running_controller().groups[self._name]
        return demand.Part(group.state).workers_to_close(**rules)


class GroupsAdaptive(JobAdaptive):
    """Adaptive scaling of several groups, each between `bounds` of its own."""

    def __init__(
        self,
        cluster: Scaling,
        bounds: Mapping[str, tuple[int, float]],
        interval: Any = None,
        **keywords: Any,
    ) -> None:
        self.groups = {}
        for name, (least, most) in bounds.items():
            group: Any = GroupOfWorkers(cluster, name)
            self.groups[name] = JobAdaptive(
                group, interval=0, minimum=least, maximum=most, **keywords
            )
        super().__init__(cluster, interval=interval, **keywords)

    async def adapt(self) -> None:
        """Look at each group."""
        for one in self.groups.values():
            await one.adapt()
