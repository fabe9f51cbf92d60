"""Limits of a running cluster's hardware, measured on its own workers.

A workload cannot end before the part of it that takes longest: its bytes through the memory, its
random numbers, its matrix products, its bytes between workers, each at the rate that the same
workers reach when they do nothing else. That is the roofline model (Williams, Waterman and
Patterson, "Roofline: an insightful visual performance model for multicore architectures",
Communications of the ACM 52(4), 2009), with more than two roofs.

Every rate is measured on all workers at once, so that what they share is shared here too.
"""

from __future__ import annotations

import math
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import distributed
import numpy as np

from hpcdask.bench.cluster import Cluster, workers_of
from hpcdask.bench.exchange_pairs import Members, Pairs
from hpcdask.errors import ClusterError
from hpcdask.workloads import Device, WorkloadError, array_module
from hpcdask.workloads import exchange as exchange_workload
from hpcdask.workloads.array import BIT_GENERATOR, CPU_TILE_NBYTES, ITEM_NBYTES

#: What a record of these rates has for a workload: ``{"workload": LIMITS, "rates": {...}}``.
LIMITS = "limits"
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
#: Workers spill from 0.6 on, and count each view of a buffer as memory of its own.
LINK_FRACTION = 0.25


# --- what a workload needs, and how long that takes at least --------------------------------------


@dataclass(frozen=True)
class Work:
    """Least work of a workload, however it is written.

    ``memory``: bytes read from the memory of the devices and written to it; ``random``: float64
    normals drawn; ``matrix_float64`` and ``matrix_float32``: floating-point operations of matrix
    products; ``link``: bytes from one worker to another.
    """

    memory: float = 0.0
    random: float = 0.0
    matrix_float64: float = 0.0
    matrix_float32: float = 0.0
    link: float = 0.0


def bound(work: Work, rates: Mapping[str, float]) -> dict[str, Any]:
    """Tell how many ``seconds`` a workload takes at least, and ``by`` which of its ``parts``.

    What has no rate has no part: one worker has no link. Nothing with a rate is a WorkloadError.
    """
    parts = {
        name: amount / rates[name]
        for name, amount in asdict(work).items()
        if amount > 0 and rates.get(name, 0.0) > 0
    }
    if not parts:
        raise WorkloadError(
            f"{work} has no limit: none of its parts is among the rates {sorted(rates)}"
        )
    by = max(parts, key=lambda name: parts[name])
    return {"seconds": parts[by], "by": by, "parts": parts}


def against(limit: Mapping[str, Any], median_s: float) -> dict[str, Any]:
    """Return what `bound` told with ``fraction``: the part of the limit that a median reached."""
    return {**limit, "fraction": limit["seconds"] / median_s}


# --- rates ----------------------------------------------------------------------------------------


def measure(cluster: Cluster) -> dict[str, float]:
    """Measure the rates of `Work` that a cluster reaches with all workers at once, per second.

    Each is the best of three rounds of 0.05 s, after one that does not count; ``link`` is of blocks
    that each worker fetches from its neighbour. Clusters with something else to do give lower
    rates.
    """
    members = Members.of(workers_of(cluster.client))
    rates = {kind: _together(cluster, members, kind) for kind in _OPERATIONS}
    if len(members) > 1:
        rates["link"] = _ring(cluster, members)
    return rates


def _together(cluster: Cluster, members: Members, kind: str) -> float:
    share = cluster.memory_nbytes / cluster.n_slots * MEMORY_FRACTION
    nbytes = int(min(MAX_NBYTES[cluster.device], max(share, LEAST_NBYTES)))
    futures = [
        cluster.client.submit(_rates, kind, cluster.device, nbytes, workers=[address], pure=False)
        for address in members.addresses
    ]
    _wait(futures, f"the rate {kind!r}")
    told = cluster.client.gather(futures)
    return float(max(sum(rounds) for rounds in zip(*told, strict=True)))


def _wait(futures: Sequence[Any], what: str) -> None:
    try:
        distributed.wait(futures, timeout=DEADLINE_S)
    except TimeoutError as exc:
        n_left = sum(not future.done() for future in futures)
        raise ClusterError(
            f"{what}: {n_left} of {len(futures)} Dask tasks not complete after {DEADLINE_S:g} s; "
            "see whether the workers have something else to do, and their logs"
        ) from exc


# --- on a worker ----------------------------------------------------------------------------------


def _rates(kind: str, device: Device, nbytes: int) -> list[float]:
    """Measure on one worker, with all its threads or its GPU: the rate of each round."""
    n_threads = 1 if device == "cuda" else distributed.get_worker().state.nthreads
    barrier = threading.Barrier(n_threads, timeout=DEADLINE_S)
    with ThreadPoolExecutor(n_threads) as pool:
        prepared = list(
            pool.map(lambda seed: _prepare(kind, device, nbytes, seed), range(n_threads))
        )
        told = list(pool.map(lambda one: _rounds(one[0], one[1], device, barrier), prepared))
    if device == "cuda":
        del prepared
        array_module(device).get_default_memory_pool().free_all_blocks()
    return [sum(rounds) for rounds in zip(*told, strict=True)]


Operation = Callable[[], Any]


def _prepare(kind: str, device: Device, nbytes: int, seed: int) -> tuple[Operation, float]:
    """Return an operation that ran once, and how much it does; smaller where memory is short.

    What is free cannot be asked: it may lie in a pool, RMM's or CuPy's.
    """
    while True:
        try:
            operation, amount = _OPERATIONS[kind](device, nbytes, seed)
            operation()
        except MemoryError:
            if nbytes < 2 * LEAST_NBYTES:
                raise
            nbytes //= 2
        else:
            return operation, amount


def _rounds(
    operation: Operation, amount: float, device: Device, barrier: threading.Barrier
) -> list[float]:
    run = _gpu_round if device == "cuda" else _cpu_round
    rates = []
    for _ in range(1 + REPEATS):
        barrier.wait()
        n_times, seconds = run(operation)
        rates.append(n_times * amount / seconds)
    return rates[1:]


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


def _copy(device: Device, nbytes: int, _seed: int) -> tuple[Operation, float]:
    xp = array_module(device)
    # Not zeros: the pages of those are one and the same until something is written to them.
    source, target = (xp.ones(nbytes // 2 // ITEM_NBYTES) for _ in range(2))
    return lambda: xp.copyto(target, source), float(source.nbytes + target.nbytes)


def _normals(device: Device, nbytes: int, seed: int) -> tuple[Operation, float]:
    if device == "cuda":
        cupy = array_module(device)
        n = nbytes // ITEM_NBYTES
        rng = cupy.random.Generator(getattr(cupy.random, BIT_GENERATOR)(seed))
        return lambda: rng.standard_normal(n, dtype=np.float64), float(n)
    host_rng = np.random.Generator(np.random.SFC64(seed))
    tile = np.empty(CPU_TILE_NBYTES // ITEM_NBYTES)
    return lambda: host_rng.standard_normal(out=tile), float(tile.size)


def _product(dtype: str) -> Callable[[Device, int, int], tuple[Operation, float]]:
    def make(device: Device, nbytes: int, seed: int) -> tuple[Operation, float]:
        xp = array_module(device)
        fits = math.isqrt(nbytes // (3 * np.dtype(dtype).itemsize))
        n = min(MATRIX_SIDE[device], fits)
        # Random numbers: a GPU that multiplies ones needs less power, and is faster than it can be.
        rng = xp.random.default_rng(seed)
        a, b = (rng.standard_normal((n, n), dtype=np.float64).astype(dtype) for _ in range(2))
        c = xp.empty_like(a)
        return lambda: xp.matmul(a, b, out=c), 2.0 * n**3

    return make


_OPERATIONS: dict[str, Callable[[Device, int, int], tuple[Operation, float]]] = {
    "memory": _copy,
    "random": _normals,
    "matrix_float64": _product("float64"),
    "matrix_float32": _product("float32"),
}


# --- between workers ------------------------------------------------------------------------------


def _ring(cluster: Cluster, members: Members) -> float:
    share = LINK_FRACTION * cluster.memory_nbytes / len(members) / (REPEATS + 2)
    n_items = max(1, int(min(LINK_NBYTES[cluster.device], share)) // exchange_workload.ITEM_NBYTES)
    pairs = Pairs(cluster.client, members, n_items, cluster.device)
    n, run = len(members), uuid.uuid4().hex
    chains = [
        exchange_workload.chain(
            pairs.buffers[i], (i, (i + 1) % n), members.addresses, [n_items] * (1 + REPEATS), run
        )
        for i in range(n)
    ]
    futures = cluster.client.compute(
        [one for chain in chains for one in chain], optimize_graph=False
    )
    _wait(futures, "the rate 'link'")
    told: list[exchange_workload.Received] = cluster.client.gather(futures)
    if n_wrong := sum(one.n_wrong for one in told):
        raise ClusterError(
            f"{n_wrong} of {len(told)} blocks between workers arrived wrong: "
            "`hpcdask bench exchange` tells which pairs of workers"
        )
    rounds = [told[repeat :: 1 + REPEATS] for repeat in range(1, 1 + REPEATS)]
    return max(sum(one.nbytes / one.seconds for one in received) for received in rounds)
