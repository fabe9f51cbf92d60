"""Plan of a worker's pool and spilling, its allocator, and its store of results.

The plan is made where the worker is started, and needs no GPU. RMM's pool and CuPy's allocator are
one: with a pool each, the two compete for the device, and one fails while the other holds memory
that it does not use.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Collection
from dataclasses import dataclass
from importlib.util import find_spec
from pkgutil import resolve_name
from typing import Any, Literal

from dask.utils import format_bytes

from hpcdask.errors import DeviceError, MissingExtra, UsageError, installing
from hpcdask.logs import plural, say
from hpcdask.spec.records import Record
from hpcdask.spec.specs import WorkerSpec

from .devices import Gpu
from .driver import cuda_extra
from .oom import device_out_of_memory, free, holders

Allocator = Literal["pool", "async", "cuda"]

#: Part of the device that the pool starts with, and part above which results spill to host memory.
#: The pool grows into the rest, unless CUDA's libraries, which have their own, need it first.
POOL_FRACTION = 0.5
SPILL_FRACTION = 0.8
#: RMM takes multiples of this.
ALIGNMENT = 256
#: Seconds that a worker which was started again waits for room, and between two attempts.
ROOM_DEADLINE_S, ROOM_INTERVAL_S = 5.0, 0.1
#: Part of the free memory that its pool takes then, and the least part of the planned pool.
LEFT_FRACTION, LEAST_POOL = 0.9, 1 / 16
#: Functions by which a library gets an allocator, and RMM's for it. dask-cuda's RMMSetup does the
#: same, for CuPy and PyTorch only.
LIBRARIES = {
    "cupy": ("cupy.cuda:set_allocator", "rmm_cupy_allocator"),
    "torch": ("torch.cuda.memory:change_current_allocator", "rmm_torch_allocator"),
    "numba": ("numba.cuda:set_memory_manager", "RMMNumbaManager"),
}
PACKAGES = ("dask_cuda", "rmm", *LIBRARIES)


@dataclass(frozen=True)
class MemoryPlan(Record):
    """Use of a device's memory by one worker. The default is a worker on the CPU.

    Sizes are in bytes, ``total`` of the GPU or slice. The allocators ``pool``, which starts with
    ``pool_size``, and ``async`` are RMM's, for the ``libraries``; with ``cuda`` every library has
    its own. With a ``device_store``, results on the device are counted, and spilled, apart from
    results on the host: above ``device_memory_limit``, or never if that is None.
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
    return frozenset(package for package in PACKAGES if find_spec(package))


def _check(spec: WorkerSpec, protocol: str, installed: Collection[str]) -> None:
    """Raise UsageError for settings that work on no device."""
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
    for option, wanted, package in (
        ("--rmm-async", spec.rmm_async, "rmm"),
        ("--rmm-pool-size", spec.rmm_pool_size, "rmm"),
        ("--device-memory-limit", spec.device_memory_limit, "dask-cuda"),
    ):
        if wanted and package.replace("-", "_") not in installed:
            raise MissingExtra(package, cuda_extra(), option)
    if spec.rmm_pool_size and (reason := _two_pools(spec, installed)):
        raise UsageError(reason)
    for library in ("torch", "numba"):  # cupy is in the default list: nobody need have asked for it
        if library in spec.rmm_allocator_external_lib_list and library not in installed:
            raise UsageError(
                f"--rmm-allocator-external-lib-list names {library}, which is not installed: "
                f"install it or leave it out"
            )


def missing(spec: WorkerSpec) -> str | None:
    """Return one line on what the default settings lack, mostly a package; None if nothing."""
    installed, lost = packages(), {}
    if spec.rmm_pool_size is None and (reason := _two_pools(spec, installed)):
        return reason
    if spec.rmm_pool_size is None and not spec.rmm_async and "rmm" not in installed:
        lost["rmm"] = "there is no memory pool that all libraries share"
    if spec.device_memory_limit is None and "dask_cuda" not in installed:
        lost["dask-cuda"] = "device memory does not spill to host memory"
    if not lost:
        return None
    names, effects = " and ".join(lost), " and ".join(lost.values())
    return f"without {names}, {effects}: {installing(cuda_extra())}"


def plan(spec: WorkerSpec, gpu: Gpu | None, *, protocol: str, shared: int = 1) -> MemoryPlan:
    """Return how a worker uses the memory of its device, which several workers may share.

    Workers that share have no pool unless they ask, and divide the default limit; fractions that
    they ask for are of the whole device. Defaults whose package is missing are left out; `missing`
    tells. Raises UsageError for settings that cannot work.
    """
    if gpu is None:
        return ON_HOST
    installed = packages()
    _check(spec, protocol, installed)
    pool_size, limit = 0, 0
    if spec.rmm_pool_size is not None:
        pool_size = _amount("--rmm-pool-size", spec.rmm_pool_size, gpu, shared)
    elif "rmm" in installed and shared == 1 and not spec.rmm_async:
        pool_size = int(POOL_FRACTION * gpu.memory)
    if spec.device_memory_limit is not None:
        limit = _amount("--device-memory-limit", spec.device_memory_limit, gpu, shared)
    elif "dask_cuda" in installed:
        limit = int(SPILL_FRACTION * gpu.memory / shared)
    allocator: Allocator = "async" if spec.rmm_async else "pool" if pool_size else "cuda"
    through_rmm = spec.rmm_allocator_external_lib_list if allocator != "cuda" else ()
    return MemoryPlan(
        name=gpu.name,
        uuid=gpu.uuid,
        total=gpu.memory,
        allocator=allocator,
        pool_size=max(ALIGNMENT, pool_size // ALIGNMENT * ALIGNMENT) if pool_size else None,
        libraries=tuple(library for library in through_rmm if library in installed),
        device_store="dask_cuda" in installed,
        device_memory_limit=limit or None,
    )


def _two_pools(spec: WorkerSpec, installed: Collection[str]) -> str:
    """Return the problem of a pool of RMM's beside one of CuPy's; empty if there is none."""
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
        raise UsageError(
            f"{option}: {format_bytes(nbytes)} for each of {plural(shared, 'worker')} is more than "
            f"the {format_bytes(gpu.memory)} of {gpu.name} ({gpu.uuid}). Ask for less, "
            f"or for a fraction such as {0.8 / shared:.2g}"
        )
    return nbytes


def apply(plan: MemoryPlan, *, restarted: bool = False) -> None:
    """Set up the allocator in the worker's process, after its CUDA context.

    Before any library allocates: memory that it has by then stays outside of the pool.
    """
    if plan.allocator == "cuda":
        return
    import rmm

    try:
        if plan.allocator == "async":
            rmm.mr.set_current_device_resource(rmm.mr.CudaAsyncMemoryResource())
        else:
            _make_pool(plan, restarted=restarted)
    except Exception as error:  # MemoryError, or RuntimeError for other errors of CUDA
        if plan.pool_size is None or not device_out_of_memory(error):
            raise DeviceError(
                f"RMM cannot allocate on {plan.device}: {error}. "
                f"Leave out --rmm-async, or use --rmm-pool-size 0"
            ) from error
        raise DeviceError(
            f"no room for an RMM pool of {format_bytes(plan.pool_size)} on {plan.device}: "
            f"{free()} are free, {holders(plan.uuid)}. End what is left there, "
            f"or ask for less with --rmm-pool-size"
        ) from error
    for library in plan.libraries:
        use, allocator = LIBRARIES[library]
        resolve_name(use)(resolve_name(f"rmm.allocators.{library}:{allocator}"))


def _make_pool(plan: MemoryPlan, *, restarted: bool) -> None:
    """Make RMM's pool; for a restarted worker, wait for room, then take what is free.

    The memory of the worker that died may be held for a moment yet.
    """
    import rmm

    assert plan.pool_size is not None
    deadline = time.monotonic() + (ROOM_DEADLINE_S if restarted else 0)
    size = plan.pool_size
    # asked rather than tried: RMM logs each allocation that fails
    while (left := rmm.mr.available_device_memory()[0]) < size and time.monotonic() < deadline:
        time.sleep(ROOM_INTERVAL_S)
    if restarted and left < size and LEAST_POOL * size <= LEFT_FRACTION * left:
        size = int(LEFT_FRACTION * left) // ALIGNMENT * ALIGNMENT
    rmm.reinitialize(pool_allocator=True, initial_pool_size=size)
    if size < plan.pool_size:
        say(
            f"warning: RMM's pool begins with {format_bytes(size)} instead of "
            f"{format_bytes(plan.pool_size)}, on {plan.device}: the rest is still held, "
            f"{holders(plan.uuid)}"
        )


def store(plan: MemoryPlan, memory_limit: int) -> Any:
    """Return the ``data`` of distributed's worker; None for its own store.

    Its own counts device memory as host memory, and would spill it to disk. Results on the host
    spill above the same fraction of the limit, in bytes, as in its own; 0 is no limit.
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


def device_host_disk(worker_local_directory: str, **limits: int) -> Any:
    """Return dask-cuda's store, imported in the worker; distributed fills in the folder by name."""
    from dask_cuda.device_host_file import DeviceHostFile

    return DeviceHostFile(worker_local_directory, **limits)
