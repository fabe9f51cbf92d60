"""Exchange between workers: blocks from one to another, all to all, and ``x + x.T``.

The first two move blocks whose every number is known, so that the receiver can check them. The
time of a transfer is the one that distributed's worker itself logs for it, from the request to the
last byte: no scheduling and no Dask task is in it.

A worker has one buffer, and every block it sends is a view of that. So a transport that has to map
a buffer before it can read it, as CUDA IPC does, does so once for each pair, in the first transfer,
which is not counted.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import dask
import dask.array as da
import numpy as np
from dask.delayed import Delayed, delayed
from distributed import get_worker

from hpcdask.workloads import Check, Device, WorkloadError, array_module, run_bench, to_host

ITEM_NBYTES = 8
#: Blocks of one buffer start this many items apart: 512 bytes, so that copies stay aligned.
STRIDE_ITEMS = 64
#: Rows of a chunk are compared with what they should be in tiles of this size.
TILE_NBYTES = 1 << 26
CHUNKS_PER_WORKER = 4
MAX_CHUNK_NBYTES: dict[Device, int] = {"cuda": 1_000_000_000, "cpu": 32_000_000}


def tournament(n: int) -> list[list[tuple[int, int]]]:
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


# --- blocks from one worker to another ------------------------------------------------------------


class Received(NamedTuple):
    """Report of a receiving worker: times from the first request to the last byte, by its log.

    ``n_wrong`` of them did not hold what they should.
    """

    seconds: float
    nbytes: int
    n_wrong: int


def on(address: str, function: Callable[..., Any], *args: Any, key: str | None = None) -> Delayed:
    """Make a Dask task for this worker alone."""
    with dask.annotate(workers=[address], allow_other_workers=False):
        return cast("Delayed", delayed(function, pure=False)(*args, dask_key_name=key))


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


def chain(
    buffer: Delayed, pair: tuple[int, int], addresses: Sequence[str], sizes: Sequence[int], run: str
) -> list[Delayed]:
    """Build transfers from one worker to another, each of which begins when the last is over.

    ``sizes`` are their items; ``run`` is a part of the keys. Two Dask tasks each: a view, a
    `Received`.
    """
    source, destination = pair
    first = first_item(source, destination, len(addresses))
    received: list[Delayed] = []
    for number, n_items in enumerate(sizes):
        name = f"{run}-{source}-{destination}-{number}"
        block = on(addresses[source], view, buffer, destination, n_items, key=block_key(name))
        what = [block], [name], [first], n_items, received[-1] if received else None
        received.append(on(addresses[destination], sink, *what, key=f"received-{name}"))
    return received


def block_key(name: str) -> str:
    """Return the key of a block. Dask would take the key itself, as an argument, for the block."""
    return f"block-{name}"


def sink(
    blocks: Sequence[Any], names: Sequence[str], firsts: Sequence[int], n_items: int, _after: Any
) -> Received:
    """Check the blocks that came for this Dask task, and tell how long they took."""
    keys = {block_key(name) for name in names}
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


def transports(dask_worker: Any) -> dict[str, Any]:
    """Tell how this worker talks to others; runs on workers, with ``client.run``.

    ``peers`` maps addresses to transports other than ``scheme``, which the worker is known by.
    """
    peers = dict(getattr(dask_worker, "peer_transports", None) or {})
    return {"peers": peers, "scheme": dask_worker.address.partition("://")[0]}


# --- x + x.T --------------------------------------------------------------------------------------


def grid(nbytes: int, n_workers: int, device: Device) -> tuple[int, ...]:
    """Cut the side of a square float64 array, so that its square chunks occupy all workers."""
    n = math.isqrt(max(nbytes, 0) // ITEM_NBYTES)
    few = math.ceil(math.sqrt(CHUNKS_PER_WORKER * n_workers))
    edge = math.isqrt(MAX_CHUNK_NBYTES[device] // ITEM_NBYTES)
    parts = max(few, math.ceil(n / edge))
    if n < parts:
        least = ITEM_NBYTES * parts**2
        raise WorkloadError(f"x of {nbytes} B is too small: the least is {least} B")
    return tuple(b - a for a, b in itertools.pairwise(i * n // parts for i in range(parts + 1)))


def owners(parts: int, n_workers: int) -> dict[tuple[int, int], int]:
    """Spread ``parts`` x ``parts`` chunks evenly over workers, in an order without a pattern.

    In a regular order a chunk and its mirror image may always meet on one worker.
    """
    cells = [(i, j) for i in range(parts) for j in range(parts)]
    shuffled = np.random.default_rng(0).permutation(np.arange(len(cells)) % n_workers)
    return dict(zip(cells, shuffled.tolist(), strict=True))


def square_block(
    cell: tuple[int, int], starts: Sequence[int], rows: Sequence[int], seed: int, device: Device
) -> Any:
    """Make a chunk of ``x[i, j] = i - 2 j + seed``."""
    xp = array_module(device)
    i, j = (xp.arange(starts[part], starts[part] + rows[part], dtype=np.float64) for part in cell)
    return i[:, None] + (seed - 2 * j)[None, :]


def to_cross(where: Mapping[tuple[int, int], str], rows: Sequence[int]) -> int:
    """Return the bytes that have to go from one worker to another for ``x + x.T``.

    Of a chunk and its mirror image on different workers, by ``where``, one at least has to move.
    """
    return sum(
        ITEM_NBYTES * rows[i] * rows[j]
        for (i, j), worker in where.items()
        if i < j and where[j, i] != worker
    )


def verify(y: da.Array, seed: int, device: Device) -> da.Array:
    """Compare every element of ``x + x.T`` with what it should be, where it lies.

    Of each chunk, the result (p, 2 p) has the sum and the largest deviation.
    """
    parts = y.numblocks[0]
    kept: dict[str, Any] = {"chunks": ((1,) * parts, (2,) * parts), "meta": np.empty((0, 0))}
    found = da.map_blocks(_deviation, y, seed=seed, device=device, dtype=np.float64, **kept)
    return cast("da.Array", found)


def _deviation(block: Any, *, seed: int, device: Device, block_info: Any = None) -> Any:
    xp = array_module(device)
    (top, bottom), (left, right) = block_info[0]["array-location"]
    columns = xp.arange(left, right, dtype=np.float64)
    step = max(1, TILE_NBYTES // (ITEM_NBYTES * (right - left)))
    worst = 0.0
    for start in range(top, bottom, step):
        rows = xp.arange(start, min(start + step, bottom), dtype=np.float64)
        expected = (2 * seed - rows)[:, None] - columns[None, :]
        found = block[start - top : start - top + len(rows)]
        worst = max(worst, float(abs(found - expected).max()))
    return np.array([[float(to_host(block.sum())), worst]])


def check_sum(found: np.ndarray[Any, Any], n: int, seed: int) -> list[Check]:
    """Turn what `verify` found for an n x n array into checks."""
    total = float(2 * seed * n * n - n * n * (n - 1))
    return [
        # Sums of whole numbers are exact up to 2^53, which 1 TB exceeds.
        Check("x + x.T, sum", float(found[:, 0::2].sum()), total, abs(total) * 1e-12),
        Check("x + x.T, largest deviation", float(found[:, 1::2].max()), 0.0, 0.0),
    ]


if __name__ == "__main__":
    run_bench("exchange")
