"""Matrices in Zarr stores, read by the workers: the loading part of a pipeline, and its time alone.

Stores are folders on a file system that client and workers share, in Zarr format 2 or 3.

Notes
-----
With ``prefetch=True``, reading overlaps computing within a Dask task: its chunk comes in bands of
rows from reading threads beside the worker's own. Two other ways do not do it:

- to read the next chunk in the task of the one before it, because distributed gives chunks to
  whichever worker is free, so that nobody knows which one is next;
- to read and to compute in two Dask tasks, because a worker with one thread, as GPU workers have,
  runs them one after the other. It took as long as reading and computing one by one.

A chunk that a store does not have is one of fill values, by the Zarr specification. So a file that
was lost is no error here; a program to which fill values do harm compares `n_missing_chunks` with
zero.
"""

from __future__ import annotations

import math
import os
import socket
from typing import Any, cast

import dask.array as da
import numpy as np

from hpcdask.upstream import zarr as upstream
from hpcdask.workloads import Device, WorkloadError, check_device, run_bench, slab_rows
from hpcdask.workloads.graphs import sum_of_chunks
from hpcdask.workloads.zarr_reading import StoredArray, StoredRows, zarr_module

MAX_CHUNK_NBYTES: dict[Device, int] = {"cuda": 4_000_000_000, "cpu": 128_000_000}
TILE_NBYTES: dict[Device, int] = {"cuda": 1 << 28, "cpu": 1 << 21}


def find(path: str | os.PathLike[str], component: str | None = None) -> StoredArray:
    """Look at a matrix in a Zarr store, without reading any of it.

    ``component`` names the array, such as ``"calls/genotype"``, unless the store is one array.
    """
    return _found(_open(path, component), os.path.abspath(path))


def n_missing_chunks(path: str | os.PathLike[str], component: str | None = None) -> int:
    """Count the chunks that are not in a store and so are read as fill values; lists its files.

    Where chunks are kept together in shards, shards are counted.
    """
    array = _open(path, component)
    files = array.shards or array.chunks
    n_files = math.prod(-(-n // m) for n, m in zip(array.shape, files, strict=True))
    # zarr counts all chunks that a shard has room for, also those beyond the array's edge
    n_chunks_each = math.prod(files) // math.prod(array.chunks)
    return int(n_files - array.nchunks_initialized // n_chunks_each)


def _open(path: str | os.PathLike[str], component: str | None) -> Any:
    zarr = zarr_module()
    where = os.path.abspath(path)
    if not os.path.isdir(where):
        what = "is not a folder" if os.path.exists(where) else "does not exist"
        raise WorkloadError(
            f"{where} {what} on {socket.gethostname()}: a Zarr store is a folder, "
            "on a file system that client and workers share"
        )
    try:
        node = zarr.open(store=where, path=component or "", mode="r")
    except FileNotFoundError as exc:
        if not component:
            raise WorkloadError(
                f"{where} is not a Zarr store: no zarr.json, .zarray or .zgroup in it"
            ) from exc
        root = _open_root(zarr, where)
        raise WorkloadError(f"{where} has no {component!r}; {_arrays(zarr, root)}") from exc
    except Exception as exc:
        raise WorkloadError(f"the metadata of {where} cannot be read: {exc}") from exc
    if isinstance(node, zarr.Group):
        raise WorkloadError(
            f"{os.path.join(where, node.path)} is a group: "
            f"say which of its arrays as component=...; {_arrays(zarr, node)}"
        )
    return node


def _open_root(zarr: Any, where: str) -> Any:
    try:
        return zarr.open_group(where, mode="r")
    except (FileNotFoundError, zarr.errors.ContainsArrayError):
        return None


def _arrays(zarr: Any, group: Any) -> str:
    if group is None:
        return "it is not a group"
    found = [node for _, node in group.members(max_depth=None) if isinstance(node, zarr.Array)]
    names = sorted(f"{node.path} {node.shape}" for node in found)
    return "its arrays: " + ", ".join(names) if names else "it has no arrays"


def _found(array: Any, where: str) -> StoredArray:
    component = array.path  # as zarr has it: without slashes before and behind
    name = os.path.join(where, component) if component else where
    if array.ndim != 2:
        raise WorkloadError(f"{name} has {array.ndim} dimensions {array.shape}; a matrix has 2")
    if array.dtype.kind not in "buif":
        raise WorkloadError(
            f"{name} is {array.dtype}; integers, booleans and real floats are accepted"
        )
    if min(array.shape) < 1:
        raise WorkloadError(f"{name} is {array.shape[0]} x {array.shape[1]}: nothing to read")
    return StoredArray(
        path=where,
        component=component,
        shape=tuple(array.shape),
        dtype=str(array.dtype.newbyteorder("=")),
        chunk=tuple(array.shards or array.chunks),
        fill_value=array.fill_value or 0,
        plain=upstream.is_plain(array),
        stamp=_stamp(name),
    )


def _stamp(folder: str) -> int:
    names = (os.path.join(folder, name) for name in ("zarr.json", ".zarray"))
    return max((os.stat(name).st_mtime_ns for name in names if os.path.exists(name)), default=0)


def open_rows(
    path: str | os.PathLike[str],
    *,
    device: Device = "cuda",
    n_slots: int,
    max_nbytes: int | None = None,
    component: str | None = None,
    prefetch: bool = False,
) -> da.Array:
    """Open a matrix in a Zarr store as row chunks of full width.

    Parameters
    ----------
    path
        Folder of the store, which the workers see under the same name.
    device
        ``"cuda"`` reads into CuPy arrays, ``"cpu"`` into NumPy arrays. Uncompressed chunks of
        format 3 go straight into device memory where kvikio is installed.
    n_slots
        Worker threads of the cluster.
    max_nbytes
        Bound of a chunk, 4 GB on GPUs and 128 MB on CPUs; one row of the store's is the least.
    component
        Array in the store, if it is a group.
    prefetch
        Chunks are still being read while their Dask task goes on, for programs that go through
        them by slices of rows, as `hpcdask.workloads.svd.svd_rows` does. Do not persist these.

    Returns
    -------
    dask.array.Array
        As stored in shape and dtype, in the byte order of the machine. Each chunk but the last is a
        multiple of the store's high, so that no file is read twice. Building it needs no GPU.

    Raises
    ------
    WorkloadError
        Before anything is computed: no such store, array or matrix of real numbers. From workers:
        the store is not on a shared file system, has changed, or has a damaged chunk.
    """
    check_device(device)
    stored = find(path, component)
    limit = MAX_CHUNK_NBYTES[device] if max_nbytes is None else max_nbytes
    (n_rows, n_columns), meta = stored.shape, np.empty((0, 0), stored.dtype)
    how: dict[str, Any] = {"max_nbytes": limit, "multiple": stored.chunk[0]}
    rows = slab_rows(n_rows, n_columns * meta.itemsize, n_slots=n_slots, **how)
    how = {"stored": stored, "device": device, "prefetch": prefetch}
    return cast("da.Array", da.map_blocks(_chunk, chunks=(rows, (n_columns,)), meta=meta, **how))


def _chunk(*, stored: StoredArray, device: Device, prefetch: bool, block_info: Any) -> Any:
    start, stop = block_info[None]["array-location"][0]
    rows = StoredRows(stored, start, stop, device)
    return rows if prefetch else rows[:]


def read_all(x: da.Array, *, device: Device = "cuda") -> da.Array:
    """Read every chunk and do no more than add up its elements: what loading takes by itself.

    The sum is NumPy, in float64, or in int64 or uint64, which wrap. One Dask task per chunk and a
    tree.
    """
    total = {"f": "float64", "i": "int64"}.get(x.dtype.kind, "uint64")
    how = {"device": device, "total": total}
    return sum_of_chunks(_sum_of_chunk, x, n_chunks=x.numblocks[0], width=1, dtype=total, **how)


def _sum_of_chunk(block: Any, *, device: Device, total: str) -> Any:
    # Sums of rows of bytes fit in 32 bits, and take half as long.
    narrow = block.dtype.itemsize == 1 and block.shape[1] < 1 << 23
    of_row = {"int64": "int32", "uint64": "uint32"}[total] if narrow else total
    step = max(1, TILE_NBYTES[device] // (block.shape[1] * block.dtype.itemsize))
    out = np.zeros((1, 1), total)
    for start in range(0, block.shape[0], step):
        tile = block[start : start + step]
        out += np.asarray(tile.sum(axis=1, dtype=of_row).sum(dtype=total).item(), total)
    return out


if __name__ == "__main__":
    run_bench("zarr")
