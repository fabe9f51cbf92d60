"""Exchange between workers: who meets whom, the blocks, and the report of who received them.

Every number of the blocks is known, so that the receiver can check them. The time of a transfer is
the one that distributed's worker itself logs for it, from the request to the last byte: no
scheduling and no Dask task is in it.

A worker has one buffer, and every block it sends is a view of that. So a transport that has to map
a buffer before it can read it, as CUDA IPC does, does so once for each pair, in the first transfer,
which is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from distributed import get_worker

from hpcdask.workloads import Device, WorkloadError, array_module

ITEM_NBYTES = 8
#: All pairs of so many workers are measured.
MANY = 32
#: Blocks of one buffer start this many items apart: 512 bytes, so that copies stay aligned.
STRIDE_ITEMS = 64

Pairs = list[tuple[int, int]]


def tournament(n: int) -> list[Pairs]:
    """Arrange all pairs of n workers in n - 1 rounds, or n if n is odd (circle method).

    Nobody is in two pairs of a round.
    """
    circle: list[int | None] = list(range(n)) + [None] * (n % 2)
    size = len(circle)
    rounds = []
    for _ in range(size - 1):
        opposite = zip(circle[: size // 2], reversed(circle[size // 2 :]), strict=True)
        rounds.append([(a, b) for a, b in opposite if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return rounds


def steps(n: int, *, alone: bool = False) -> list[Pairs]:
    """Return the ordered pairs to measure, those of each step at once; nobody is in two of them.

    The two directions come one after the other: one event loop in each worker serves both. Of more
    than `MANY` workers, each meets its neighbour, most likely on its node, and some of the others.
    """
    rounds = tournament(n)
    if n > MANY:
        some = max(2, MANY * MANY // n)
        chosen = [rounds[i * len(rounds) // some] for i in range(some)]
        met = {frozenset(pair) for pairs in chosen for pair in pairs}
        near = [(i, i + 1) for i in range(0, n - 1, 2) if frozenset((i, i + 1)) not in met]
        rounds = [near, *chosen]
    both = [turn for pairs in rounds for turn in (pairs, [(j, i) for i, j in pairs])]
    return [[pair] for step in both for pair in step] if alone else both


class Received(NamedTuple):
    """Report of a receiving worker: times from the first request to the last byte, by its log.

    ``n_wrong`` blocks did not hold what they should.
    """

    seconds: float
    nbytes: int
    n_wrong: int


def first_item(source: int, destination: int, n_workers: int) -> int:
    """Return the number that a block from one worker to another begins with; no two are equal."""
    return STRIDE_ITEMS * (source * n_workers + destination)


def fill(source: int, n_workers: int, n_items: int, device: Device) -> Any:
    """Make the buffer that a worker sends from: whole numbers, each one more than the last."""
    xp = array_module(device)
    start = first_item(source, 0, n_workers)
    return xp.arange(start, start + n_items + STRIDE_ITEMS * n_workers, dtype=np.int64)


def view(buffer: Any, destination: int, n_items: int) -> Any:
    """Return the block for a destination, without a copy."""
    start = STRIDE_ITEMS * destination
    return buffer[start : start + n_items]


def is_right(block: Any, first: int, n_items: int) -> bool:
    """Return whether a block has the length, first and last number and sum that it should."""
    return bool(
        block.shape == (n_items,)
        and int(block[0]) == first
        and int(block[-1]) == first + n_items - 1
        and int(block.sum()) == n_items * first + n_items * (n_items - 1) // 2
    )


def sink(
    blocks: Sequence[Any], names: Sequence[str], firsts: Sequence[int], n_items: int
) -> Received:
    """Check the blocks, by the names of their keys, and report how long they took."""
    keys = set(names)
    log = list(get_worker().transfer_incoming_log)
    entries = [entry for entry in log if keys & entry["keys"].keys()]
    if len({key for entry in entries for key in entry["keys"]} & keys) < len(keys):
        raise WorkloadError(
            f"the worker's log of {len(log)} transfers does not have all of {sorted(keys)}: "
            "raise distributed.admin.low-level-log-length in Dask's configuration"
        )
    seconds = max(entry["stop"] for entry in entries) - min(entry["start"] for entry in entries)
    n_wrong = sum(
        not is_right(block, first, n_items) for block, first in zip(blocks, firsts, strict=True)
    )
    # distributed's clock may not move in a transfer of a few bytes within one process.
    return Received(max(seconds, 1e-9), sum(entry["total"] for entry in entries), n_wrong)
