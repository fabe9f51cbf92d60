"""Plan of pool and spilling: pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from dask.utils import format_bytes

from hpcdask.errors import MissingExtra, UsageError, installing
from hpcdask.spec.records import Record
from hpcdask.spec.specs import WorkerSpec

from .devices import Gpu
from .driver import cuda_extra

Allocator = Literal["pool", "async", "cuda"]

#: Part of the device that the pool starts with, and above which results spill to host memory. The
#: pool grows into the rest, unless CUDA's libraries, which allocate for themselves, need it first.
POOL_FRACTION = 0.5
SPILL_FRACTION = 0.8
#: RMM takes multiples of this.
ALIGNMENT = 256
PACKAGES = ("cupy", "dask_cuda", "numba", "rmm", "torch")


@dataclass(frozen=True)
class MemoryPlan(Record):
    """Use of a device's memory by one worker. The default is a worker on the CPU.

    Sizes are in bytes; ``total`` is that of the slice where it is one. The allocators ``pool``,
    which starts with ``pool_size``, and ``async`` are RMM's, for the ``libraries``; with ``cuda``
    every library has its own. With a ``device_store``, results on the device and on the host are
    counted, and spilled, apart: on the device above ``device_memory_limit``, None for never.
    """

    name: str = ""
    uuid: str = ""
    total: int = 0
    allocator: Allocator = "cuda"
    pool_size: int | None = None
    libraries: tuple[str, ...] = ()
    device_store: bool = False
    device_memory_limit: int | None = None

    @property
    def device(self) -> str:
        """Name, UUID and size of the device, for messages."""
        return f"{self.name} ({self.uuid}) of {format_bytes(self.total)}"


#: The plan of a worker on the CPU.
ON_HOST = MemoryPlan()


def packages() -> frozenset[str]:
    """Return the installed ones of the packages that memory settings need, without importing."""
    from importlib.util import find_spec

    return frozenset(package for package in PACKAGES if find_spec(package))


def check(spec: WorkerSpec, *, protocol: str, installed: Collection[str] | None = None) -> None:
    """Raise UsageError for what works on no device; a protocol may be undecided, ``auto``."""
    installed = packages() if installed is None else installed
    if spec.rmm_async and spec.rmm_pool_size:
        raise UsageError(
            "--rmm-async and --rmm-pool-size: a pool beside the asynchronous allocator is a second "
            "allocator, and the two compete for the device. Leave one of them out"
        )
    if spec.rmm_async and protocol == "ucx":
        raise UsageError(
            "--rmm-async with --protocol ucx: memory of the asynchronous allocator cannot be "
            "shared over NVLink, and transfers take a thousand times as long. Leave out "
            "--rmm-async, or use --protocol tcp"
        )
    allocates = "--rmm-async" if spec.rmm_async else "--rmm-pool-size" if spec.rmm_pool_size else ""
    if allocates and "rmm" not in installed:
        raise MissingExtra("rmm", cuda_extra(), allocates)
    if spec.device_memory_limit and "dask_cuda" not in installed:
        raise MissingExtra("dask-cuda", cuda_extra(), "--device-memory-limit")
    if spec.rmm_pool_size and (why := _two_pools(spec, installed)):
        raise UsageError(why)
    for library in ("torch", "numba"):  # cupy is in the default list: nobody need have asked for it
        if library in spec.rmm_allocator_external_lib_list and library not in installed:
            raise UsageError(
                f"--rmm-allocator-external-lib-list names {library}, which is not installed: "
                f"install it or leave it out"
            )


def missing(spec: WorkerSpec, *, installed: Collection[str] | None = None) -> str | None:
    """Return what the default settings lack, mostly for a missing package, in one line; or None."""
    installed = packages() if installed is None else installed
    if spec.rmm_pool_size is None and (why := _two_pools(spec, installed)):
        return why
    lost = []
    if spec.rmm_pool_size is None and not spec.rmm_async and "rmm" not in installed:
        lost.append(("rmm", "there is no memory pool that all libraries share"))
    if spec.device_memory_limit is None and "dask_cuda" not in installed:
        lost.append(("dask-cuda", "device memory does not spill to host memory"))
    if not lost:
        return None
    names, effects = (" and ".join(part) for part in zip(*lost, strict=True))
    return f"without {names}, {effects}: {installing(cuda_extra())}"


def plan(
    spec: WorkerSpec,
    gpu: Gpu | None,
    *,
    protocol: str,
    shared: int = 1,
    installed: Collection[str] | None = None,
) -> MemoryPlan:
    """Decide how a worker uses the memory of its device, which several may share.

    These have no pool unless it is asked for, and divide the default limit; fractions that are
    asked for stay fractions of the whole device. What nobody asked for is left out where its
    package is missing; `missing` tells.
    """
    if gpu is None:
        return MemoryPlan()
    installed = packages() if installed is None else installed
    check(spec, protocol=protocol, installed=installed)
    pool_size, allocator = None, "cuda"
    if spec.rmm_async:
        allocator = "async"
    elif spec.rmm_pool_size is None:
        if "rmm" in installed and shared == 1:
            pool_size = int(POOL_FRACTION * gpu.memory)
    else:
        pool_size = _amount("--rmm-pool-size", spec.rmm_pool_size, gpu, shared) or None
    if pool_size is not None:
        pool_size, allocator = max(ALIGNMENT, pool_size // ALIGNMENT * ALIGNMENT), "pool"
    limit = None
    if spec.device_memory_limit is not None:
        limit = _amount("--device-memory-limit", spec.device_memory_limit, gpu, shared) or None
    elif "dask_cuda" in installed:
        limit = int(SPILL_FRACTION * gpu.memory / shared)
    through_rmm = spec.rmm_allocator_external_lib_list if allocator != "cuda" else ()
    return MemoryPlan(
        name=gpu.name,
        uuid=gpu.uuid,
        total=gpu.memory,
        allocator=allocator,  # type: ignore[arg-type]
        pool_size=pool_size,
        libraries=tuple(library for library in through_rmm if library in installed),
        device_store="dask_cuda" in installed,
        device_memory_limit=limit,
    )


def _two_pools(spec: WorkerSpec, installed: Collection[str]) -> str:
    """Return what is wrong with a pool of RMM's beside one of CuPy's; empty where nothing is."""
    listed = spec.rmm_allocator_external_lib_list
    pool = spec.rmm_pool_size is None or spec.rmm_pool_size > 0
    if spec.rmm_async or not pool or not {"cupy", "rmm"} <= set(installed) or "cupy" in listed:
        return ""
    return (
        f"--rmm-allocator-external-lib-list {','.join(listed) or 'none'} leaves out cupy, and "
        f"it then has a pool of its own beside RMM's: each holds memory that the other lacks. "
        f"Use {','.join(('cupy', *listed))}, or --rmm-pool-size 0"
    )


def _amount(option: str, asked: int | float, gpu: Gpu, shared: int) -> int:
    nbytes = int(asked * gpu.memory) if isinstance(asked, float) else asked
    if nbytes * shared > gpu.memory:
        each = f"{shared} workers with {format_bytes(nbytes)} each are" if shared > 1 else ""
        raise UsageError(
            f"{option}: {each or f'{format_bytes(nbytes)} is'} more than "
            f"the {format_bytes(gpu.memory)} of {gpu.name} ({gpu.uuid}). Ask for less, "
            f"or for a fraction such as {0.8 / shared:.2g}"
        )
    return nbytes
