"""Blocks between the workers of a cluster: pair by pair, and all to all.

The receiving worker holds the clock, so nothing but the transfer is measured.
"""

from __future__ import annotations

import itertools
import statistics
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import distributed

from hpcdask.bench.cluster import workers_of
from hpcdask.errors import ClusterError
from hpcdask.workloads import Device
from hpcdask.workloads import exchange as workload

#: A step takes this long at most, and longer with much data.
STEP_DEADLINE_S, LEAST_BYTES_PER_S = 120.0, 10e6


@dataclass(frozen=True)
class Members:
    """The workers that exchange, in the order of the matrices: by host, then by name.

    No two names are equal.
    """

    addresses: list[str]
    names: list[str]
    hosts: list[str]

    @classmethod
    def of(cls, found: Mapping[str, Mapping[str, Any]]) -> Members:
        """Put workers, by address with ``name`` and ``host``, in order."""

        def place(address: str) -> tuple[Any, ...]:
            name = found[address]["name"]
            return found[address]["host"], len(name), name, address

        order = sorted(found, key=place)
        names = [found[address]["name"] for address in order]
        unique = len(set(names)) == len(names)
        hosts = [found[address]["host"] for address in order]
        return cls(order, names if unique else order, hosts)

    def __len__(self) -> int:
        return len(self.addresses)


class Pairs:
    """Blocks between workers, from one buffer on each, which is freed with the list ``buffers``.

    ``n_wrong`` counts the blocks that did not hold what they should.
    """

    def __init__(
        self, client: distributed.Client, members: Members, n_items: int, device: Device
    ) -> None:
        self.client, self.members, self.n_items = client, members, n_items
        self.n_wrong = 0
        n = len(members)
        buffers = [
            workload.on(address, workload.fill, number, n, n_items, device)
            for number, address in enumerate(members.addresses)
        ]
        self.buffers = list(client.persist(buffers, optimize_graph=False))
        wait(client, self.buffers, members, "the buffers", 0)

    def measure(
        self, repeats: int, *, alone: bool
    ) -> tuple[list[list[float | None]], list[list[float | None]]]:
        """Return the matrices of GB/s and of ms for one number."""
        n = len(self.members)
        bandwidth: list[list[float | None]] = [[None] * n for _ in range(n)]
        latency: list[list[float | None]] = [[None] * n for _ in range(n)]
        sizes = [self.n_items] * (1 + repeats) + [1] * repeats
        for pairs in steps(n, alone=alone):
            chains = [
                workload.chain(
                    self.buffers[i], (i, j), self.members.addresses, sizes, uuid.uuid4().hex
                )
                for i, j in pairs
            ]
            told = self._gather([one for chain in chains for one in chain], f"pairs {pairs}")
            for number, (i, j) in enumerate(pairs):
                times = told[number * len(sizes) : (number + 1) * len(sizes)]
                large = statistics.median(one.seconds for one in times[1 : 1 + repeats])
                small = statistics.median(one.seconds for one in times[1 + repeats :])
                bandwidth[i][j] = _short(times[1].nbytes / large / 1e9)
                latency[i][j] = _short(1e3 * small)
        return bandwidth, latency

    def all_to_all(self, repeats: int, n_items: int) -> dict[str, Any]:
        """Measure a block from every worker to every other, all at once."""
        n, addresses = len(self.members), self.members.addresses
        seconds, busiest, total = [], [], 0
        for _ in range(1 + repeats):
            run = uuid.uuid4().hex
            blocks = {
                (i, j): workload.on(
                    addresses[i],
                    workload.view,
                    *(self.buffers[i], j, n_items),
                    key=workload.block_key(f"{run}-{i}-{j}"),
                )
                for i, j in itertools.permutations(range(n), 2)
            }
            views = self.client.persist(list(blocks.values()), optimize_graph=False)
            held = dict(zip(blocks, views, strict=True))
            wait(self.client, views, self.members, "blocks for all to all", 0)
            sinks = []
            for j, address in enumerate(addresses):
                sources = [i for i in range(n) if i != j]
                what = (
                    [held[i, j] for i in sources],
                    [f"{run}-{i}-{j}" for i in sources],
                    [workload.first_item(i, j, n) for i in sources],
                )
                sinks.append(workload.on(address, workload.sink, *what, n_items, None))
            start = time.perf_counter()
            told = self._gather(sinks, "all to all")
            seconds.append(time.perf_counter() - start)
            busiest.append(max(one.seconds for one in told))
            total = sum(one.nbytes for one in told)
        median = statistics.median(busiest[1:])
        return {
            "bytes": total,
            "block_bytes": n_items * workload.ITEM_NBYTES,
            "seconds": busiest[1:],
            "client_seconds": seconds[1:],
            "GB/s": total / median / 1e9,
        }

    def _gather(self, received: Sequence[Any], what: str) -> list[workload.Received]:
        nbytes = self.n_items * workload.ITEM_NBYTES * len(received)
        futures = self.client.compute(list(received), optimize_graph=False)
        wait(self.client, futures, self.members, what, nbytes)
        told: list[workload.Received] = self.client.gather(futures)
        self.n_wrong += sum(one.n_wrong for one in told)
        return told


def _short(value: float) -> float:
    """Keep what is significant: the matrices of many workers are long."""
    return float(f"{value:.4g}")


def steps(n: int, *, alone: bool) -> Iterator[list[tuple[int, int]]]:
    """Yield ordered pairs to measure at once; nobody is in two of them.

    The two directions come one after the other: one event loop in each worker serves both.
    """
    for pairs in workload.tournament(n):
        for direction in (pairs, [(j, i) for i, j in pairs]):
            yield from [[pair] for pair in direction] if alone else [direction]


def wait(
    client: distributed.Client, what: Sequence[Any], members: Members, name: str, nbytes: float
) -> None:
    """Wait for Dask tasks, for two minutes and the time that their bytes may take."""
    deadline_s = STEP_DEADLINE_S + nbytes / LEAST_BYTES_PER_S
    try:
        distributed.wait(what, timeout=deadline_s)
    except TimeoutError as exc:
        there = workers_of(client)
        gone = [n for n, a in zip(members.names, members.addresses, strict=True) if a not in there]
        why = (
            f"workers left: {', '.join(gone)}" if gone else "all workers are there; see their logs"
        )
        raise ClusterError(f"{name}: not complete after {deadline_s:.0f} s; {why}") from exc
