"""Rates of a running cluster's hardware, measured on all its workers at once."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import distributed
import numpy as np

from hpcdask.bench.cluster import Cluster, wait
from hpcdask.bench.measurement import RATES
from hpcdask.workloads import Device, array_module
from hpcdask.workloads.array import BIT_GENERATOR, CPU_TILE_NBYTES, ITEM_NBYTES

DEADLINE_S = 60.0
#: Rounds that count; the one before them does not.
REPEATS = 3
ROUND_S = 0.05
#: Bytes for a thread of a worker, or a GPU: more than any cache.
MAX_NBYTES: dict[Device, int] = {"cuda": 4_000_000_000, "cpu": 128_000_000}
MEMORY_FRACTION = 1 / 8
MATRIX_SIDE: dict[Device, int] = {"cuda": 8192, "cpu": 512}

Operation = Callable[[], Any]


def measure(cluster: Cluster) -> dict[str, float]:
    """Measure the rates of a cluster, per second: the best of three rounds of 0.05 s each."""
    share = cluster.memory_nbytes / cluster.n_slots * MEMORY_FRACTION
    nbytes = int(min(MAX_NBYTES[cluster.device], share))
    rates = {}
    for kind in RATES:
        workers = range(len(cluster.workers))
        futures = [cluster.start(i, _rates, kind, cluster.device, nbytes) for i in workers]
        wait(cluster, futures, f"the rate {kind!r}", DEADLINE_S)
        rounds = zip(*cluster.client.gather(futures), strict=True)
        rates[kind] = float(max(map(sum, rounds)))
    return rates


# --- on a worker ----------------------------------------------------------------------------------


def _rates(kind: str, device: Device, nbytes: int) -> list[float]:
    """Return the rate of each round on one worker, with all its threads or its GPU."""
    n_threads = 1 if device == "cuda" else distributed.get_worker().state.nthreads
    barrier = threading.Barrier(n_threads, timeout=DEADLINE_S)
    run = _gpu_round if device == "cuda" else _cpu_round

    def rounds(seed: int) -> list[float]:
        operation, amount = _operation(kind, device, nbytes, seed)
        found = []
        for _ in range(1 + REPEATS):
            barrier.wait()
            n_times, seconds = run(operation)
            found.append(n_times * amount / seconds)
        return found[1:]

    with ThreadPoolExecutor(n_threads) as pool:
        told = list(pool.map(rounds, range(n_threads)))
    if device == "cuda":
        array_module(device).get_default_memory_pool().free_all_blocks()
    return [sum(each) for each in zip(*told, strict=True)]


def _cpu_round(operation: Operation) -> tuple[int, float]:
    """Repeat an operation for the time of a round; return the number of times and the seconds."""
    n_times, elapsed, start = 0, 0.0, time.perf_counter()
    while elapsed < ROUND_S:
        operation()
        n_times, elapsed = n_times + 1, time.perf_counter() - start
    return n_times, elapsed


def _gpu_round(operation: Operation) -> tuple[int, float]:
    # The GPU must not wait for Python, so a single run decides how many there are.
    operation()
    n_times = max(1, round(ROUND_S / _gpu_seconds(operation, 1)))
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
    side = min(MATRIX_SIDE[device], math.isqrt(nbytes // (3 * np.dtype(dtype).itemsize)))
    # Random numbers: a GPU that multiplies ones needs less power, and is faster than it can be.
    draw = xp.random.default_rng(seed).standard_normal
    a, b = (draw((side, side), dtype=np.float64).astype(dtype) for _ in range(2))
    c = xp.empty_like(a)
    return lambda: xp.matmul(a, b, out=c), 2.0 * side**3
