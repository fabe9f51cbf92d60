"""The rates of the hardware, and the limit that a workload has by them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from distributed import Client, Event, LocalCluster, wait
from threadpoolctl import threadpool_limits

from hpcdask.bench import rates
from hpcdask.bench.cluster import inspect
from hpcdask.bench.measurement import Measurement
from hpcdask.errors import ClusterError

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


def limit(**work):
    """The limit of a measurement of 4 seconds."""
    one = Measurement(workload="x", seconds=(4.0,), devices={}, workers=1, work=work, rates=RATES)
    return one.limit


def test_the_limit_is_the_largest_part_of_known_rate():
    assert str(limit(memory=200, random=30, matrix_float64=500)) == "75 % of generator speed"
    assert limit(memory=200, unknown=1e9).by == "memory"
    assert limit(unknown=5) is None


@pytest.fixture
def small(monkeypatch):
    """Buffers and rounds that take no time."""
    monkeypatch.setattr(rates, "ROUND_S", 0.005)
    monkeypatch.setitem(rates.MAX_NBYTES, "cpu", 8 << 20)
    monkeypatch.setitem(rates.MATRIX_SIDE, "cpu", 128)


@pytest.mark.usefixtures("small")
def test_rates_of_a_cluster(client):
    # 32 MiB for each thread, and an eighth of that for buffers.
    cluster = replace(inspect(client, "cpu"), memory_nbytes=128 << 20)
    found = rates.measure(cluster)
    assert list(found) == ["memory", "random", "matrix_float64", "matrix_float32"]
    # Any machine of today is within these.
    assert 1e8 < found["memory"] < 1e13
    assert 1e6 < found["random"] < 1e12
    assert 1e7 < found["matrix_float64"] < 1e15
    assert 1e7 < found["matrix_float32"] < 1e15


def test_busy_workers_are_an_error(client, monkeypatch):
    monkeypatch.setattr(rates, "DEADLINE_S", 0.2)
    cluster = inspect(client, "cpu")
    go = Event("go", client=client)
    address = cluster.workers[0].address
    busy = [
        client.submit(_until_set, i, workers=[address], allow_other_workers=False) for i in range(2)
    ]
    with pytest.raises(ClusterError, match=r"the rate 'memory': not complete after 0.2 s"):
        rates.measure(cluster)
    go.set()
    wait(busy, timeout=180)


def _until_set(_):
    Event("go").wait(timeout=180)
