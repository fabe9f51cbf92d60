"""How many workers each group needs, on a scheduler with workers that compute nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from distributed import Client, Scheduler, Worker

from hpcdask.clusters import demand
from hpcdask.clusters.job import Policy
from hpcdask.clusters.state import ClusterState
from launching import until

GROUPS = {"gpu": {"GPU": 1.0, "BOTH": 1.0}, "cpu": {"CPU": 1.0, "BOTH": 1.0}}
RULE = {"target_duration": 0.5}  # as long as Dask takes a new Dask task to be


def states(scheduler: Scheduler) -> list[ClusterState]:
    return [
        ClusterState(
            scheduler, "ab", group=name, size=1, resources=given, policy=Policy(), say=print
        )
        for name, given in GROUPS.items()
    ]


async def submit(client: Client, scheduler: Scheduler, count: int, **resources: float) -> Any:
    """Dask tasks that wait, once the scheduler knows them."""
    before = len(scheduler.tasks)
    futures = client.map(wait, range(count), pure=False, resources=resources or None)
    await until(lambda: len(scheduler.tasks) >= before + count)
    return futures


go_on = threading.Event()


def wait(_: int) -> None:
    assert go_on.wait(60)


@contextmanager
def held() -> Iterator[None]:
    """What runs, runs on until the end."""
    go_on.clear()
    try:
        yield
    finally:
        go_on.set()


def run(check: Any) -> None:
    async def with_scheduler() -> None:
        kinds = {"port": 0, "host": "127.0.0.1", "dashboard": False}
        async with (
            Scheduler(**kinds) as scheduler,
            Client(scheduler.address, asynchronous=True) as client,
        ):
            with held():
                await asyncio.wait_for(check(scheduler, client), 120)

    asyncio.run(with_scheduler())


def test_what_only_one_group_can_run_counts_for_it_alone():
    async def check(scheduler: Scheduler, client: Client) -> None:
        kept = [
            await submit(client, scheduler, 3, GPU=1),
            await submit(client, scheduler, 5, CPU=1),
        ]
        kept += [
            await submit(client, scheduler, 9, OTHER=1),
            await submit(client, scheduler, 1, GPU=2),
        ]
        found = demand.targets(states(scheduler), {"gpu": 8, "cpu": 8}, **RULE)
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
            assert demand.targets(groups, most, **RULE) == expected, most
        assert len(kept) == 10

    run(check)


def test_gangs_take_the_first_groups_first():
    async def check(scheduler: Scheduler, client: Client) -> None:
        groups = states(scheduler)
        found = demand.targets(groups, {"gpu": 3, "cpu": 9}, gangs=5, **RULE)
        assert found == {"gpu": 3, "cpu": 2}

    run(check)


def test_workers_of_a_group_are_closed_for_its_own_needs_only():
    async def worker(scheduler: Scheduler, group: str, number: int) -> Worker:
        options = {"resources": GROUPS[group], "nthreads": 1, "dashboard": False}
        name = f"ab.{group}-{number}-0-0"
        return await Worker(scheduler.address, name=name, memory_limit="1GiB", **options)

    async def check(scheduler: Scheduler, client: Client) -> None:
        workers = [await worker(scheduler, "gpu", 1), await worker(scheduler, "gpu", 2)]
        workers += [await worker(scheduler, "cpu", 3)]
        kept = await submit(client, scheduler, 1, CPU=1)
        await until(lambda: any(ws.processing for ws in scheduler.workers.values()))
        gpu, cpu = states(scheduler)
        most = {"gpu": 4, "cpu": 4}
        assert demand.targets([gpu, cpu], most, **RULE) == {"gpu": 0, "cpu": 1}
        names = demand.Part(gpu).workers_to_close(target=0, attribute="name")
        assert sorted(names) == ["ab.gpu-1-0-0", "ab.gpu-2-0-0"]
        assert demand.Part(cpu).workers_to_close(attribute="name") == []
        go_on.set()
        await client.gather(kept)
        for one in workers:
            await one.close()

    run(check)
