"""Device memory of a worker: who allocates it, and when it spills.

The plan is made where the worker is started and needs no GPU; the worker applies it once it has its
CUDA context. RMM's pool and CuPy's allocator are one: with a pool each, the two compete for the
device, and one fails while the other holds memory that it does not use.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from dask.utils import format_bytes

from hpcdask.errors import DeviceError
from hpcdask.logs import say

from .memory_plan import ALIGNMENT, MemoryPlan
from .oom import device_out_of_memory, free, holders

#: Seconds that a worker which was started again waits for room, and between two attempts.
ROOM_DEADLINE_S, ROOM_INTERVAL_S = 5.0, 0.1
#: Of what is free then, the part that its pool takes; and of the pool that was planned, the part
#: below which it does not start.
LEFT_FRACTION, LEAST_POOL = 0.9, 1 / 16


def apply(plan: MemoryPlan, *, restarted: bool = False) -> None:
    """Set up the allocator, in the worker's process, after its CUDA context.

    Before any library allocates: what they have by then stays outside of the pool. Memory of a dead
    worker whose place this one takes may be held for a moment yet, so the pool waits for it; then
    it begins smaller, with what is free.
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
    """Return what distributed's worker takes as ``data``; None for its own store.

    That one counts device memory as host memory, and would spill it to disk. Results on the host
    spill above the same fraction of the limit, in bytes, as there; 0 is no limit.
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
        worker_local_directory, device_memory_limit=device_memory_limit, memory_limit=memory_limit
    )
