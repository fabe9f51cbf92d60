"""Demand of groups: whose workers the waiting Dask tasks need, and how many.

distributed's own rules (`Scheduler.adaptive_target`, `Scheduler.workers_to_close`) are asked of a
part of the scheduler: one group's workers, and the Dask tasks that count for it. What the rules
look at is in `Part`, as of distributed 2026.7.1; ``tests/unit/test_demand.py`` notices when that
changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from distributed import Scheduler
from distributed.scheduler import TaskState

from . import retire
from .state import ClusterState

if TYPE_CHECKING:
    from .group_controller import GroupController


def able(groups: Sequence[ClusterState], ts: TaskState) -> tuple[str, ...]:
    """The groups whose workers have the resources that a Dask task asks for."""
    wanted = (ts.resource_restrictions or {}).items()
    return tuple(
        state.group
        for state in groups
        if all(state.resources.get(name, 0) >= amount for name, amount in wanted)
    )


class Part:
    """Workers and waiting Dask tasks of one group, in the place of the scheduler in its rules."""

    def __init__(self, state: ClusterState, waiting: Sequence[TaskState] = ()) -> None:
        self._scheduler = state.scheduler
        workers = [ws for jobs in state.connected().values() for ws in jobs]
        self.workers = {ws.address: ws for ws in workers}
        self.total_occupancy = sum(ws.occupancy for ws in workers)
        self.queued = waiting
        self.unrunnable: dict[TaskState, float] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)

    def target(self, target_duration: float) -> int:
        """Return how many workers the group needs."""
        rule: Callable[..., int] = Scheduler.adaptive_target
        return rule(self, target_duration)

    def workers_to_close(self, **rules: Any) -> list[str]:
        """Return the workers that may close, by address, or by name with ``attribute="name"``."""
        rule: Callable[..., list[str]] = Scheduler.workers_to_close
        return rule(self, **rules)


def targets(
    groups: Sequence[ClusterState],
    most: Mapping[str, float],
    *,
    target_duration: float,
    gangs: int = 0,
) -> dict[str, int]:
    """Return how many workers each group needs.

    What several groups can run, such as Dask tasks that ask for no resources and `gangs` of so many
    workers, counts for the first of them up to its limit in `most`, and what is left for the next.
    """
    scheduler = groups[0].scheduler
    waiting: dict[tuple[str, ...], list[TaskState]] = {}
    for ts in (*scheduler.queued, *scheduler.unrunnable):
        waiting.setdefault(able(groups, ts), []).append(ts)
    found = {}
    for state in groups:
        limit = most[state.group]
        mine = [names for names in waiting if state.group in names]
        part = Part(state, [ts for names in mine for ts in waiting[names]])
        wanted = part.target(target_duration)
        for names in mine:
            passed_on = round(len(waiting[names]) * max(0.0, 1 - limit / wanted)) if wanted else 0
            waiting[names] = waiting[names][:passed_on]
        found[state.group] = max(wanted, int(min(gangs, limit)))
        gangs = max(0, gangs - found[state.group])
    return found


def fail_hopeless(groups: Sequence[GroupController]) -> None:
    """Fail the Dask tasks that only groups without jobs could run which submit no more."""
    states = [group.state for group in groups]
    ended = {
        group.state.group: group.failure
        for group in groups
        if group.failure is not None and not group.state.live()
    }

    def hopeless(ts: TaskState) -> bool:
        names = able(states, ts)
        return bool(names) and ended.keys() >= set(names)

    scheduler = states[0].scheduler
    for error in ended.values():
        if len(ended) < len(groups):
            retire.fail_waiting(scheduler, error, hopeless)
        elif not scheduler.workers:
            retire.fail_waiting(scheduler, error)
