"""Measure the way from a Zarr store of genotypes to its population structure, and check it."""

from __future__ import annotations

import contextlib
import math
import os
import platform
import shutil
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from dask.utils import format_bytes

from hpcdask.bench.cluster import Cluster
from hpcdask.bench.execution import Timed, compute, measure, run, suitable
from hpcdask.bench.measurement import Measurement
from hpcdask.errors import UsageError
from hpcdask.logs import say
from hpcdask.workloads import Check, to_host
from hpcdask.workloads import genotypes as workload
from hpcdask.workloads.zarr import open_rows, zarr_module

SAMPLES = 2000
LEAST_VARIANTS = 1000
N_POPULATIONS = 4
CHUNK_NBYTES = 16_000_000
#: Of the variance of the samples' coordinates, the part that lies within populations.
LARGEST_WITHIN = 0.1


def run_zarr(
    cluster: Cluster,
    nbytes: int | None = None,
    *,
    path: Path | None = None,
    component: str | None = None,
    repeats: int = 3,
) -> Measurement:
    """Measure "load, filter, normalise, decompose", and loading alone.

    The store at ``path`` is read; if there is none, one of ``nbytes`` is made and stays. None is a
    temporary store. There is no limit: what a file system can do is not measured.
    """
    how: dict[str, Any] = {"n_slots": cluster.n_slots, "device": cluster.device}
    how["component"] = component
    with _store(cluster, nbytes or suitable(cluster, "zarr"), path) as (where, written):
        x = open_rows(where, **how)
        k = min(N_POPULATIONS - 1, *x.shape)
        # Sums of rows fit in 32 bits, and take half as long
        total = x.sum(axis=1, dtype="uint32").sum(dtype="uint64")
        total = total.map_blocks(to_host, dtype="uint64")
        more: dict[str, Any] = {}

        def check(_: Any, timed: Timed) -> list[Check]:
            load = measure(cluster, lambda _: [total], repeats)
            load_s, whole_s = statistics.median(load.seconds), statistics.median(timed.seconds)
            more["phases"] = {"load alone": load_s, "beyond loading": max(0.0, whole_s - load_s)}
            s, v, variants = timed.results
            counts = dict(zip(("kept", "missing", "rare"), variants.tolist(), strict=True))
            more["result"] = {"singular_values": s.tolist(), "variants": counts}
            checks = [Check("variants", int(variants.sum()), x.shape[0], 0)]
            if written is not None:
                checks.append(Check("sum of all genotypes", int(load.results[0]), written, 0))
                checks.append(Check("variance within populations", within(v), 0.0, LARGEST_WITHIN))
            return checks

        found = run(
            cluster,
            lambda *_: list(workload.population_structure(where, k, **how)),
            check,
            repeats=repeats,
            chunks=x.chunks,
            workload="zarr",
            form="tuned",
            dtype=str(x.dtype),
            k=k,
        )
        return replace(found, **more)


def within(v: Any) -> float:
    """Return which part of the variance of coordinates, shape (k, samples), is in populations."""
    populations = workload.populations(v.shape[1], N_POPULATIONS)
    groups = [v[:, populations == number] for number in range(N_POPULATIONS)]
    inside = sum(((group - group.mean(axis=1, keepdims=True)) ** 2).sum() for group in groups)
    return float(inside / ((v - v.mean(axis=1, keepdims=True)) ** 2).sum())


@contextlib.contextmanager
def _store(cluster: Cluster, nbytes: int, path: Path | None) -> Iterator[tuple[str, int | None]]:
    """Yield the store, and the sum of what was written to it, if it was made."""
    if path is not None and path.exists():
        yield str(path), None
        return
    zarr_module()  # or say at once what is missing
    with contextlib.ExitStack() as stack:
        if path is None:
            if {worker.host for worker in cluster.workers} != {platform.node()}:
                raise UsageError(
                    "workers and client are on several hosts: --path FOLDER, on a file system "
                    "that all see, says where the store is, or is to be made"
                )
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="hpcdask-zarr-"))
            path = Path(folder, "genotypes.zarr")
        # One that was not written to its end must not be taken for a whole one the next time
        partial = path.with_name(f"{path.name}.partial-{os.urandom(4).hex()}")
        stack.callback(shutil.rmtree, partial, ignore_errors=True)
        samples = min(SAMPLES, max(N_POPULATIONS, nbytes // LEAST_VARIANTS))
        shape = max(1, nbytes // samples), samples
        few = math.ceil(shape[0] / (4 * cluster.n_slots))
        how = {"rows": max(1, min(CHUNK_NBYTES // samples, few)), "n_populations": N_POPULATIONS}
        say(f"writing {format_bytes(math.prod(shape))} of made-up genotypes to {path}")
        _, total = compute(cluster, workload.write_genotypes(partial, shape, **how))
        partial.rename(path)
        yield str(path), int(total)
