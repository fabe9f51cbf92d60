"""What workers exchange: who meets whom, what is measured, who is slow, and how that looks."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from itertools import permutations

import dask
import pytest
from distributed import Client, LocalCluster

from hpcdask.bench import command, exchange
from hpcdask.bench.cluster import inspect, wait
from hpcdask.errors import ClusterError


@pytest.fixture(scope="module")
def client():
    """Workers in processes of their own, so that what they exchange goes over tcp."""
    with (
        LocalCluster(
            n_workers=3, threads_per_worker=1, dashboard_address=":0", memory_limit="1GiB"
        ) as local,
        Client(local) as client,
        dask.config.set({"scheduler-address": local.scheduler_address}),
    ):
        yield client


async def nothing_left(dask_scheduler):
    async with asyncio.timeout(60):
        while dask_scheduler.tasks:  # noqa: ASYNC110 the scheduler has no event for it
            await asyncio.sleep(0.01)


@pytest.mark.long
@pytest.mark.parametrize("repeats", [2, 5])
def test_command_measures_a_cluster_of_three(client, capsys, repeats):
    """Regression: more repeats had less room for a block, and took a smaller one."""
    argv = ["--size", "40MB", "--repeats", str(repeats)]
    assert command.main(["exchange", *argv, "--device", "cpu"]) == 0
    out, err = capsys.readouterr()
    (line,) = map(json.loads, out.splitlines())
    found = line["exchange"]
    assert (line["workload"], line["workers"], found["block_nbytes"]) == ("exchange", 3, 40_000_000)
    pairs = {(pair["sender"], pair["receiver"]): pair for pair in found["pairs"]}
    assert sorted(pairs) == sorted(permutations(range(3), 2))
    for pair in pairs.values():
        assert pair["over"] == "tcp"
        assert len(pair["seconds"]) == len(pair["latency_s"]) == len(line["seconds"]) == repeats
        assert min(*pair["seconds"], *pair["latency_s"]) > 0
    assert line["moved"] == 6 * found["all_to_all_nbytes"]
    assert line["GB/s"] == pytest.approx(line["moved"] / line["seconds_median"] / 1e9)
    (check,) = line["checks"]
    assert check["ok"]
    assert "GB/s, from row" in " ".join(err.split())
    client.run_on_scheduler(nothing_left)


def test_a_block_that_arrives_wrong_is_exit_code_1(client, capsys, monkeypatch):
    """The client expects blocks that no worker has."""
    monkeypatch.setattr(exchange, "first_item", lambda i, j, n: -1)
    argv = ["--size", "8kB", "--repeats", "1", "--device", "cpu"]
    assert command.main(["exchange", *argv, "--alone"]) == 1
    assert "check failed: blocks that arrived wrong is 30, expected 0" in capsys.readouterr().err


def test_a_worker_that_left_is_named(client):
    cluster = inspect(client, "cpu")
    workers = cluster.workers[0], replace(cluster.workers[1], address="tcp://gone", name="b")
    future = client.submit(int, workers=["tcp://127.0.0.1:1"], allow_other_workers=False)
    with pytest.raises(ClusterError, match="workers left: b"):
        wait(replace(cluster, workers=workers), [future], "it", 0.01)


def test_blocks_that_do_not_fit_are_bad_input(client, capsys):
    assert command.main(["exchange", "--size", "1GB", "--device", "cpu"]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("hpcdask: error: --size 0.93 GiB does not fit 3 x cpu")
    assert err.count("\n") == 1
