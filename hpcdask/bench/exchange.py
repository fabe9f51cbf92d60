"""Measure how fast the workers of a cluster exchange data.

The seconds of a transfer are those that the receiving worker logs, from the request to the last
byte: no scheduling and no Dask task is in them. Receivers check every block.

A worker has one buffer, and each block that it sends is a view of that. So a transport that maps a
buffer before it reads it, as CUDA IPC does, does so in the first transfer, which does not count.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from dask.utils import format_bytes, format_time
from distributed import get_worker

from hpcdask.bench.cluster import Cluster, wait
from hpcdask.bench.measurement import Exchange, Measurement, Pair, rate
from hpcdask.errors import UsageError
from hpcdask.logs import say, text_table
from hpcdask.workloads import Check, Device, array_module

PAIR_NBYTES = {"cuda": 256_000_000, "cpu": 16_000_000}
ITEM_NBYTES = 8
#: Blocks of one buffer start this many items apart: 512 bytes, so that copies stay aligned.
STRIDE_ITEMS = 64
#: All pairs of so many workers are measured.
MANY = 32
#: Workers spill from 0.6 on, and count each view as memory of its own: beside the buffer there is
#: one block that leaves and one that comes.
BLOCKS_FRACTION, HELD = 0.25, 3
#: A step takes this long at most, and longer with much data.
STEP_DEADLINE_S, LEAST_BYTES_PER_S = 120.0, 10e6
#: Slow workers and pairs that are printed; workers of which a table can show all pairs.
MAX_LINES, MAX_COLUMNS = 10, 16
#: Slow is less than this part of what is usual.
SLOW = 0.5

Pairs = list[tuple[int, int]]
#: GB/s, or seconds, of pairs (sender, receiver).
Rates = Mapping[tuple[int, int], float]


def run_exchange(
    cluster: Cluster, nbytes: int | None = None, *, repeats: int = 3, alone: bool = False
) -> Measurement:
    """Measure pairs of workers (`alone`: one at a time), and all to all, whose times count."""
    if (n := len(cluster.workers)) < 2:
        raise UsageError(
            f"an exchange needs two workers at least, and this cluster has {n}: "
            f"start more, as with `mpirun -n 2 hpcdask bench exchange`"
        )
    nbytes, groups = _size(cluster, nbytes), steps(n, alone=alone)
    everyone = [pair for step in groups for pair in step]
    left_out = n * (n - 1) - len(everyone)
    say(
        f"exchange between {n} workers, {cluster}: blocks of {format_bytes(nbytes)}"
        + (f"; {left_out:,} pairs of workers are left out" if left_out else "")
    )
    blocks = Blocks(cluster, nbytes // ITEM_NBYTES)
    # pairs take turns, so that what disturbs for a moment disturbs one repeat of many
    large = [blocks.measure(groups, blocks.n_items) for _ in range(1 + repeats)][1:]
    small = [blocks.measure(groups, 1) for _ in range(repeats)]
    share = BLOCKS_FRACTION * cluster.memory_nbytes / n / (2 * n)
    n_items = max(1, int(min(nbytes, share)) // ITEM_NBYTES)
    every = [blocks.move(everyone, n_items) for _ in range(1 + repeats)][1:]
    found = Exchange(
        names=tuple(one.name for one in cluster.workers),
        hosts=tuple(one.host for one in cluster.workers),
        block_nbytes=nbytes,
        pairs=tuple(
            Pair(
                sender=i,
                receiver=j,
                over=cluster.workers[j].transport_from(cluster.workers[i]),
                seconds=tuple(times[i, j] for times in large),
                latency_s=tuple(times[i, j] for times in small),
            )
            for i, j in everyone
        ),
        all_to_all_nbytes=n_items * ITEM_NBYTES,
    )
    found = replace(found, slow=tuple(judge(found.rates(), found.names, found.hosts)))
    measured = Measurement(
        workload="exchange",
        variant="alone" if alone else "",
        block_nbytes=nbytes,
        seconds=tuple(max(times.values()) for times in every),
        moved=len(everyone) * found.all_to_all_nbytes,
        checks=(Check("blocks that arrived wrong", blocks.n_wrong, 0, 0),),
        exchange=found,
        **cluster.facts,
    )
    _tell(found, measured.gb_per_s)
    return measured


def _size(cluster: Cluster, nbytes: int | None) -> int:
    """Return the bytes of a block, a whole number of items."""
    most = int(BLOCKS_FRACTION * cluster.memory_nbytes / len(cluster.workers) / HELD)
    nbytes = min(PAIR_NBYTES[cluster.device], most) if nbytes is None else nbytes
    if not ITEM_NBYTES <= nbytes <= most:
        raise UsageError(
            f"--size {format_bytes(nbytes)} does not fit {cluster}: {ITEM_NBYTES} B is the least, "
            f"{most // 10**6}MB the most"
        )
    return nbytes // ITEM_NBYTES * ITEM_NBYTES


def steps(n: int, *, alone: bool = False) -> list[Pairs]:
    """Return the ordered pairs to measure, those of each step at once; nobody is in two of them.

    The two directions come one after the other: one event loop in each worker serves both. Of more
    than `MANY` workers, each meets its neighbour, most likely on its node, and some of the others.
    """
    size = n + n % 2  # circle method: one stays, the others turn; who meets the last of n odd rests
    rounds: list[Pairs] = []
    for turn in range(size - 1):
        circle = [0, *(1 + (i - turn) % (size - 1) for i in range(size - 1))]
        opposite = zip(circle[: size // 2], reversed(circle[size // 2 :]), strict=True)
        rounds.append([pair for pair in opposite if max(pair) < n])
    if n > MANY:
        few = max(2, MANY * MANY // n)
        chosen = [rounds[i * len(rounds) // few] for i in range(few)]
        met = {frozenset(pair) for pairs in chosen for pair in pairs}
        near = [(i, i + 1) for i in range(0, n - 1, 2) if frozenset((i, i + 1)) not in met]
        rounds = [near, *chosen]
    both = [turned for pairs in rounds for turned in (pairs, [(j, i) for i, j in pairs])]
    return [[pair] for step in both for pair in step] if alone else both


class Blocks:
    """Blocks between workers, from one buffer on each; `n_wrong` of them did not arrive as sent."""

    def __init__(self, cluster: Cluster, n_items: int) -> None:
        self.cluster, self.n_items, self.n_wrong = cluster, n_items, 0
        n, device = len(cluster.workers), cluster.device
        self.buffers = [cluster.start(i, fill, i, n, n_items, device) for i in range(n)]
        wait(cluster, self.buffers, "the buffers", STEP_DEADLINE_S)

    def move(self, pairs: Pairs, n_items: int) -> dict[int, float]:
        """Move a block between each of the pairs, all at once; return the receivers' seconds."""
        cluster, nbytes = self.cluster, len(pairs) * n_items * ITEM_NBYTES
        what = f"{format_bytes(nbytes)} between {len(pairs)} pairs of workers"
        within_s = STEP_DEADLINE_S + nbytes / LEAST_BYTES_PER_S
        views = [cluster.start(i, view, self.buffers[i], j, n_items) for i, j in pairs]
        wait(cluster, views, what, within_s)
        incoming: dict[int, list[tuple[Any, str, int]]] = {}
        for (i, j), block in zip(pairs, views, strict=True):
            first = first_item(i, j, len(self.buffers))
            incoming.setdefault(j, []).append((block, block.key, first))
        sinks = [cluster.start(j, sink, blocks, n_items) for j, blocks in incoming.items()]
        wait(cluster, sinks, what, within_s)
        seconds, n_wrong = zip(*cluster.client.gather(sinks), strict=True)
        self.n_wrong += sum(n_wrong)
        return dict(zip(incoming, seconds, strict=True))

    def measure(self, groups: list[Pairs], n_items: int) -> Rates:
        """Return the seconds of a block between each of the pairs, step by step."""
        seconds: dict[tuple[int, int], float] = {}
        for step in groups:
            received = self.move(step, n_items)
            seconds |= {(i, j): received[j] for i, j in step}
        return seconds


# --- on a worker ----------------------------------------------------------------------------------


def first_item(source: int, destination: int, n_workers: int) -> int:
    """Return the number that a block from one worker to another begins with; no two are equal."""
    return STRIDE_ITEMS * (source * n_workers + destination)


def fill(source: int, n_workers: int, n_items: int, device: Device) -> Any:
    """Make the buffer that a worker sends from: whole numbers, each one more than the last."""
    start = first_item(source, 0, n_workers)
    end = start + n_items + STRIDE_ITEMS * n_workers
    return array_module(device).arange(start, end, dtype=np.int64)


def view(buffer: Any, destination: int, n_items: int) -> Any:
    """Return the block for a destination, without a copy."""
    start = STRIDE_ITEMS * destination
    return buffer[start : start + n_items]


def sink(incoming: Sequence[tuple[Any, str, int]], n_items: int) -> tuple[float, int]:
    """Return how long the blocks took, by the names of their keys, and how many are wrong."""
    blocks, names, firsts = zip(*incoming, strict=True)
    log = list(get_worker().transfer_incoming_log)
    entries = [entry for entry in log if not entry["keys"].keys().isdisjoint(names)]
    seconds = max(entry["stop"] for entry in entries) - min(entry["start"] for entry in entries)
    sums = (n_items * first + n_items * (n_items - 1) // 2 for first in firsts)
    n_wrong = sum(int(block.sum()) != total for block, total in zip(blocks, sums, strict=True))
    # distributed's clock may not move in a transfer of a few bytes within one process
    return max(seconds, 1e-9), n_wrong


# --- slow nodes, workers and pairs ----------------------------------------------------------------


def judge(rates: Rates, names: Sequence[str], hosts: Sequence[str]) -> list[str]:
    """Name slow nodes, then workers, then pairs, each cause once, the slowest first, in lines.

    Pairs within a node are compared with such pairs, and those between nodes with those. A pair is
    slow below half of their median, a worker if the median of what it sends or receives is, and a
    node if all its workers are.
    """
    found: list[tuple[int, float, str]] = []  # kind of finding, part of what is usual, line
    inside, between = split(rates, hosts)
    for pairs, where in (inside, "of its node"), (between, "of other nodes"):
        sides = {"sends": _slow_members(pairs, 0), "receives": _slow_members(pairs, 1)}
        sends, receives = sides.values()
        rest = {
            pair: rate
            for pair, rate in pairs.items()
            if pair[0] not in sends and pair[1] not in receives
        }
        usual = _median(rest.values() or pairs.values())
        slow = {m: min(side[m] for side in sides.values() if m in side) for m in sends | receives}
        for host in dict.fromkeys(hosts[m] for m in slow):
            members = [m for m in slow if hosts[m] == host]
            is_node = len(members) == hosts.count(host) > 1
            for group in [members] if is_node else [[member] for member in members]:
                value = _median(slow[m] for m in group)
                who = f"node {host}" if is_node else f"worker {names[group[0]]} on {host}"
                verbs = " and ".join(verb for verb, side in sides.items() if side.keys() & group)
                text = f"{who} {verbs} slowly: {value:.3g} GB/s with workers {where}"
                found.append((1 - is_node, value / usual, f"{text}, {usual:.3g} is usual"))
        for (i, j), value in rest.items():
            if value < SLOW * usual:
                place = " -> ".join(dict.fromkeys([hosts[i], hosts[j]]))
                text = f"pair {names[i]} -> {names[j]} on {place}: {value:.3g} GB/s"
                found.append((2, value / usual, f"{text}, {usual:.3g} is usual"))
    return [text for *_, text in sorted(found)]


def split(rates: Rates, hosts: Sequence[str]) -> tuple[Rates, Rates]:
    """Return the rates within nodes, and those between nodes."""
    inside = {(i, j): value for (i, j), value in rates.items() if hosts[i] == hosts[j]}
    return inside, {pair: value for pair, value in rates.items() if pair not in inside}


def _slow_members(rates: Rates, side: int) -> dict[int, float]:
    # Compared with the median member, not the median pair: of three members, one that is slow
    # touches two thirds of the pairs. With two, nobody can tell which is to blame.
    lines: dict[int, list[float]] = {}
    for pair, value in rates.items():
        lines.setdefault(pair[side], []).append(value)
    medians = {member: _median(line) for member, line in lines.items() if len(line) > 1}
    usual = _median(medians.values())
    return {member: value for member, value in medians.items() if value < SLOW * usual}


def _median(values: Iterable[float]) -> float:
    return statistics.median(list(values) or [0.0])


# --- lines ----------------------------------------------------------------------------------------


def _tell(found: Exchange, gb_per_s: float) -> None:
    if (n := len(found.names)) <= MAX_COLUMNS:
        rates, rows = found.rates(), [["", *map(str, range(n))]]
        for i, name in enumerate(found.names):
            cells = (f"{rates[i, j]:.3g}" if (i, j) in rates else "-" for j in range(n))
            rows.append([f"{i} {name}", *cells])
        say(f"GB/s, from row to column\n{text_table(rows)}")
    say(kinds_of_pairs(found))
    for text in found.slow[:MAX_LINES]:
        say(f"warning: {text}")
    if (more := len(found.slow) - MAX_LINES) > 0:
        say(f"warning: {more} more; --json FILE keeps them all")
    block, latency_s = format_bytes(found.all_to_all_nbytes), statistics.median(found.latencies())
    say(f"8 bytes take {format_time(latency_s)}, in the median")
    say(f"all to all: {rate(gb_per_s)} in all, {block} for each pair")


def kinds_of_pairs(found: Exchange) -> str:
    """Return the rates of pairs within nodes and between nodes, in words."""
    kinds = zip(("within nodes", "between nodes"), split(found.rates(), found.hosts), strict=True)
    return "; ".join(
        f"{kind}: {rate(statistics.median(rates.values()))} in the median, "
        f"{rate(min(rates.values()))} to {rate(max(rates.values()))}"
        for kind, rates in kinds
        if rates
    )
