"""Measure computations on arrays, decompositions, and genotypes in a Zarr store; check them."""

from __future__ import annotations

import contextlib
import math
import os
import platform
import shutil
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
from dask.utils import format_bytes

from hpcdask.bench.cluster import Cluster
from hpcdask.bench.execution import (
    Timed,
    announce,
    check_room,
    compute,
    hold,
    measure,
    suitable,
)
from hpcdask.bench.measurement import Measurement
from hpcdask.errors import UsageError
from hpcdask.logs import say
from hpcdask.workloads import (
    Check,
    Form,
    array,
    client_cupy,
    genotypes,
    packing,
    plain_svd,
    slab_rows,
    svd,
    to_host,
)
from hpcdask.workloads.zarr import open_rows, zarr_module

#: Operations on an array that do not keep it.
STREAMED = ("sum", "mean", "std")
# Of the blog's matrix of 10_000_000 x 20 float64: columns, and rows of a chunk.
EXACT_COLUMNS, EXACT_ROWS = 20, 625_000
# Relative to the largest singular value, for float64.
EXACT_TOLERANCE = 1e-10
#: Rows of the matrix and of u that are compared, at the start, in the middle and at the end.
SAMPLE = 64
#: Made-up genotypes: samples, variants that tell populations apart, populations, bytes of a chunk.
SAMPLES, LEAST_VARIANTS, N_POPULATIONS, CHUNK_NBYTES = 2000, 2000, 4, 16_000_000
#: Of the variance of the samples' coordinates, the part that lies within populations.
LARGEST_WITHIN = 0.1


def run_array(
    cluster: Cluster,
    nbytes: int | None = None,
    *,
    operation: str = "sum",
    form: Form = "tuned",
    repeats: int = 3,
    chunk_nbytes: int | None = None,
) -> Measurement:
    """Measure one of `plain_array.NAMES` on `nbytes` of float64; only the sum has a tuned form."""
    nbytes = nbytes or suitable(cluster, f"array, {form}" if operation == "sum" else "operation")
    if operation not in STREAMED:
        # Each worker of a product has all of the array; and the result takes as much as an array
        copies = 2 * (len(cluster.workers) if operation == "matmul" else 1)
        check_room(cluster, nbytes, f"; {', '.join(STREAMED)} take any size", copies=copies)
    device, n = cluster.device, array.side(nbytes)
    if form == "tuned":  # in chunks of an even number of rows
        most = chunk_nbytes or array.MAX_CHUNK_NBYTES[device]
        how = {"n_slots": cluster.n_slots, "multiple": 2, "max_nbytes": most}
        chunks: Any = slab_rows(n, array.ITEM_NBYTES * n, **how), (n,)
    else:
        chunks = da.core.normalize_chunks(array.STOCK_CHUNKS[device], (n, n), dtype="float64")

    draft = announce(
        cluster,
        chunks,
        workload="array",
        form=form,
        variant="" if operation == "sum" else operation,
        dtype="float64",
        chunk_nbytes=chunk_nbytes,
        work=array.work(operation, n),
    )

    def build(index: int) -> list[Any]:
        if form == "tuned":
            return [array.tuned_sum(chunks[0], n, device=device, seed=index)]
        return [array.build(operation, n, device, index)]

    timed = measure(cluster, build, repeats)
    return timed.of(draft, array.check(operation, to_host(timed.results[0]), n))


def run_svd(
    cluster: Cluster,
    nbytes: int | None = None,
    *,
    k: int | None = None,
    form: Form = "tuned",
    packed: bool = False,
    repeats: int = 3,
    chunk_nbytes: int | None = None,
) -> Measurement:
    """Measure singular values and right vectors of a planted uint8 matrix of rank `k`."""
    device, k = cluster.device, 10 if k is None else k
    shape = svd.shape_for(nbytes or suitable(cluster, f"svd, {form}"))
    check_room(cluster, math.prod(shape) // (4 if packed else 1), ", and --packed takes four times")
    library = np
    if form == "tuned":
        most = chunk_nbytes or svd.MAX_CHUNK_NBYTES[device]
        cut = {"n_slots": cluster.n_slots, "per_slot": svd.CHUNKS_PER_SLOT[device]}
        chunks: Any = slab_rows(*shape, **cut, max_nbytes=most), (shape[1],)
    else:
        chunks = da.core.normalize_chunks(svd.STOCK_CHUNKS, shape)
        library = client_cupy() if device == "cuda" else np
    more: dict[str, Any] = {"device": device, "library": library, "packed": packed}
    x, expected = svd.planted(shape, k, chunks=chunks, **more)
    columns = shape[1] if packed else None
    draft = announce(
        cluster,
        chunks,
        workload="svd",
        form=form,
        variant="2 bits" * packed,
        dtype="uint8",
        k=k,
        chunk_nbytes=chunk_nbytes,
        # A is read once, and multiplied by k columns from the right and from the left
        work={"memory": float(x.nbytes), "matrix_float32": 4.0 * math.prod(shape) * k},
    )
    x = hold(cluster, x, evenly=form == "tuned")

    def decompose(index: int) -> Sequence[Any]:
        if form == "stock":
            return plain_svd.approximate(x, k, index, library)
        how: dict[str, Any] = {"packed_columns": columns, "seed": index, "device": device}
        return svd.svd_rows(x, k, dtype="float32", **how)

    timed = measure(cluster, lambda index: decompose(index)[1:], repeats)
    # a seed of its own: the scheduler must not meet the same keys in another graph
    checks = _check(cluster, x, decompose(repeats + 1), timed, expected, packed_columns=columns)
    return timed.of(draft, checks)


def run_svd_exact(cluster: Cluster, nbytes: int | None = None, *, repeats: int = 3) -> Measurement:
    """Measure ``dask.array.linalg.svd`` of a random float64 matrix; its Gram matrix checks it."""
    nbytes = nbytes or suitable(cluster, "svd exact")
    n_rows = max(EXACT_COLUMNS, nbytes // (8 * EXACT_COLUMNS))
    check_room(cluster, nbytes)
    library = client_cupy() if cluster.device == "cuda" else np
    x = plain_svd.random_matrix(n_rows, EXACT_COLUMNS, EXACT_ROWS, library)

    draft = announce(
        cluster,
        x.chunks,
        workload="svd",
        form="stock",
        variant="exact",
        dtype="float64",
        work={"memory": float(x.nbytes), "matrix_float64": 2.0 * n_rows * EXACT_COLUMNS**2},
    )
    x = hold(cluster, x)
    timed = measure(cluster, lambda _: plain_svd.exact(x)[1:], repeats)
    squares = np.linalg.eigvalsh(to_host(compute(cluster, [x.T @ x])[0]))[::-1]
    whole, expected = plain_svd.exact(x), np.sqrt(squares)
    return timed.of(draft, _check(cluster, x, whole, timed, expected, EXACT_TOLERANCE))


def _check(
    cluster: Cluster,
    x: Any,
    whole: Sequence[Any],
    timed: Timed,
    expected: Any,
    tolerance: float = svd.TOLERANCE,
    packed_columns: int | None = None,
) -> list[Check]:
    """Check the s and v that were timed, and a whole decomposition by some rows of u."""
    u, s, v = whole
    starts = sorted({0, x.shape[0] // 2, max(0, x.shape[0] - SAMPLE)})
    parts = [part[start : start + SAMPLE] for part in (x, u) for start in starts]
    s, v, u_gram, *blocks = map(to_host, compute(cluster, [s, v, u.T @ u, *parts]))
    of_x, of_u = np.concatenate(blocks[: len(starts)]), np.concatenate(blocks[len(starts) :])
    if packed_columns:
        of_x = packing.unpack(of_x, packed_columns)
    _, orthogonal_u, _, residual = svd.check(s, v, u_gram, of_x, of_u, expected, tolerance)
    s, v = map(to_host, timed.results)
    values, _, orthogonal_v, _ = svd.check(s, v, u_gram, of_x, of_u, expected, tolerance)
    return [values, orthogonal_u, orthogonal_v, residual]


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
        lazy = list(genotypes.population_structure(where, k, **how))
        identity = {"workload": "zarr", "form": "tuned", "dtype": str(x.dtype), "k": k}
        draft = announce(cluster, x.chunks, **identity)
        timed = measure(cluster, lambda _: lazy, repeats)
        # Sums of rows fit in 32 bits, and take half as long
        total = x.sum(axis=1, dtype="uint32").sum(dtype="uint64")
        total = total.map_blocks(to_host, dtype="uint64")
        load = measure(cluster, lambda _: [total], repeats)
    s, v, variants = timed.results
    checks = [Check("variants", int(variants.sum()), x.shape[0], 0)]
    if written is not None:
        checks.append(Check("sum of all genotypes", int(load.results[0]), written, 0))
        checks.append(Check("variance within populations", within(v), 0.0, LARGEST_WITHIN))
    counts = dict(zip(("kept", "missing", "rare"), variants.tolist(), strict=True))
    load_s, whole_s = statistics.median(load.seconds), statistics.median(timed.seconds)
    phases = {"load alone": load_s, "beyond loading": max(0.0, whole_s - load_s)}
    result = {"singular_values": s.tolist(), "variants": counts}
    return timed.of(draft, checks, phases=phases, result=result)


def within(v: Any) -> float:
    """Return which part of the variance of coordinates, shape (k, samples), is in populations."""
    populations = genotypes.populations(v.shape[1], N_POPULATIONS)
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
        shape = max(LEAST_VARIANTS, nbytes // SAMPLES), SAMPLES
        few = math.ceil(shape[0] / (4 * cluster.n_slots))
        how = {"rows": min(CHUNK_NBYTES // SAMPLES, few), "n_populations": N_POPULATIONS}
        say(f"writing {format_bytes(math.prod(shape))} of made-up genotypes to {path}")
        _, total = compute(cluster, genotypes.write_genotypes(partial, shape, **how))
        partial.rename(path)
        yield str(path), int(total)
