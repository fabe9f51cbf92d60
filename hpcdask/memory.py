"""Device memory of a worker: who allocates it, and when it spills.

The plan is made where the worker is started and needs no GPU; the worker applies it once it has its
CUDA context. RMM's pool and CuPy's allocator are one: with a pool each, the two compete for the
device, and one fails while the other holds memory that it does not use.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dask.utils import format_bytes

from .devices import Gpu, cuda_extra
from .errors import DeviceError, MissingExtra, UsageError
from .full import device_out_of_memory, free, holders
from .logs import say
from .spec import WorkerSpec

Allocator = Literal["pool", "async", "cuda"]

#: Part of the device that the pool starts with, and above which results spill to host memory. The
#: pool grows into the rest, unless CUDA's libraries, which allocate for themselves, need it first.
POOL_FRACTION = 0.5
SPILL_FRACTION = 0.8
#: Seconds that a worker which was started again waits for room, and between two attempts.
ROOM_DEADLINE_S, ROOM_INTERVAL_S = 5.0, 0.1
#: Of what is free then, the part that its pool takes; and of the pool that was planned, the part
#: below which it does not start.
LEFT_FRACTION, LEAST_POOL = 0.9, 1 / 16
#: RMM takes multiples of this.
ALIGNMENT = 256
PACKAGES = ("cupy", "dask_cuda", "numba", "rmm", "torch")


@dataclass(frozen=True)
class MemoryPlan:
    """How one worker uses the memory of its device. The default is a worker on the CPU.

    Attributes
    ----------
    name, uuid
        The device; empty for the CPU.
    total
        Bytes of device memory, of the slice where it is one.
    allocator
        ``pool`` and ``async`` are RMM's; ``cuda``: every library has its own.
    pool_size
        Bytes that the pool starts with.
    libraries
        Libraries that allocate through RMM.
    device_store
        Whether results on the device and on the host are counted, and spilled, apart.
    device_memory_limit
        Bytes of results on the device above which they spill to host memory; None for never.
    """

    name: str = ""
    uuid: str = ""
    total: int = 0
    allocator: Allocator = "cuda"
    pool_size: int | None = None
    libraries: tuple[str, ...] = ()
    device_store: bool = False
    device_memory_limit: int | None = None

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> MemoryPlan:
        """Read what ``dataclasses.asdict`` and JSON made of a plan."""
        return cls(**{**data, "libraries": tuple(data["libraries"])})

    @property
    def device(self) -> str:
        """Name, UUID and size, for messages."""
        return f"{self.name} ({self.uuid}) of {format_bytes(self.total)}"


#: The plan of a worker on the CPU.
ON_HOST = MemoryPlan()


def packages() -> frozenset[str]:
    """Those of the packages that memory settings need which are installed, without importing."""
    from importlib.util import find_spec

    return frozenset(package for package in PACKAGES if find_spec(package))


def check(spec: WorkerSpec, *, protocol: str, installed: Collection[str] | None = None) -> None:
    """Refuse what cannot work on any device.

    Parameters
    ----------
    spec
        What the user asked for.
    protocol
        ``tcp``, ``ucx``, or ``auto`` while that is not decided.
    installed
        As `packages`, which is the default.

    Raises
    ------
    UsageError
        Options that exclude each other.
    MissingExtra
        An option was given whose package is missing.
    """
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
    """What the default settings do without, for a missing package mostly, in one line; or None."""
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
    return f'without {names}, {effects}: pip install "hpcdask[{cuda_extra()}]"'


def plan(
    spec: WorkerSpec,
    gpu: Gpu | None,
    *,
    protocol: str,
    shared: int = 1,
    installed: Collection[str] | None = None,
) -> MemoryPlan:
    """Decide how a worker uses the memory of its device.

    Parameters
    ----------
    spec
        What the user asked for.
    gpu
        The worker's device, or None for the CPU.
    protocol
        ``tcp`` or ``ucx``.
    shared
        Workers on this device. They have no pool unless it is asked for, and divide the default
        limit; fractions that are asked for stay fractions of the whole device.
    installed
        As `packages`, which is the default. What nobody asked for is left out where its package is
        missing; `missing` tells.

    Raises
    ------
    UsageError
        See `check`; or the workers of a device would take more than it has.
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
    """What is wrong with a pool of RMM's beside one of CuPy's; empty where there is one."""
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


def apply(plan: MemoryPlan, *, restarted: bool = False) -> None:
    """Set up the allocator, in the worker's process, after its CUDA context.

    Before any library allocates: what they have by then stays outside of the pool.

    Parameters
    ----------
    plan
        The worker's.
    restarted
        Whether it takes the place of a worker that died. Memory of that one may be held for a
        moment yet, so the pool waits for it; then it begins smaller, with what is free.

    Raises
    ------
    DeviceError
        The device has not enough free memory, or lacks the asynchronous allocator.
    """
    if plan.allocator == "cuda":
        return
    import rmm

    try:
        if plan.allocator == "async":
            rmm.mr.set_current_device_resource(rmm.mr.CudaAsyncMemoryResource())
        else:
            _make_pool(plan, restarted=restarted)
    except Exception as error:  # MemoryError, or RuntimeError for any other refusal of CUDA's
        if plan.pool_size is None or not device_out_of_memory(error):
            raise DeviceError(
                f"RMM cannot allocate on {plan.device}: {error}. "
                f"Leave out --rmm-async, or use --rmm-pool-size 0"
            ) from error
        raise DeviceError(
            f"no room for an RMM pool of {format_bytes(plan.pool_size)} on {plan.device}: "
            f"{free(plan)} are free, {holders(plan.uuid)}. End what is left there, "
            f"or ask for less with --rmm-pool-size"
        ) from error
    for library in plan.libraries:
        _allocate_through_rmm(library)


def _make_pool(plan: MemoryPlan, *, restarted: bool) -> None:
    """Make RMM's pool; that of a restarted worker waits for room, or begins with what is free."""
    import rmm

    assert plan.pool_size is not None
    deadline = time.monotonic() + (ROOM_DEADLINE_S if restarted else 0)
    # asked rather than tried: RMM logs each allocation that fails
    while (left := rmm.mr.available_device_memory()[0]) < plan.pool_size:
        if time.monotonic() >= deadline:
            break
        time.sleep(ROOM_INTERVAL_S)
    size = plan.pool_size
    if restarted and left < size and LEAST_POOL * size <= LEFT_FRACTION * left:
        size = int(LEFT_FRACTION * left) // ALIGNMENT * ALIGNMENT
    rmm.reinitialize(pool_allocator=True, initial_pool_size=size)
    if size == plan.pool_size:
        return
    say(
        f"warning: RMM's pool begins with {format_bytes(size)} instead of "
        f"{format_bytes(plan.pool_size)}, on {plan.device}: the rest is still held, "
        f"{holders(plan.uuid)}"
    )


def _allocate_through_rmm(library: str) -> None:
    # dask-cuda's RMMSetup does the same, for CuPy and PyTorch only
    if library == "cupy":
        import cupy
        from rmm.allocators.cupy import rmm_cupy_allocator

        cupy.cuda.set_allocator(rmm_cupy_allocator)
    elif library == "torch":
        import torch
        from rmm.allocators.torch import rmm_torch_allocator

        torch.cuda.memory.change_current_allocator(rmm_torch_allocator)
    else:
        from numba import cuda
        from rmm.allocators.numba import RMMNumbaManager

        cuda.set_memory_manager(RMMNumbaManager)


def store(plan: MemoryPlan, memory_limit: int) -> Any:
    """What distributed's worker takes as ``data``; None for its own store.

    That one counts device memory as host memory, and would spill it to disk.

    Parameters
    ----------
    plan
        The worker's.
    memory_limit
        Bytes of host memory; 0 for no limit. Results on the host spill to disk above the same
        fraction of it as in distributed's own store.
    """
    import dask

    if not plan.device_store:
        return None
    memory = dask.config.get("distributed.worker.memory")
    fraction = memory["target"] or memory["spill"] or 0
    limits = {
        "device_memory_limit": plan.device_memory_limit or sys.maxsize,
        "memory_limit": int(memory_limit * fraction),
    }
    return device_host_disk, limits


def device_host_disk(
    worker_local_directory: str, *, device_memory_limit: int, memory_limit: int
) -> Any:
    """dask-cuda's store, imported in the worker only. distributed fills in the folder, by name."""
    from dask_cuda.device_host_file import DeviceHostFile

    return DeviceHostFile(
        worker_local_directory,
        device_memory_limit=device_memory_limit,
        memory_limit=memory_limit,
    )
