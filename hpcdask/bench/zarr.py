"""Measure the way from a Zarr store of genotypes to its population structure, and check it."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpcdask.bench.cluster import Cluster, workers_of
from hpcdask.bench.records import Case, decimal_bytes
from hpcdask.bench.workload import Timed, Workload, compute, hold, measure, run
from hpcdask.errors import UsageError
from hpcdask.logs import say
from hpcdask.workloads import Check, made_genotypes, to_host
from hpcdask.workloads import genotypes as workload
from hpcdask.workloads.svd import svd_rows
from hpcdask.workloads.zarr import open_rows

SAMPLES = 2000
LEAST_VARIANTS = 1000
N_POPULATIONS = 4
CHUNK_NBYTES = 16_000_000
#: Of the memory of all workers, for computing from memory.
USABLE_FRACTION = 0.5
#: Of the variance of the samples' coordinates, the part that lies within populations.
LARGEST_WITHIN = 0.1


def run_zarr(
    cluster: Cluster,
    nbytes: int,
    *,
    path: Path | None = None,
    component: str | None = None,
    repeats: int = 3,
    timeline: bool = False,
) -> dict[str, Any]:
    """Measure "load, filter, normalise, decompose", and its parts alone.

    What is at ``path`` is read; otherwise a store of ``nbytes`` is made there and stays. None is a
    temporary one. There is no limit: what a file system can do is not measured.
    """
    client = cluster.client
    with _store(cluster, nbytes, path) as (where, written):
        x = open_rows(where, device=cluster.device, n_slots=cluster.n_slots, component=component)
        largest = max(x.chunks[0]), x.shape[1]
        case = Case("zarr", "tuned", x.shape, str(x.dtype), x.numblocks[0], largest)
        k = min(N_POPULATIONS - 1, *x.shape)
        how: dict[str, Any] = {"n_slots": cluster.n_slots, "device": cluster.device}
        phases: list[dict[str, Any]] = []

        def pipeline(_x: Any, _index: int) -> list[Any]:
            return list(workload.population_structure(where, k, component=component, **how))

        def finish(_x: Any, timed: Timed) -> tuple[dict[str, Any], list[Check]]:
            load = measure(client, lambda _: [_sum(x)], repeats, n_warmup=1)
            phases.append({"name": "load alone", "seconds": statistics.median(load.seconds)})
            if case.nbytes <= USABLE_FRACTION * cluster.memory_nbytes:
                seconds = _compute(cluster, x, k, repeats)
                phases.append({"name": "compute alone", "seconds": seconds})
            s, v, variants = timed.results
            checks = [Check("variants", int(variants.sum()), x.shape[0], 0)]
            if written is not None:
                checks.append(Check("sum of all genotypes", int(load.results[0]), written, 0))
                checks.append(Check("variance within populations", within(v), 0.0, LARGEST_WITHIN))
            return {
                "k": k,
                "singular_values": s.tolist(),
                "variants": dict(zip(("kept", "missing", "rare"), variants.tolist(), strict=True)),
                "load_seconds": load.seconds,
            }, checks

        line = run(Workload(case, pipeline, finish), cluster, repeats, timeline)
    return {**line, "phases": phases}


def _sum(x: Any) -> Any:
    """Add up all genotypes, as NumPy. Sums of rows fit in 32 bits, and take half as long."""
    total = x.sum(axis=1, dtype="uint32").sum(dtype="uint64")
    return total.map_blocks(to_host, dtype="uint64")


def within(v: Any) -> float:
    """Return which part of the variance of coordinates, shape (k, samples), is in populations."""
    populations = made_genotypes.populations(v.shape[1], N_POPULATIONS)
    groups = [v[:, populations == number] for number in range(N_POPULATIONS)]
    inside = sum(((group - group.mean(axis=1, keepdims=True)) ** 2).sum() for group in groups)
    return float(inside / ((v - v.mean(axis=1, keepdims=True)) ** 2).sum())


def _compute(cluster: Cluster, x: Any, k: int, repeats: int) -> float:
    """Seconds from memory to all that the whole way gives."""
    held = hold(cluster.client, x)

    def build(_: int) -> list[Any]:
        triplets = svd_rows(held, k, prepare=workload.normalise, device=cluster.device)
        return [*triplets[1:], workload.count_variants(held, device=cluster.device)]

    timed = measure(cluster.client, build, repeats, n_warmup=1)
    return statistics.median(timed.seconds)


@contextlib.contextmanager
def _store(cluster: Cluster, nbytes: int, path: Path | None) -> Iterator[tuple[str, int | None]]:
    """Yield the store, and the sum of what was written to it, if it was made."""
    if path is not None and path.exists():
        yield str(path), None
        return
    folder = None
    if path is None:
        _check_hosts(cluster)
        folder = tempfile.mkdtemp(prefix="hpcdask-zarr-")
        path = Path(folder) / "genotypes.zarr"
    # One that was not written to its end must not be taken for a whole one the next time
    partial = path.with_name(f"{path.name}.partial-{os.urandom(4).hex()}")
    try:
        written = _make(cluster, nbytes, str(partial), path)
        partial.rename(path)
        yield str(path), written
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _check_hosts(cluster: Cluster) -> None:
    here = cluster.client.run_on_scheduler(_boot_id)
    elsewhere = [w for w, boot in cluster.client.run(_boot_id).items() if boot != here]
    if elsewhere or _boot_id() != here:
        names = {worker["host"] for worker in workers_of(cluster.client).values()}
        raise UsageError(
            f"workers are on {len(names)} hosts: --path FOLDER, on a file system that all see, "
            "says where the store is, or is to be made"
        )


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text()


def _make(cluster: Cluster, nbytes: int, path: str, target: Path) -> int:
    samples = min(SAMPLES, max(N_POPULATIONS, nbytes // LEAST_VARIANTS))
    shape = max(1, nbytes // samples), samples
    few = math.ceil(shape[0] / (4 * cluster.n_slots))
    chunks = max(1, min(CHUNK_NBYTES // samples, few)), samples
    say(f"writing {decimal_bytes(math.prod(shape))} of made-up genotypes to {target}")
    start = time.perf_counter()
    total = made_genotypes.write_genotypes(
        path, shape, chunks=chunks, n_slots=cluster.n_slots, n_populations=N_POPULATIONS
    )
    written = int(compute(cluster.client, [total])[0])
    say(f"written in {time.perf_counter() - start:.1f} s")
    return written
