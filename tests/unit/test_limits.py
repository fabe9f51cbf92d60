"""The limits of the hardware, what a workload needs of it, and who did what when."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from distributed import Client, Event, LocalCluster, wait
from hypothesis import given, settings
from hypothesis import strategies as st
from threadpoolctl import threadpool_limits

from hpcdask.bench import limits
from hpcdask.bench.cluster import inspect, workers_of
from hpcdask.bench.limits import Work, against, bound
from hpcdask.errors import ClusterError
from hpcdask.workloads import WorkloadError
from hpcdask.workloads import exchange as exchange_workload

RATES = {"memory": 100.0, "random": 10.0, "matrix_float64": 1000.0, "matrix_float32": 2000.0}


@pytest.fixture(scope="module")
def client():
    with (
        threadpool_limits(1),  # as in a worker
        LocalCluster(
            n_workers=2,
            threads_per_worker=2,
            processes=False,
            dashboard_address=":0",
            memory_limit="2GiB",
        ) as local,
        Client(local) as client,
    ):
        yield client


# --- what a workload needs ------------------------------------------------------------------------


def test_the_limit_is_the_largest_part():
    found = bound(Work(memory=200, random=30, matrix_float64=500), RATES)
    parts = {"memory": 2.0, "random": 3.0, "matrix_float64": 0.5}
    assert found == {"seconds": 3.0, "by": "random", "parts": parts}
    assert against(found, 4.0) == {**found, "fraction": 0.75}


def test_one_worker_has_no_link():
    assert bound(Work(memory=200, link=1e9), RATES)["parts"] == {"memory": 2.0}
    with pytest.raises(WorkloadError, match=r"link=5.* has no limit.*'matrix_float32'"):
        bound(Work(link=5), RATES)


@given(st.lists(st.floats(0, 1e15), min_size=4, max_size=4).filter(any), st.floats(0.5, 1e6))
@settings(max_examples=20, deadline=None)
def test_twice_the_rates_are_half_the_time(amounts, factor):
    work = Work(*amounts)
    one, more = bound(work, RATES), bound(work, {k: v * factor for k, v in RATES.items()})
    assert one["seconds"] == pytest.approx(more["seconds"] * factor)
    assert all(one["seconds"] >= seconds for seconds in one["parts"].values())
    assert one["parts"][one["by"]] == one["seconds"]


# --- rates ----------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch):
    """Buffers and rounds that take no time."""
    monkeypatch.setattr(limits, "ROUND_S", 0.005)
    monkeypatch.setitem(limits.MAX_NBYTES, "cpu", 8 << 20)
    monkeypatch.setitem(limits.MATRIX_SIDE, "cpu", 128)
    monkeypatch.setitem(limits.LINK_NBYTES, "cpu", 1 << 20)


@pytest.mark.usefixtures("small")
def test_rates_of_a_cluster(client, monkeypatch):
    seen = []
    prepare = limits._prepare
    monkeypatch.setattr(limits, "_prepare", lambda *how: seen.append(how) or prepare(*how))
    # 32 MiB for each thread, and an eighth of that for buffers.
    rates = limits.measure(replace(inspect(client, "cpu"), memory_nbytes=128 << 20))
    assert list(rates) == ["memory", "random", "matrix_float64", "matrix_float32", "link"]
    # Any machine of today is within these.
    assert 1e8 < rates["memory"] < 1e13
    assert 1e6 < rates["random"] < 1e12
    assert 1e7 < rates["matrix_float64"] < 1e15
    assert 1e7 < rates["matrix_float32"] < 1e15
    assert rates["link"] > 1e6
    kinds = list(rates)[:4]
    assert [how[:3] for how in seen] == [(k, "cpu", 4 << 20) for k in kinds for _ in range(4)]
    assert {how[3] for how in seen} == {0, 1}


@pytest.mark.usefixtures("small")
def test_one_worker_is_enough(client, monkeypatch):
    two = limits.Members.of(workers_of(client))
    one = limits.Members(two.addresses[:1], two.names[:1], two.hosts[:1])
    monkeypatch.setattr(limits.Members, "of", lambda found: one)
    assert "link" not in limits.measure(inspect(client, "cpu"))


def test_all_threads_compute_at_once(monkeypatch):
    together = threading.Barrier(3, timeout=60)
    monkeypatch.setattr(limits, "ROUND_S", 1e-9)
    monkeypatch.setattr(limits, "REPEATS", 1)
    monkeypatch.setitem(limits._OPERATIONS, "test", lambda *_: (together.wait, 2.0))
    worker = type("Worker", (), {"state": type("State", (), {"nthreads": 3})})
    monkeypatch.setattr(limits.distributed, "get_worker", lambda: worker)
    (rate,) = limits._rates("test", "cpu", 1 << 20)
    assert rate > 0
    assert not together.broken


def test_buffers_are_halved_until_they_fit(monkeypatch):
    asked = []

    def make(device, nbytes, seed):
        asked.append(nbytes)
        if nbytes > 3 << 20:
            raise MemoryError
        return (lambda: None), float(nbytes)

    monkeypatch.setitem(limits._OPERATIONS, "test", make)
    assert limits._prepare("test", "cpu", 16 << 20, 0)[1] == 2 << 20
    assert asked == [16 << 20, 8 << 20, 4 << 20, 2 << 20]
    monkeypatch.setitem(limits._OPERATIONS, "test", lambda *_: (_ for _ in ()).throw(MemoryError))
    with pytest.raises(MemoryError):
        limits._prepare("test", "cpu", 16 << 20, 0)


def test_busy_workers_are_an_error(client, monkeypatch):
    monkeypatch.setattr(limits, "DEADLINE_S", 0.2)
    cluster = inspect(client, "cpu")
    go = Event("go", client=client)
    address = limits.Members.of(workers_of(client)).addresses[0]
    busy = [
        client.submit(_until_set, i, workers=[address], allow_other_workers=False) for i in range(2)
    ]
    message = r"the rate 'memory': [12] of 2 Dask tasks not complete after 0.2 s"
    with pytest.raises(ClusterError, match=message):
        limits.measure(cluster)
    go.set()
    wait(busy, timeout=180)


def _until_set(_):
    Event("go").wait(timeout=180)


@pytest.mark.usefixtures("small")
def test_blocks_that_arrive_wrong_are_an_error(client, monkeypatch):
    monkeypatch.setattr(exchange_workload, "is_right", lambda *_: False)
    cluster = inspect(client, "cpu")
    with pytest.raises(ClusterError, match=r"8 of 8 blocks between workers arrived wrong"):
        limits._ring(cluster, limits.Members.of(workers_of(client)))
