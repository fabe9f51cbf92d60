"""What workers exchange: who meets whom, what is measured, who is slow, and how that looks."""

from __future__ import annotations

import asyncio
import io
import json
import types
from itertools import permutations

import dask
import numpy as np
import pytest
from distributed import Client, LocalCluster
from rich.console import Console

from hpcdask.bench import command, exchange_pairs, exchange_report
from hpcdask.bench import exchange as exchange_measurements
from hpcdask.bench.cluster import Cluster, inspect
from hpcdask.errors import UsageError
from hpcdask.workloads import WorkloadError
from hpcdask.workloads import exchange as workload


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


# --- rounds, blocks, chunks -----------------------------------------------------------------------


@pytest.mark.parametrize("n", range(2, 18))
def test_all_pairs_meet_once_and_nobody_twice_in_a_round(n):
    rounds = workload.tournament(n)
    assert len(rounds) == n - 1 + n % 2
    met = [frozenset(pair) for pairs in rounds for pair in pairs]
    assert len(met) == len(set(met)) == n * (n - 1) // 2
    for pairs in rounds:
        busy = [worker for pair in pairs for worker in pair]
        assert len(busy) == len(set(busy))


@pytest.mark.parametrize("alone", [True, False])
def test_steps_have_every_pair_in_both_directions(alone):
    found = list(exchange_pairs.steps(5, alone=alone))
    assert sorted(pair for step in found for pair in step) == sorted(permutations(range(5), 2))
    assert len(found) == (20 if alone else 10)


def test_every_block_differs_and_a_changed_one_is_found():
    n, n_items, seen = 4, 1000, set()
    for i, j in permutations(range(n), 2):
        block = workload.view(workload.fill(i, n, n_items, "cpu"), j, n_items)
        first = workload.first_item(i, j, n)
        assert workload.is_right(block, first, n_items)
        seen.add(first)
        for wrong in (block[:-1], block + 1, np.where(block == first + 500, 0, block)):
            assert not workload.is_right(wrong, first, n_items)
    assert len(seen) == n * (n - 1)


def test_a_transfer_that_the_log_lost_is_an_error(monkeypatch):
    worker = types.SimpleNamespace(transfer_incoming_log=[])
    monkeypatch.setattr(workload, "get_worker", lambda: worker)
    with pytest.raises(WorkloadError, match="low-level-log-length"):
        workload.sink([np.arange(1)], ["a"], [0], 1, None)


def test_transports_are_those_of_the_peers_or_the_scheme():
    plain = types.SimpleNamespace(address="tls://10.0.0.1:5")
    assert workload.transports(plain) == {"peers": {}, "scheme": "tls"}
    both = types.SimpleNamespace(address="tls://n:5", peer_transports={"tls://m:5": "ucx"})
    assert workload.transports(both)["peers"] == {"tls://m:5": "ucx"}


@pytest.mark.parametrize("n_workers", [2, 3, 8, 64])
def test_chunks_are_square_even_and_most_have_to_cross(n_workers):
    rows = workload.grid(8_000_000_000, n_workers, "cuda")
    assert max(rows) - min(rows) <= 1
    assert max(rows) ** 2 * 8 <= workload.MAX_CHUNK_NBYTES["cuda"]
    owners = workload.owners(len(rows), n_workers)
    counts = np.bincount(list(owners.values()), minlength=n_workers)
    assert counts.max() - counts.min() <= 1
    assert counts.min() >= 4
    pairs_nbytes = (sum(rows) ** 2 - sum(r * r for r in rows)) * 8 / 2
    crossing = workload.to_cross({cell: str(o) for cell, o in owners.items()}, rows)
    assert crossing / pairs_nbytes == pytest.approx(1 - 1 / n_workers, abs=0.2)


def test_bytes_that_have_to_cross():
    where = {(0, 0): "a", (0, 1): "a", (1, 0): "b", (1, 1): "b"}
    assert workload.to_cross(where, (3, 5)) == 8 * 3 * 5
    assert workload.to_cross({**where, (1, 0): "a"}, (3, 5)) == 0


# --- the verdict ----------------------------------------------------------------------------------


def cluster(per_node, inside=200.0, between=20.0):
    """Recorded shape of a cluster: bandwidths, names, hosts."""
    hosts = [f"n{node}" for node, count in enumerate(per_node) for _ in range(count)]
    matrix = [
        [
            None if i == j else (inside if a == b else between) * (1 + 0.1 * np.sin(7 * i + 3 * j))
            for j, b in enumerate(hosts)
        ]
        for i, a in enumerate(hosts)
    ]
    return matrix, [f"w{i}" for i in range(len(hosts))], hosts


def slowed(matrix, which, factor=0.2):
    return [
        [value if value is None or not which(i, j) else value * factor for j, value in enumerate(r)]
        for i, r in enumerate(matrix)
    ]


CASES = [
    ([8], lambda i, j: False, []),
    ([4, 4], lambda i, j: False, []),
    ([1] * 6, lambda i, j: False, []),
    ([8], lambda i, j: (i, j) == (2, 5), [("pair", ("w2", "w5"), "on n0")]),
    ([8], lambda i, j: 3 in (i, j), [("worker", ("w3",), "exchanges slowly")]),
    ([8], lambda i, j: i == 3, [("worker", ("w3",), "sends slowly")]),
    ([8], lambda i, j: j == 3, [("worker", ("w3",), "receives slowly")]),
    # Most, not all, of its pairs.
    ([8], lambda i, j: i == 3 and j < 5, [("worker", ("w3",), "sends slowly")]),
    # Of three, one that is slow touches four of the six pairs.
    ([3], lambda i, j: 1 in (i, j), [("worker", ("w1",), "exchanges slowly")]),
    # Of two, nobody knows which is to blame.
    ([2], lambda i, j: (i, j) == (0, 1), [("pair", ("w0", "w1"), "GB/s")]),
    ([1] * 4, lambda i, j: 2 in (i, j), [("worker", ("w2",), "of other nodes")]),
    ([4, 4, 4], lambda i, j: (i < 4) != (j < 4), [("node", ("n0",), "exchanges slowly")]),
    ([4, 4, 4], lambda i, j: i < 4 <= j, [("node", ("n0",), "sends slowly")]),
    ([4, 4, 4], lambda i, j: i < 4 and j < 4, [("node", ("n0",), "with workers of its node")]),
    (
        [4, 4],
        lambda i, j: i < 4 <= j,
        [("node", ("n0",), "sends slowly"), ("node", ("n1",), "receives slowly")],
    ),
    # Two causes, and nothing said twice.
    (
        [4, 4, 4],
        lambda i, j: (i < 4) != (j < 4) or (i, j) == (9, 10),
        [("node", ("n0",), "of other nodes"), ("pair", ("w9", "w10"), "on n2")],
    ),
]


@pytest.mark.parametrize(("per_node", "which", "expected"), CASES)
def test_verdict(per_node, which, expected):
    matrix, names, hosts = cluster(per_node)
    found = exchange_report.judge(slowed(matrix, which), names, hosts)
    assert [(one.kind, one.who) for one in found] == [(kind, who) for kind, who, _ in expected]
    for one, (_, _, words) in zip(found, expected, strict=True):
        assert words in one.text
        assert one.value < one.usual / 2


def test_pairs_that_a_board_joins_otherwise_are_not_slow():
    """Two bridged pairs of GPUs: a third of the pairs is fast by design."""
    matrix, names, hosts = cluster([4], inside=20.0)
    fast = slowed(matrix, lambda i, j: i // 2 == j // 2, factor=10)
    assert not exchange_report.judge(fast, names, hosts)


# --- the table ------------------------------------------------------------------------------------


def printed(per_node):
    matrix, names, hosts = cluster(per_node)
    console = Console(width=100, file=io.StringIO())
    console.print(exchange_report.table({"names": names, "hosts": hosts, "GB/s": matrix}))
    return console.file.getvalue()


def test_table_has_every_number_of_eight_workers_and_fits_a_screen_for_64():
    (row,) = [line.split() for line in printed([8]).splitlines() if line.startswith("3 w3")]
    assert len(row) == 2 + 8
    assert row[2 + 3] == "-"
    many = [line.split() for line in printed([8] * 8).splitlines()]
    assert len(many) < 10
    assert ["same", "node", "448"] in [line[:3] for line in many]
    assert ["different", "nodes", "3584"] in [line[:3] for line in many]


# --- the command ----------------------------------------------------------------------------------


async def nothing_left(dask_scheduler):
    async with asyncio.timeout(60):
        while dask_scheduler.tasks:  # noqa: ASYNC110 the scheduler has no event for it
            await asyncio.sleep(0.01)


def test_command_measures_a_cluster_of_three(client, capsys):
    argv = ["--size", "1MB", "--transpose-size", "4MB", "--repeats", "2", "--device", "cpu"]
    assert command.main(["exchange", *argv]) == 0
    out, err = capsys.readouterr()
    (line,) = map(json.loads, out.splitlines())
    result = line["result"]
    assert (line["workload"], line["workers"], result["pair_bytes"]) == ("exchange", 3, 1_000_000)
    for key in ("GB/s", "latency_ms"):
        for i, row in enumerate(result[key]):
            assert [value is None for value in row] == [i == j for j in range(3)]
            assert all(value > 0 for value in row if value is not None)
    assert result["transport"] == [[None if i == j else "tcp" for j in range(3)] for i in range(3)]
    assert result["all_to_all"]["bytes"] == 3 * 2 * 1_000_000
    square = result["transpose"]
    assert len(line["seconds"]) == len(square["seconds"]) == 2
    assert 0 < square["bytes_to_cross"] <= square["bytes_crossed"] <= square["bytes"]
    assert line["GB/s"] == square["GB/s"]
    assert len(line["checks"]) == 3
    assert all(check["ok"] for check in line["checks"])
    assert "GB/s, from row to column" in err
    client.run_on_scheduler(nothing_left)


def test_a_block_that_arrives_wrong_is_exit_code_1(client, capsys, monkeypatch):
    """The client expects blocks that no worker has."""
    monkeypatch.setattr(workload, "first_item", lambda i, j, n: -1)
    argv = ["--size", "8kB", "--transpose-size", "10kB", "--repeats", "1", "--device", "cpu"]
    assert command.main(["exchange", *argv, "--alone"]) == 1
    assert "check failed: blocks that arrived wrong is 30, expected 0" in capsys.readouterr().err


def test_a_step_that_does_not_end_is_an_error(client, capsys, monkeypatch):
    monkeypatch.setattr(exchange_pairs, "STEP_DEADLINE_S", 1e-4)
    assert command.main(["exchange", "--size", "8kB", "--device", "cpu"]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert "the buffers: not complete after 0 s; all workers are there" in last


def test_a_worker_that_left_is_named(client, monkeypatch):
    monkeypatch.setattr(exchange_pairs, "STEP_DEADLINE_S", 0.01)
    address = next(iter(client.nthreads()))
    members = exchange_pairs.Members([address, "tcp://gone"], ["a", "b"], ["n", "n"])
    future = client.submit(int, workers=["tcp://127.0.0.1:1"], allow_other_workers=False)
    with pytest.raises(exchange_pairs.ClusterError, match="workers left: b"):
        exchange_pairs.wait(client, [future], members, "it", 0)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--size", "7"], "too small: the least is 8 B"),
        (["--size", "1GB"], "--size 1.0 GB does not fit 3 x cpu"),
        (["--transpose-size", "2GB"], "--transpose-size 2.0 GB does not fit 3 x cpu"),
        (["--transpose-size", "100"], "x of 100 B is too small"),
        (["--form", "stock"], "--form"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(client, capsys, argv, message):
    assert command.main(["exchange", *argv, "--device", "cpu"]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("hpcdask: error: ")
    assert message in err
    assert err.count("\n") == 1


def test_sizes_shrink_with_memory():
    small = Cluster(None, "cuda", {"GPU": 4}, 4, 4 * 5_000_000_000, "14")
    nbytes, square = exchange_measurements._sizes(small, 4, None, None, 3)
    assert 200_000_000 <= nbytes <= 256_000_000
    assert square == 2_400_000_000
    assert exchange_measurements._shard_items(small, 4, nbytes) * 8 * 2 * 4 <= 5e9 / 4


def test_one_worker_is_too_few():
    with (
        LocalCluster(n_workers=1, processes=False, dashboard_address=":0") as local,
        Client(local) as alone,
        pytest.raises(UsageError, match="needs two workers"),
    ):
        exchange_measurements.run_exchange(inspect(alone, "cpu"))
