"""Short Dask tasks with small results go to workers in groups, and no others."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import dask
import pytest
from distributed import Client, LocalCluster, Nanny, get_client, wait, worker_client

from hpcdask.client import small_tasks
from hpcdask.client.small_tasks import GROUP, SmallTasks
from launching import wait_for

COUNT = 400
#: How many tasks dask gives a worker of one thread: 1.1, rounded up.
USUAL = 2


class Watched(SmallTasks):
    """Notes how many tasks of each kind the worker has whenever it may get more."""

    def __init__(self, scheduler: Any) -> None:
        self.had: list[Counter[str]] = []
        self.fillings = 0
        super().__init__(scheduler)

    def _maybe_fill(self, *, stimulus_id: str) -> None:
        before = self._sent()
        super()._maybe_fill(stimulus_id=stimulus_id)
        self.had.append(self._sent())
        self.fillings += self.had[-1].total() > before.total()

    def _sent(self) -> Counter[str]:
        workers = self._scheduler.workers.values()
        return Counter(task.prefix.name for worker in workers for task in worker.processing)

    def most(self, kind: Callable[..., Any]) -> int:
        return max(had[kind.__name__] for had in self.had)


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    """One worker of one thread."""
    with LocalCluster(
        n_workers=1, threads_per_worker=1, processes=False, dashboard_address=None
    ) as cluster:
        yield cluster


def watched(cluster: LocalCluster) -> Watched:
    Watched.watch(cluster.scheduler)
    plugin = cluster.scheduler.plugins[SmallTasks.name]
    assert isinstance(plugin, Watched)
    return plugin


def compute(cluster: LocalCluster, function: Callable[[int], Any], count: int = COUNT) -> list:
    with Client(cluster) as client:
        return client.gather(client.map(function, range(count), pure=False))


def small(number: int) -> int:
    return number


def large(number: int) -> bytes:
    return bytes(2 * small_tasks.SMALL_NBYTES)


def long(number: int) -> int:
    time.sleep(2 * small_tasks.SHORT_S)
    return number


def test_small_ones_are_sent_in_groups(cluster: LocalCluster):
    plugin = watched(cluster)
    assert compute(cluster, small) == list(range(COUNT))
    assert plugin.most(small) == GROUP
    plugin.fillings = 0
    assert compute(cluster, small) == list(range(COUNT))
    assert plugin.fillings < COUNT / 4  # usually one filling for each that is done


def test_tasks_that_follow_each_other_go_to_the_same_worker():
    """A sum of four neighbours then has what it adds. dask alone deals them out in turn."""
    options = {"n_workers": 2, "threads_per_worker": 1, "processes": False}
    with LocalCluster(**options, dashboard_address=None) as cluster, Client(cluster) as client:
        SmallTasks.watch(cluster.scheduler)
        client.gather(client.map(small, range(COUNT), pure=False))
        futures = client.map(small, range(4 * COUNT), pure=False)
        client.gather(futures)
        tasks = sorted(
            (cluster.scheduler.tasks[future.key] for future in futures),
            key=lambda task: task.priority,
        )
        places = [worker for task in tasks for worker in task.who_has]
        changes = sum(one is not other for one, other in pairwise(places))
        assert len(set(places)) == 2
        assert changes < len(places) / 4


def parent(count: int) -> int:
    with worker_client() as client:
        return sum(client.gather(client.map(small, range(count), pure=False)))


def test_tasks_that_wait_for_small_ones_do_not_keep_them_from_a_worker(cluster: LocalCluster):
    """They count for the scheduler as unfinished, and would wait for ever."""
    watched(cluster)
    compute(cluster, small)
    with Client(cluster) as client:
        parents = client.map(parent, [50] * 45, pure=False)
        assert client.gather(parents) == [sum(range(50))] * 45


def child(count: int) -> int:
    client = get_client()
    return sum(client.gather(client.map(small, range(count), pure=False)))


def grandparent(count: int) -> int:
    with worker_client() as client:
        return client.submit(child, count).result()


def test_a_free_thread_gets_small_tasks_for_which_another_one_waits():
    """Those that left their threads kept the worker from being idle, and it got no more."""
    options = {"n_workers": 1, "threads_per_worker": 2, "processes": False}
    with LocalCluster(**options, dashboard_address=None) as cluster, Client(cluster) as client:
        SmallTasks.watch(cluster.scheduler)
        client.gather(client.map(small, range(COUNT), pure=False))
        future = client.submit(grandparent, COUNT)
        assert future.result(timeout=60) == sum(range(COUNT))


@pytest.mark.parametrize("function", [large, long])
def test_others_are_sent_as_ever(cluster: LocalCluster, function: Callable[[int], Any]):
    plugin = watched(cluster)
    assert len(compute(cluster, function, 40)) == 40
    plugin.had.clear()
    assert len(compute(cluster, function, 40)) == 40
    assert plugin.most(function) == USUAL


def test_each_kind_counts_by_itself(cluster: LocalCluster):
    plugin = watched(cluster)
    compute(cluster, small)
    compute(cluster, large, 40)
    plugin.had.clear()
    compute(cluster, large, 40)
    assert plugin.most(large) == USUAL
    plugin.had.clear()
    compute(cluster, small)
    assert plugin.most(small) == GROUP


def test_others_that_come_meanwhile_are_sent_as_ever(cluster: LocalCluster):
    plugin = watched(cluster)
    compute(cluster, large, 40)
    compute(cluster, small)
    plugin.had.clear()
    with Client(cluster) as client:
        first = client.map(small, range(3 * COUNT), pure=False)
        wait_for(lambda: plugin.had, 20)
        wait([*first, *client.map(large, range(40), pure=False)])
    assert plugin.most(small) == GROUP
    assert plugin.most(large) <= USUAL


def test_others_behind_small_ones_of_the_same_graph_are_sent_as_ever(cluster: LocalCluster):
    plugin = watched(cluster)
    compute(cluster, large, 40)
    compute(cluster, small)
    plugin.had.clear()
    with Client(cluster):
        pairs = [
            dask.delayed(len)([dask.delayed(small)(number), dask.delayed(large)(number)])
            for number in range(2 * GROUP)
        ]
        assert dask.compute(pairs, optimize_graph=False) == ([2] * 2 * GROUP,)
    assert plugin.most(large) <= USUAL


def ends_its_worker(number: int) -> int:
    if number == COUNT // 2:
        os._exit(1)
    return number


def test_a_task_that_kills_its_worker_fails_without_its_group():
    options = {"n_workers": 1, "threads_per_worker": 1, "worker_class": Nanny}
    with LocalCluster(**options, dashboard_address=None) as cluster, Client(cluster) as client:
        SmallTasks.watch(cluster.scheduler)
        client.gather(client.map(ends_its_worker, range(-COUNT, 0), pure=False))
        futures = client.map(ends_its_worker, range(COUNT), pure=False)
        wait(futures, timeout=120)
        failed = [number for number, future in enumerate(futures) if future.status == "error"]
    assert COUNT // 2 in failed
    assert len(failed) <= USUAL


def test_a_worker_that_closes_with_its_group_loses_none(cluster: LocalCluster):
    watched(cluster)
    compute(cluster, small)
    with Client(cluster) as client:
        futures = client.map(lambda number: (time.sleep(0.002), number)[1], range(COUNT))
        wait_for(lambda: any(future.done() for future in futures), 20)
        cluster.scale(0)
        wait_for(lambda: not cluster.scheduler.workers, 20)
        cluster.scale(1)
        assert client.gather(futures) == list(range(COUNT))


def test_what_the_user_configured_holds(cluster: LocalCluster):
    with dask.config.set({small_tasks.SATURATION: 2}):
        SmallTasks.watch(cluster.scheduler)
    assert SmallTasks.name not in cluster.scheduler.plugins
