"""Reference computations with a known answer, as dask.array programs that know only dask.

The client often has no GPU, so graphs carry NumPy metas, CuPy is imported only in functions that
run on workers, and results leave the workers as NumPy arrays.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import dask.array as da
import numpy as np
from dask.base import collections_to_expr

from hpcdask.upstream.distributed import Alias, FinalizeCompute, Task, convert_legacy_graph

Device = Literal["cuda", "cpu"]
Form = Literal["tuned", "stock"]

#: Enough for workers that are not all as fast.
SLABS_PER_SLOT = 4
MIN_SLAB_NBYTES = 1 << 20
#: Partial results of a few bytes: so many are one message per worker.
SPLIT_EVERY = 64


class WorkloadError(ValueError):
    """A workload cannot be built or run as asked; the text says what to change."""


@dataclass(frozen=True)
class Check:
    """Comparison of a result with its known value, and the largest difference that passes."""

    name: str
    value: float
    expected: float
    tolerance: float

    @property
    def ok(self) -> bool:
        """Return whether the difference is within the tolerance; false for NaN."""
        return bool(abs(self.value - self.expected) <= self.tolerance)


def check_dask(x: object) -> None:
    """Raise WorkloadError unless ``x`` is a dask array of known size."""
    if not isinstance(x, da.Array):
        raise WorkloadError(
            f"x is {type(x).__name__}, not a dask array: "
            "x = da.from_array(x, chunks=(rows_of_a_chunk, -1))"
        )
    if any(math.isnan(size) for sizes in x.chunks for size in sizes):
        raise WorkloadError("x has chunks of unknown size; call x.compute_chunk_sizes() first")


def check_unmasked(block: Any) -> None:
    """Raise WorkloadError for a masked array, whose mask NumPy's functions would drop."""
    if isinstance(block, np.ma.MaskedArray):
        raise WorkloadError(
            "a chunk is a masked array: fill it first, x = da.ma.filled(x, fill_value)"
        )


def check_device(device: object) -> None:
    """Raise WorkloadError unless the value is a `Device`."""
    if device not in get_args(Device):
        raise WorkloadError(f'device={device!r} is not accepted: "cuda" or "cpu"')


def array_module(device: Device) -> Any:
    """Return CuPy for ``"cuda"`` and NumPy for ``"cpu"``; for use on workers."""
    if device == "cpu":
        return np
    try:
        import cupy
    except ImportError as exc:
        raise WorkloadError(
            f"a CUDA worker needs CuPy ({exc}): `hpcdask doctor` there names the packages"
        ) from exc
    return cupy


def client_cupy() -> Any:
    """Return CuPy if this very process has a CUDA device, as the stock forms need it."""
    try:
        import cupy

        cupy.cuda.runtime.getDeviceCount()  # raises where there is none
    except Exception as exc:  # CUDARuntimeError exists only where CuPy does
        raise WorkloadError(
            f"plain dask.array on CuPy builds arrays on a GPU of the client ({exc}): run it where "
            "the client has CuPy and a GPU"
        ) from exc
    return cupy


def to_host(block: Any) -> np.ndarray[Any, np.dtype[Any]]:
    """Return a block as a NumPy array, whichever of the two libraries holds it."""
    return cast("np.ndarray[Any, np.dtype[Any]]", block.get() if hasattr(block, "get") else block)


def slab_rows(
    n_rows: int,
    row_nbytes: int,
    *,
    n_slots: int,
    max_nbytes: int,
    multiple: int = 1,
    per_slot: int = SLABS_PER_SLOT,
) -> tuple[int, ...]:
    """Cut rows into slabs of full width: few, even, and enough for every worker thread.

    The least number within ``max_nbytes`` that gives every slot ``per_slot`` slabs above 1 MiB, as
    a multiple of the slots. All but the last have a multiple of ``multiple`` rows.
    """
    n_units = math.ceil(n_rows / multiple)
    rows_that_fit = max(multiple, max_nbytes // row_nbytes // multiple * multiple)
    needed = math.ceil(n_rows / rows_that_fit)
    n_slabs = max(needed, min(per_slot * n_slots, n_rows * row_nbytes // MIN_SLAB_NBYTES), 1)
    if n_slabs > n_slots:
        n_slabs = math.ceil(n_slabs / n_slots) * n_slots
    n_slabs = min(n_slabs, n_units)
    bounds = [min(i * n_units // n_slabs * multiple, n_rows) for i in range(n_slabs + 1)]
    return tuple(stop - start for start, stop in itertools.pairwise(bounds))


def sum_of_chunks(
    function: Callable[..., Any], *x: da.Array, n_chunks: int, width: int, dtype: Any, **how: Any
) -> da.Array:
    """Add up what a function makes of each chunk of rows, (1, width) in NumPy, in a tree."""
    meta = np.empty((0, 0), dtype)
    chunks = ((1,) * n_chunks, (width,))
    partial = da.map_blocks(function, *x, chunks=chunks, dtype=dtype, meta=meta, **how)
    return cast("da.Array", partial.sum(axis=0, split_every=SPLIT_EVERY, dtype=dtype))


def count_tasks(*collections: Any) -> int:
    """Count the Dask tasks that ``client.compute([*collections])`` makes the scheduler run."""
    # as Client.compute() does; dask.optimize() takes the collections one by one and repeats tasks
    expr = FinalizeCompute(collections_to_expr(collections)).optimize()
    graph = convert_legacy_graph(expr.__dask_graph__())
    return sum(isinstance(node, (Alias, Task)) for node in graph.values())
