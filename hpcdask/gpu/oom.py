"""Errors for lack of device memory: recognise and explain them, and make room."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from dask.utils import format_bytes, parse_bytes

from hpcdask.errors import HpcdaskError
from hpcdask.upstream.parts import results_on_device

from . import nvml

if TYPE_CHECKING:
    from .memory import MemoryPlan

#: Texts in errors of CUDA's runtime, driver and libraries, whoever raises them; of PyTorch, CuPy
#: and RMM, where their class was lost on the way.
FULL = re.compile(
    r"cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY|CUDA out of memory|"
    r"\bCU[A-Z]+_(?:STATUS_)?ALLOC(?:ATION)?_FAILED|Out of memory allocating [\d,]+ bytes|"
    r"bad_alloc.*[Rr][Mm][Mm]",
)
ASKED = re.compile(
    r"(?:Out of memory allocating|failed to allocate|Tried to allocate) "
    r"([\d.,]+) ?((?:[KMGTP]i?)?B|bytes)"
)
#: Packages of exceptions that clients may not have.
GPU_PACKAGES = {
    *("cupy", "cupy_backends", "cupyx", "torch", "numba", "rmm", "cuda", "cudf", "pylibcudf"),
}
log = logging.getLogger("distributed.worker")


class DeviceMemoryError(MemoryError, HpcdaskError):  # in the other order, tblib cannot unpickle it
    """Error of a Dask task that ran out of device memory; its cause is the error as raised."""


def device_out_of_memory(error: BaseException) -> bool:
    """Return whether this error, or one that led to it, says that a device is out of memory."""
    return any(FULL.search(_text(one)) for one in _chain(error))


def asked_for(error: BaseException) -> int | None:
    """Return the bytes of the allocation that failed, or None where the message does not tell."""
    for one in _chain(error):
        if found := ASKED.search(_text(one)):
            unit = "B" if found[2] == "bytes" else found[2]
            return int(parse_bytes(found[1].replace(",", "").rstrip(".") + unit))
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _text(error: BaseException) -> str:
    """Return the text of an error; exceptions of users may fail to give one."""
    try:
        return str(error)
    except Exception:
        return ""


async def explained(worker: Any, plan: MemoryPlan, event: Any) -> Any:
    """Return an event of a worker with a clear error if device memory ran out, and make room.

    For overrides of ``distributed.Worker.execute`` and ``gather_dep``. Other events stay as they
    are.
    """
    from distributed.core import clean_exception, error_message
    from distributed.worker_state_machine import ExecuteFailureEvent, GatherDepFailureEvent

    if not isinstance(event, ExecuteFailureEvent | GatherDepFailureEvent):
        return event
    try:
        error = clean_exception(event.exception.data)[1]
        if isinstance(error, BaseException) and device_out_of_memory(error):
            message = error_message(explain(worker, plan, error))
            event.exception = message["exception"]
            event.exception_text = message["exception_text"]
            # Copying results to the host takes seconds, in which the worker must answer. The thread
            # that ran the Dask task holds its error, and with it the frames, until its next call
            loop, executor = asyncio.get_running_loop(), worker.executors["default"]
            await loop.run_in_executor(executor, make_room, worker.data, plan, asked_for(error))
    except Exception as error:  # the scheduler must hear of the failure all the same
        # as text: a log that is kept would keep the error's frames, and what they hold
        log.warning("No device memory can be freed after a failed Dask task: %s", _text(error))
    return event


def explain(worker: Any, plan: MemoryPlan, error: BaseException) -> DeviceMemoryError:
    """Return an error that says where memory ran out, what holds it, and what to do."""
    asked, held = asked_for(error), _held(worker.data)
    limit = plan.device_memory_limit
    spills = f"they spill above {format_bytes(limit)}" if limit else "they never spill"
    advice = ["use smaller chunks"]
    if held:
        earlier = "spill earlier with a lower --device-memory-limit"
        advice.append(earlier if limit else "let results spill with --device-memory-limit 0.8")
    if plan.allocator == "pool" and not any("rmm" in _text(one).lower() for one in _chain(error)):
        # cuBLAS and its like allocate for themselves, from what the pool leaves
        advice.append("leave memory outside of the pool with --rmm-pool-size 0")
    advice.append("use more GPUs")
    explained = DeviceMemoryError(
        f"worker {worker.name} is out of device memory on {plan.device}: "
        f"{'an allocation' if asked is None else format_bytes(asked)} did not fit. "
        f"{free()} are free outside of {_pool(plan)}; "
        f"results of Dask tasks hold {format_bytes(held)}, {spills}. "
        f"What to do: {'; '.join(advice)}"
    )
    explained.__cause__ = _for_any_client(error)
    return explained


def _for_any_client(error: BaseException) -> BaseException | None:
    """Return the same chain, of classes that a client without GPU packages can load."""
    shown: BaseException | None = None
    for one in reversed(list(_chain(error))):
        link = one
        if type(one).__module__.partition(".")[0] in GPU_PACKAGES:
            link = MemoryError(f"{type(one).__name__}: {_text(one)}")
            link = link.with_traceback(one.__traceback__)
        link.__cause__ = shown
        shown = link
    return shown


def make_room(data: Any, plan: MemoryPlan, asked: int | None) -> None:
    """Free what failed Dask tasks left on the device, and spill what the last one asked."""
    gc.collect()  # the frames that hold the arrays refer to their error, which refers to them
    results = results_on_device(data)
    if results is not None and plan.device_memory_limit and asked and asked <= plan.total:
        results.evict_until_below_target(max(0, results.total_weight - asked))
    unused = sys.modules.keys() - set(plan.libraries)
    if "cupy" in unused:
        sys.modules["cupy"].get_default_memory_pool().free_all_blocks()
    if "torch" in unused:
        sys.modules["torch"].cuda.empty_cache()


def _held(data: Any) -> int:
    """Return the bytes of results on the device, without bringing spilled ones back."""
    from dask.sizeof import sizeof

    on_device = results_on_device(data)
    if on_device is not None:
        return int(on_device.total_weight)
    values = list(getattr(data, "fast", data).values())
    return sum(sizeof(value) for value in values if hasattr(value, "__cuda_array_interface__"))


def free() -> str:
    """Return the free memory, as CUDA tells, in words."""
    try:
        if "rmm" in sys.modules:
            return format_bytes(sys.modules["rmm"].mr.available_device_memory()[0])
        return format_bytes(sys.modules["cupy"].cuda.runtime.memGetInfo()[0])
    except Exception:  # this is for a message about another error
        return "an unknown number of bytes"


def _pool(plan: MemoryPlan) -> str:
    """Return the pool in use and its present size, in words."""
    with contextlib.suppress(Exception):  # as in `free`
        if plan.allocator == "pool":
            size = sys.modules["rmm"].mr.get_current_device_resource().pool_size()
            return f"the RMM pool of {format_bytes(size)}"
        if plan.allocator == "cuda":
            pool = sys.modules["cupy"].get_default_memory_pool()
            used, total = format_bytes(pool.used_bytes()), format_bytes(pool.total_bytes())
            return f"CuPy's pool of {total} ({used} in use)"
    return "RMM's asynchronous pool" if plan.allocator == "async" else "a pool of unknown size"


def holders(uuid: str) -> str:
    """Return the processes that use the device, in words."""
    with contextlib.suppress(Exception):  # as in `free`
        if (device := nvml.device(uuid)) and (found := device.processes()):
            used = (f"{pid} ({format_bytes(nbytes or 0)})" for pid, nbytes in found.items())
            return f"and these processes are on it: {', '.join(used)}"
    return "and nvidia-smi tells which processes hold the rest"
