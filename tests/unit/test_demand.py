"""How many workers each group needs, and when there are more or fewer."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from distributed import Client, Scheduler

from hpcdask.clusters.controller import Group
from hpcdask.clusters.scaling import JobAdaptive, bounds, demands
from job_control import control
from launching import until

GROUPS = {"gpu": {"GPU": 1.0, "BOTH": 1.0}, "cpu": {"CPU": 1.0, "BOTH": 1.0}}
TARGET_S = 0.5  # as long as Dask takes a new Dask task to be


def states(scheduler: Scheduler) -> list[Group]:
    return list(control(scheduler=scheduler, groups=GROUPS).groups.values())


async def submit(client: Client, scheduler: Scheduler, count: int, **resources: float) -> Any:
    """Dask tasks that wait, since there are no workers, once the scheduler knows them."""
    before = len(scheduler.tasks)
    futures = client.map(abs, range(count), pure=False, resources=resources or None)
    await until(lambda: len(scheduler.tasks) >= before + count)
    return futures


def run(check: Any) -> None:
    async def with_scheduler() -> None:
        kinds = {"port": 0, "host": "127.0.0.1", "dashboard": False}
        async with (
            Scheduler(**kinds) as scheduler,
            Client(scheduler.address, asynchronous=True) as client,
        ):
            await asyncio.wait_for(check(scheduler, client), 120)

    asyncio.run(with_scheduler())


def test_what_only_one_group_can_run_counts_for_it_alone():
    async def check(scheduler: Scheduler, client: Client) -> None:
        asked = {"GPU": (3, 1), "CPU": (5, 1), "OTHER": (9, 1), "BOTH": (1, 2)}
        kept = [
            await submit(client, scheduler, count, **{name: amount})
            for name, (count, amount) in asked.items()
        ]
        found = demands(states(scheduler), {"gpu": 8, "cpu": 8}, TARGET_S)
        assert found == {"gpu": 3, "cpu": 5}
        assert kept

    run(check)


@pytest.mark.parametrize("resources", [{}, {"BOTH": 1}])
def test_what_several_can_run_counts_for_the_first_up_to_its_limit(resources: dict):
    async def check(scheduler: Scheduler, client: Client) -> None:
        kept = await submit(client, scheduler, 10, **resources)
        groups = states(scheduler)
        for most, expected in [
            ({"gpu": 16, "cpu": 16}, {"gpu": 10, "cpu": 0}),
            ({"gpu": 4, "cpu": 16}, {"gpu": 10, "cpu": 6}),
            ({"gpu": 0, "cpu": 16}, {"gpu": 10, "cpu": 10}),
            ({"gpu": float("inf"), "cpu": 0}, {"gpu": 10, "cpu": 0}),
        ]:
            # what is above its limit the caller cuts off, as distributed does
            assert demands(groups, most, TARGET_S) == expected, most
        assert len(kept) == 10

    run(check)


def test_up_at_once_and_down_when_several_looks_agree():
    async def check() -> None:
        group = control().groups[""]
        group.want(5)
        cluster: Any = SimpleNamespace(controller=group.controller)
        adaptive: Any = JobAdaptive(cluster, {"": (0, 9)}, interval=0, wait_count=3)
        for target, wanted in [(5, 5), (2, 5), (3, 5), (2, 3), (9, 9), (0, 9), (0, 9), (0, 0)]:
            adaptive.needed = lambda target=target: {"": target}
            await adaptive.adapt()
            assert group.wanted == wanted, target

    asyncio.run(check())


def test_a_group_may_be_called_like_a_unit():
    groups: Any = {"gpu_jobs": SimpleNamespace(workers=2)}
    assert bounds(print, groups, {}, {"gpu_jobs": (1, 4)}) == {"gpu_jobs": (2, 4)}
