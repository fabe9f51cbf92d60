"""Measure how fast the workers of a cluster exchange data.

Between pairs it is the receiving worker that holds the clock, so nothing but the transfer is
measured; ``x + x.T`` is timed by the client, as a user waits for it.
"""

from __future__ import annotations

import platform
import statistics
import time
import uuid
from typing import Any

import dask.array as da
import distributed
import numpy as np
from dask.utils import format_time

from hpcdask.bench import all_reduce, exchange_report
from hpcdask.bench.cluster import Cluster, workers_of
from hpcdask.bench.exchange_pairs import Members, Pairs, wait
from hpcdask.bench.records import Case, decimal_bytes, rate
from hpcdask.bench.summary import console
from hpcdask.bench.workload import Timed, record
from hpcdask.errors import UsageError
from hpcdask.logs import say
from hpcdask.workloads import Check, count_tasks
from hpcdask.workloads import exchange as workload

PAIR_NBYTES = {"cuda": 256_000_000, "cpu": 16_000_000}
SQUARE_NBYTES = {"cuda": 8_000_000_000, "cpu": 512_000_000}
#: The part of all memory that x may have: there are x, copies of its chunks, x + x.T and scratch.
SQUARE_FRACTION = 0.12
#: Workers spill from 0.6 on, and count each view as memory of its own.
BLOCKS_FRACTION = 0.25
#: Slow workers and pairs that are printed.
MAX_LINES = 10


def run_exchange(
    cluster: Cluster,
    nbytes: int | None = None,
    square_nbytes: int | None = None,
    *,
    repeats: int = 3,
    alone: bool = False,
) -> dict[str, Any]:
    """Measure all pairs of workers (``alone``: one at a time), all to all, ``x + x.T``, and NCCL.

    Times and GB/s at the record's top are those of ``x + x.T``; rows of the matrices in ``result``
    are sources.
    """
    client, members = cluster.client, _members(cluster.client)
    nbytes, square_nbytes = _sizes(cluster, len(members), nbytes, square_nbytes, repeats)
    rows = workload.grid(square_nbytes, len(members), cluster.device)
    say(
        f"exchange between {len(members)} workers, {cluster}: blocks of {decimal_bytes(nbytes)}, "
        f"then x + x.T of {decimal_bytes(8 * sum(rows) ** 2)}"
    )
    pairs = Pairs(client, members, nbytes // workload.ITEM_NBYTES, cluster.device)
    bandwidth, latency = pairs.measure(repeats, alone=alone)
    all_to_all = pairs.all_to_all(repeats, _shard_items(cluster, len(members), nbytes))
    pairs.buffers.clear()
    transport = _transports(client, members)
    square, checks = _measure_square(cluster, members, rows, repeats)
    reduced, of_nccl = all_reduce.measure(cluster, nbytes, repeats)  # a hang ends workers, so last
    checks += of_nccl
    findings = exchange_report.judge(bandwidth, members.names, members.hosts)
    n = sum(rows)
    case = Case("exchange", "stock", (n, n), "float64", len(rows) ** 2, (max(rows), max(rows)))
    result = {
        "names": members.names,
        "hosts": members.hosts,
        "pair_bytes": nbytes,
        "alone": alone,
        "GB/s": bandwidth,
        "latency_ms": latency,
        "transport": transport,
        "summary": exchange_report.summary(bandwidth, members.hosts),
        "all_to_all": all_to_all,
        "transpose": square,
        "all_reduce": reduced,
        "slow": [finding._asdict() for finding in findings],
    }
    checks.insert(0, Check("blocks that arrived wrong", pairs.n_wrong, 0, 0))
    timed = Timed(square["seconds"], None, square["dask_tasks"])
    line = record(case, cluster, timed, result, checks)
    _tell(result)
    return {**line, "GB/s": square["GB/s"]}


def _tell(result: dict[str, Any]) -> None:
    console(stderr=True).print(exchange_report.table(result))
    for finding in result["slow"][:MAX_LINES]:
        say(f"warning: {finding['text']}")
    if (more := len(result["slow"]) - MAX_LINES) > 0:
        say(f"warning: {more} more; --json FILE keeps them all")
    latencies = [value for row in result["latency_ms"] for value in row if value is not None]
    say(f"8 bytes take {format_time(statistics.median(latencies) / 1e3)}, in the median")
    every, square = result["all_to_all"], result["transpose"]
    block, crossing = decimal_bytes(every["block_bytes"]), decimal_bytes(square["bytes_to_cross"])
    say(f"all to all: {rate(every['GB/s'])} in all, {block} for each pair")
    if line := exchange_report.all_reduce_line(result):
        say(line)
    say(f"x + x.T: {crossing} of {decimal_bytes(square['bytes'])} go between workers; times are:")


# --- what there is --------------------------------------------------------------------------------


def _members(client: distributed.Client) -> Members:
    workers = workers_of(client)
    if len(workers) < 2:
        raise UsageError(
            f"an exchange needs two workers at least, and this cluster has {len(workers)}: "
            f"start more, as with `mpirun -n 2 hpcdask bench exchange`"
        )
    # by name: those of `workers_of` are addresses
    found = client.run(platform.node, workers=list(workers))
    return Members.of({a: {"host": host, "name": workers[a]["name"]} for a, host in found.items()})


def _transports(client: distributed.Client, members: Members) -> list[list[str | None]]:
    told = client.run(workload.transports, workers=members.addresses)

    def way(source: str, destination: str) -> str | None:
        one = told[destination]
        return None if source == destination else one["peers"].get(source, one["scheme"])

    return [[way(a, b) for b in members.addresses] for a in members.addresses]


def _sizes(
    cluster: Cluster, n_workers: int, nbytes: int | None, square_nbytes: int | None, repeats: int
) -> tuple[int, int]:
    item = workload.ITEM_NBYTES
    most = int(BLOCKS_FRACTION * cluster.memory_nbytes / n_workers / (repeats + 2))
    most_square = int(SQUARE_FRACTION * cluster.memory_nbytes)
    nbytes = min(PAIR_NBYTES[cluster.device], most) if nbytes is None else nbytes
    if square_nbytes is None:
        square_nbytes = min(SQUARE_NBYTES[cluster.device], most_square)
    if nbytes < item:
        raise UsageError(f"--size {nbytes} B is too small: the least is {item} B")
    for option, wanted, limit in (
        ("--size", nbytes, most),
        ("--transpose-size", square_nbytes, most_square),
    ):
        if wanted > limit:
            raise UsageError(
                f"{option} {decimal_bytes(wanted)} does not fit {cluster}: "
                f"{limit // 10**6}MB is the most"
            )
    return nbytes // item * item, square_nbytes


def _shard_items(cluster: Cluster, n_workers: int, nbytes: int) -> int:
    # A worker sends and receives n - 1 of them.
    most = int(BLOCKS_FRACTION * cluster.memory_nbytes / n_workers / (2 * n_workers))
    return max(1, min(nbytes, most) // workload.ITEM_NBYTES)


# --- x + x.T --------------------------------------------------------------------------------------


def _measure_square(
    cluster: Cluster, members: Members, rows: tuple[int, ...], repeats: int
) -> tuple[dict[str, Any], list[Check]]:
    client, n = cluster.client, sum(rows)
    seconds: list[float] = []
    needed: list[int] = []
    moved: list[int] = []
    checks: list[Check] = []
    n_tasks = 0
    # x is another one each time: workers keep copies of chunks that came to them.
    for seed in range(1 + repeats):
        x, where = _make_square(cluster, members, rows, seed)
        y = x + x.T
        n_tasks = count_tasks(y)
        before = _sent(client)
        start = time.perf_counter()
        y = y.persist()
        wait(client, [y], members, "x + x.T", 2 * x.nbytes)
        seconds.append(time.perf_counter() - start)
        moved.append(_sent(client) - before)
        needed.append(workload.to_cross(where, rows))
        if seed == repeats:
            futures = client.compute(workload.verify(y, seed, cluster.device))
            wait(client, [futures], members, "the check of x + x.T", 0)
            checks = workload.check_sum(futures.result(), n, seed)
        del x, y
    median = statistics.median(seconds[1:])
    return {
        "bytes": 8 * n * n,
        "seconds": seconds[1:],
        "bytes_to_cross": needed[-1],
        "bytes_crossed": int(statistics.median(moved[1:])),
        "dask_tasks": n_tasks,
        "GB/s": needed[-1] / median / 1e9,
    }, checks


def _make_square(
    cluster: Cluster, members: Members, rows: tuple[int, ...], seed: int
) -> tuple[da.Array, dict[tuple[int, int], str]]:
    """Make x on the workers, and tell where its chunks are."""
    client = cluster.client
    name = f"x-{uuid.uuid4().hex}"
    starts = [sum(rows[:part]) for part in range(len(rows))]
    cells: dict[int, list[tuple[int, int]]] = {}
    for cell, owner in workload.owners(len(rows), len(members)).items():
        cells.setdefault(owner, []).append(cell)
    graph: dict[Any, Any] = {}
    for owner, mine in cells.items():
        keys = [(name, *cell) for cell in mine]
        futures = client.map(
            workload.square_block,
            mine,
            key=keys,
            workers=[members.addresses[owner]],
            allow_other_workers=False,
            starts=starts,
            rows=rows,
            seed=seed,
            device=cluster.device,
        )
        graph.update(zip(keys, futures, strict=True))
    wait(client, list(graph.values()), members, "x", 0)
    holders = client.who_has(list(graph.values()))
    where = {key[1:]: holders[key][0] for key in graph}
    x = da.Array(graph, name, chunks=(rows, rows), meta=np.empty((0, 0)))
    return x, where


def _sent(client: distributed.Client) -> int:
    """Return the bytes that all workers have sent so far."""
    return sum(client.run(_sent_bytes).values())


def _sent_bytes(dask_worker: Any) -> int:
    return int(dask_worker.transfer_outgoing_bytes_total)
