"""Matrices in Zarr stores, read by the workers as row chunks of full width.

Stores are folders on a file system that client and workers share, in Zarr format 2 or 3. By the
Zarr specification, a chunk that a store lacks has fill values: a lost file is no error.
"""

from __future__ import annotations

import importlib
import os
import socket
from typing import Any, cast

import dask.array as da
import numpy as np

from hpcdask.workloads import Device, WorkloadError, array_module, check_device, slab_rows

MAX_CHUNK_NBYTES: dict[Device, int] = {"cuda": 4_000_000_000, "cpu": 128_000_000}


def zarr_module() -> Any:
    """Return zarr-python 3 or later; raise WorkloadError where it is not installed."""
    try:
        return importlib.import_module("zarr")
    except ImportError as exc:
        install = 'pip install "hpcdask[zarr]"'
        raise WorkloadError(f"Zarr stores need zarr-python 3 ({exc}): {install}") from exc


def find(path: str | os.PathLike[str], component: str | None = None) -> Any:
    """Open a matrix in a Zarr store as zarr's ``Array``, without reading any of it.

    ``component`` names the array, such as ``"calls/genotype"``, unless the store is one array.
    """
    zarr, where = zarr_module(), os.path.abspath(path)
    name = f"{where}/{component}" if component else where
    try:
        node = zarr.open(store=where, path=component or "", mode="r")
    except Exception as exc:  # zarr and the file system have many
        raise WorkloadError(
            f"there is no Zarr array {name} on {socket.gethostname()} ({exc}): a store is a folder "
            "on a file system that client and workers share"
        ) from exc
    if isinstance(node, zarr.Group):
        found = (item for _, item in node.members(max_depth=None) if isinstance(item, zarr.Array))
        names = ", ".join(sorted(f"{item.path} {item.shape}" for item in found))
        raise WorkloadError(
            f"{name} is a group: say which of its arrays as component=...; its arrays: {names}"
        )
    if node.ndim != 2 or min(node.shape) < 1 or node.dtype.kind not in "buif":
        raise WorkloadError(
            f"{name} is {node.dtype} of shape {node.shape}: a matrix of integers, booleans or real "
            "floats is accepted, with one element or more"
        )
    return node


def open_rows(
    path: str | os.PathLike[str],
    *,
    device: Device = "cuda",
    n_slots: int,
    max_nbytes: int | None = None,
    component: str | None = None,
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
        Bound of a chunk, 4 GB on GPUs and 128 MB on CPUs.
    component
        Array in the store, if it is a group.

    Returns
    -------
    dask.array.Array
        The matrix in its shape and dtype, in the byte order of the machine, cut so that no file is
        read twice. Building it needs no GPU.

    Raises
    ------
    WorkloadError
        No such store, array or matrix of real numbers; from workers too, which do not see the store
        unless it is on a shared file system.
    """
    check_device(device)
    array = find(path, component)
    rows = slab_rows(
        array.shape[0],
        array.shape[1] * array.dtype.itemsize,
        n_slots=n_slots,
        max_nbytes=MAX_CHUNK_NBYTES[device] if max_nbytes is None else max_nbytes,
        multiple=(array.shards or array.chunks)[0],
    )
    meta = np.empty((0, 0), array.dtype.newbyteorder("="))
    how = {"path": os.path.abspath(path), "component": component, "device": device}
    # da.from_zarr carries the opened array to the workers: one that does not see the folder takes
    # its chunks for missing, and returns fill values without an error.
    chunks = rows, (array.shape[1],)
    return cast("da.Array", da.map_blocks(_read, chunks=chunks, meta=meta, dtype=meta.dtype, **how))


def _read(*, path: str, component: str | None, device: Device, block_info: Any) -> Any:
    rows = slice(*block_info[None]["array-location"][0])
    array = find(path, component)
    dtype = array.dtype.newbyteorder("=")
    if device == "cpu":
        return array[rows].astype(dtype, copy=False)
    store = _device_store(array)
    if store is None:
        return array_module("cuda").asarray(array[rows].astype(dtype, copy=False))
    direct = zarr_module().open_array(store(path, read_only=True), path=component, mode="r")
    # zarr.config.enable_gpu() would change what all threads of the process get
    buffers = importlib.import_module("zarr.buffer.gpu").buffer_prototype
    return direct.get_basic_selection((rows, slice(None)), prototype=buffers)


def _device_store(array: Any) -> Any:
    """Return kvikio's store if it is installed, and files hold the elements as in memory."""
    coded = array.shards or array.filters or array.compressors or "big" in repr(array.serializer)
    if coded or array.metadata.zarr_format != 3:
        return None
    try:
        return importlib.import_module("kvikio.zarr").GDSStore
    except (ImportError, OSError):  # OSError: without the libraries that it loads
        return None
