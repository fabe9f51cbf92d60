"""Workers that a run should have, and whether enough are left."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set

from hpcdask.errors import LaunchError
from hpcdask.logs import plural, some
from hpcdask.node.placement import WorkerPlacement
from hpcdask.spec.specs import RunSpec


class WantedWorkers:
    """The names of the workers that are wanted; fewer of them as some are given up."""

    def __init__(self, spec: RunSpec) -> None:
        self.names: set[str] = set()
        self.on_device = False
        self._spec = spec
        self._by_rank: dict[int, set[str]] = {}

    def plan(self, placements: Mapping[int, Sequence[WorkerPlacement]]) -> None:
        """These will be started, by rank."""
        self._by_rank = {rank: {one.name for one in group} for rank, group in placements.items()}
        self.names = set().union(*self._by_rank.values())
        self.on_device = any(one.gpu for group in placements.values() for one in group)

    @property
    def least(self) -> int:
        """Return how many must register before the program starts."""
        return min(self._spec.workers_min or len(self.names), len(self.names))

    def are_enough(self, registered: Set[str]) -> bool:
        """Return whether the program may start. Numbers are compared first, at each arrival."""
        least = self.least
        return len(registered) >= least and len(registered & self.names) >= least

    def enough_without(self, rank: int, name: str | None = None) -> bool:
        """Give up a worker of a rank, by default all; say whether --workers-min is still met."""
        self.names -= {name} if name else self._by_rank.get(rank, set())
        return self._spec.workers_min is not None and len(self.names) >= self._spec.workers_min

    def give_up(self) -> None:
        """None is wanted any more."""
        self.names = set()

    def too_late(self, registered: Collection[str]) -> LaunchError:
        """The error that says which did not register."""
        missing = some(sorted(self.names - set(registered)))
        return LaunchError(
            f"of {plural(len(self.names), 'worker')}, these did not register within "
            f"{self._spec.timeout:g} s: {missing}. Allow more with --timeout, or start with fewer "
            f"by --workers-min"
        )
