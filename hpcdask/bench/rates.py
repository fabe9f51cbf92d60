"""Rates of a running cluster's hardware, measured on its own workers.

Every rate is measured on all workers at once, so that what they share is shared here too.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import distributed
import numpy as np

from hpcdask.bench.cluster import Cluster, wait
from hpcdask.bench.exchange import BLOCKS_FRACTION, HELD, Blocks
from hpcdask.errors import ClusterError
from hpcdask.workloads import Device, array_module
from hpcdask.workloads.array import BIT_GENERATOR, CPU_TILE_NBYTES, ITEM_NBYTES

#: Rates that a worker measures by itself.
KINDS = ("memory", "random", "matrix_float64", "matrix_float32")
DEADLINE_S = 60.0
#: Rounds that count; the one before them does not.
REPEATS = 3
ROUND_S = 0.05
#: What a thread of a worker, or a GPU, may use. More than any cache.
MAX_NBYTES: dict[Device, int] = {"cuda": 4_000_000_000, "cpu": 128_000_000}
MEMORY_FRACTION = 1 / 8
LEAST_NBYTES = 1 << 20
MATRIX_SIDE: dict[Device, int] = {"cuda": 8192, "cpu": 512}
LINK_NBYTES: dict[Device, int] = {"cuda": 1_000_000_000, "cpu": 16_000_000}

Operation = Callable[[], Any]


def measure(cluster: Cluster) -> dict[str, float]:
    """Measure the rates that a cluster reaches with all workers at once, per second.

    Each is the best of three rounds of 0.05 s, after one that does not count; ``link`` is of blocks
    that each worker fetches from its neighbour. Clusters with something else to do give lower
    rates.
    """
    share = cluster.memory_nbytes / cluster.n_slots * MEMORY_FRACTION
    nbytes = int(min(MAX_NBYTES[cluster.device], max(share, LEAST_NBYTES)))
    rates = {}
    for kind in KINDS:
        workers = range(len(cluster.workers))
        futures = [cluster.start(i, _rates, kind, cluster.device, nbytes) for i in workers]
        wait(cluster, futures, f"the rate {kind!r}", DEADLINE_S)
        told = cluster.client.gather(futures)
        rates[kind] = float(max(sum(rounds) for rounds in zip(*told, strict=True)))
    if len(cluster.workers) > 1:
        rates["link"] = _ring(cluster)
    return rates


def _ring(cluster: Cluster) -> float:
    n = len(cluster.workers)
    share = BLOCKS_FRACTION * cluster.memory_nbytes / n / HELD
    n_items = max(1, int(min(LINK_NBYTES[cluster.device], share)) // ITEM_NBYTES)
    blocks, ring = Blocks(cluster, n_items), [(i, (i + 1) % n) for i in range(n)]
    rounds = [blocks.move(ring, n_items).values() for _ in range(1 + REPEATS)][1:]
    if blocks.n_wrong:
        raise ClusterError(
            f"{blocks.n_wrong} blocks between workers arrived wrong: `hpcdask bench exchange` "
            "tells which pairs of workers"
        )
    return max(sum(one.nbytes / one.seconds for one in received) for received in rounds)


# --- on a worker ----------------------------------------------------------------------------------


def _rates(kind: str, device: Device, nbytes: int) -> list[float]:
    """Measure on one worker, with all its threads or its GPU: the rate of each round."""
    n_threads = 1 if device == "cuda" else distributed.get_worker().state.nthreads
    barrier = threading.Barrier(n_threads, timeout=DEADLINE_S)
    run = _gpu_round if device == "cuda" else _cpu_round

    def rounds(prepared: tuple[Operation, float]) -> list[float]:
        operation, amount = prepared
        found = []
        for _ in range(1 + REPEATS):
            barrier.wait()
            n_times, seconds = run(operation)
            found.append(n_times * amount / seconds)
        return found[1:]

    with ThreadPoolExecutor(n_threads) as pool:
        prepare = functools.partial(_prepare, kind, device, nbytes)
        prepared = list(pool.map(prepare, range(n_threads)))
        told = list(pool.map(rounds, prepared))
    if device == "cuda":
        del prepared
        array_module(device).get_default_memory_pool().free_all_blocks()
    return [sum(each) for each in zip(*told, strict=True)]


def _prepare(kind: str, device: Device, nbytes: int, seed: int) -> tuple[Operation, float]:
    """Return an operation that ran once, and how much it does; smaller where memory is short.

    What is free cannot be asked: it may lie in a pool, RMM's or CuPy's.
    """
    while True:
        try:
            operation, amount = _operation(kind, device, nbytes, seed)
            operation()
        except MemoryError:
            if nbytes < 2 * LEAST_NBYTES:
                raise
            nbytes //= 2
        else:
            return operation, amount


def _cpu_round(operation: Operation) -> tuple[int, float]:
    """Repeat an operation for the time of a round: how often, and the seconds that took."""
    n_times, elapsed, start = 0, 0.0, time.perf_counter()
    while elapsed < ROUND_S:
        operation()
        n_times, elapsed = n_times + 1, time.perf_counter() - start
    return n_times, elapsed


def _gpu_round(operation: Operation) -> tuple[int, float]:
    # The GPU must not wait for Python, so how often is decided before, from a single time.
    once = _gpu_seconds(operation, 1)
    if once >= ROUND_S:  # some GPUs multiply float64 slowly
        return 1, once
    n_times = max(1, round(ROUND_S / once))
    return n_times, _gpu_seconds(operation, n_times)


def _gpu_seconds(operation: Operation, n_times: int) -> float:
    cuda = array_module("cuda").cuda
    start, stop = cuda.Event(), cuda.Event()
    start.record()
    for _ in range(n_times):
        operation()
    stop.record()
    stop.synchronize()
    return float(cuda.get_elapsed_time(start, stop)) / 1e3


def _operation(kind: str, device: Device, nbytes: int, seed: int) -> tuple[Operation, float]:
    """Return an operation within so much memory, and how much of its kind it does."""
    xp = array_module(device)
    if kind == "memory":
        # Not zeros: the pages of those are one and the same until something is written to them.
        source, target = (xp.ones(nbytes // 2 // ITEM_NBYTES) for _ in range(2))
        return lambda: xp.copyto(target, source), float(source.nbytes + target.nbytes)
    if kind == "random" and device == "cuda":
        n = nbytes // ITEM_NBYTES
        rng = xp.random.Generator(getattr(xp.random, BIT_GENERATOR)(seed))
        return lambda: rng.standard_normal(n, dtype=np.float64), float(n)
    if kind == "random":
        host_rng = np.random.Generator(np.random.SFC64(seed))
        tile = np.empty(CPU_TILE_NBYTES // ITEM_NBYTES)
        return lambda: host_rng.standard_normal(out=tile), float(tile.size)
    dtype = kind.removeprefix("matrix_")
    fits = math.isqrt(nbytes // (3 * np.dtype(dtype).itemsize))
    side = min(MATRIX_SIDE[device], fits)
    # Random numbers: a GPU that multiplies ones needs less power, and is faster than it can be.
    draw = xp.random.default_rng(seed).standard_normal
    a, b = (draw((side, side), dtype=np.float64).astype(dtype) for _ in range(2))
    c = xp.empty_like(a)
    return lambda: xp.matmul(a, b, out=c), 2.0 * side**3
