"""Worker bound to its GPU and cores."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Collection, Sequence
from pkgutil import resolve_name
from typing import Any

from dask.typing import Key
from distributed.core import Status
from distributed.metrics import time
from distributed.protocol.serialize import dask_deserialize
from distributed.worker_state_machine import (
    ExecuteFailureEvent,
    GatherDepFailureEvent,
    GatherDepSuccessEvent,
)

from hpcdask.bootstrap import resources
from hpcdask.comm.peers import UCX, WORKING, PeerWorker, load
from hpcdask.errors import HpcdaskError
from hpcdask.gpu import context, memory, oom
from hpcdask.gpu.context import CONTEXT_MADE, FirstUse, make_context
from hpcdask.gpu.memory import ON_HOST, MemoryPlan
from hpcdask.gpu.samples import report_gpu
from hpcdask.logs import say, set_log_level, sign_lines
from hpcdask.process import make_observable, mark
from hpcdask.security import ports
from hpcdask.upstream import distributed as upstream

from . import failures

#: Reason for which workers are closed at the end of a run.
RUN_IS_OVER = "the run is over"
#: What a worker and its nanny are asked by who looks at them.
LOOK = "hpcdask_look"
#: Seconds that the failure of a Dask task gets to reach the scheduler before its worker ends.
TOLD_DEADLINE_S = 1.0


class DeviceWorker(PeerWorker):
    """distributed's worker, bound first to cores and GPU; ``restarted`` after another died."""

    def __init__(
        self,
        *args: Any,
        bind_cores: Sequence[int] = (),
        bind_gpu: str | None = None,
        device_memory: MemoryPlan = ON_HOST,
        restarted: bool = False,
        port_range: str | None = None,
        **kwargs: Any,
    ) -> None:
        set_log_level()
        sign_lines(socket.gethostname(), str(kwargs.get("name")))
        mark("worker forked")
        ports.use(port_range)
        for thread in os.listdir("/proc/self/task") if bind_cores else ():  # also the driver's
            resources.widen(bind_cores, int(thread))
        if bind_gpu is not None:
            try:
                make_context()
                mark(CONTEXT_MADE)
                # not beside it, in a thread: what packages put into the environment while the
                # driver reads it ended one worker of 100 by SIGSEGV
                _import_packages(device_memory, kwargs.get("exchange", "tcp"))
                mark("packages imported")
                memory.apply(device_memory, restarted=restarted)
            except HpcdaskError:
                set_log_level("CRITICAL")  # the nanny says it, in one line
                raise
            mark("device memory set up")
        make_observable()
        upstream.fail_unreadable_tasks()
        if bind_gpu is None:
            arrays = "hpcdask.comm.host_arrays:receive_cupy_arrays"
            dask_deserialize.register_lazy("cupy", lambda: resolve_name(arrays)())
        self.device_memory, self.port_range = device_memory, port_range
        self._context_lost = False
        self._first_use = FirstUse()
        super().__init__(*args, on_device=bind_gpu is not None, **kwargs)
        if bind_gpu is not None:
            report_gpu(self, bind_gpu)
        self.handlers[LOOK] = self._tell_work
        upstream.send_at_once(self.batched_stream)

    def _tell_work(self) -> dict[str, Any]:
        """Return what the worker runs, and since when, for those who look from outside."""
        now = time()
        tasks = {key: self.state.tasks.get(key) for key in self.active_keys}
        return {
            "status": self.status.name,
            "memory": self.monitor.get_process_memory(),
            "limit": self.memory_manager.memory_limit,
            "running": {str(ident): str(key) for ident, key in self.active_threads.items()},
            "seconds": {
                str(key): now - (task.start_time or now) for key, task in tasks.items() if task
            },
            "fetches_from": list(self.state.in_flight_workers),
            "ready": len(self.state.ready) + len(self.state.constrained),
        }

    async def _warm(self) -> None:
        """Exchange with peers first, which shows how fast they are, then use the device once."""
        await super()._warm()
        if self.on_device and self.status in WORKING:
            self._first_use.start()

    async def execute(self, key: Key, *, stimulus_id: str) -> Any:
        """Run a Dask task, and survive `sys.exit`, a full device, and a broken context."""
        self._first_use.stopped.set()
        try:
            if error := failures.unreadable_input(self, key):
                return failures.failed(self, key, error, stimulus_id)
            event = await super().execute(key, stimulus_id=stimulus_id)
        except SystemExit as error:
            event = failures.failed(self, key, error, stimulus_id)
        event = await oom.explained(self, self.device_memory, event)
        if not isinstance(event, ExecuteFailureEvent):
            return event
        upstream.drop_text_traceback(event)
        if self.on_device and (why := context.lost()):
            if self._context_lost:  # it failed for the fault of another, and is run again elsewhere
                await asyncio.Event().wait()
            self._context_lost = True
            self._replacing = asyncio.create_task(self._replace(str(event.key), why))
        return event

    async def _replace(self, key: str, why: str) -> None:
        """End this process, whose every call to CUDA fails by now; the nanny starts another."""
        say(
            f"worker {self.name}: Dask task {key} left the GPU's context unusable ({why}). The "
            f"worker is replaced, and what it held is computed again"
        )
        with contextlib.suppress(OSError):  # a deadline is one, too
            async with asyncio.timeout(TOLD_DEADLINE_S):
                # the worker's state machine has no event for it
                while key in {task.key for task in self.state.executing}:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                await self.batched_stream.close()
        os._exit(1)

    async def gather_dep(
        self, worker: str, to_gather: Collection[Key], total_nbytes: int, *, stimulus_id: str
    ) -> Any:
        """Fetch from another worker; what does not arrive fails the Dask tasks that need it."""
        event = await super().gather_dep(worker, to_gather, total_nbytes, stimulus_id=stimulus_id)
        event = await oom.explained(self, self.device_memory, event)
        if not isinstance(event, GatherDepFailureEvent):
            return event
        # Otherwise they wait for ever: https://github.com/dask/distributed/issues/6705
        self.rpc.remove(worker)  # a connection of which half a message was read
        data: dict[Key, Any] = {}
        for key in to_gather:  # one of several does not keep the others
            if len(to_gather) == 1:
                data[key] = failures.Unreadable.of(event)
                break
            one = await self.gather_dep(worker, [key], total_nbytes, stimulus_id=stimulus_id)
            if not isinstance(one, GatherDepSuccessEvent):
                return one
            data |= one.data
        return GatherDepSuccessEvent(
            worker=worker, total_nbytes=total_nbytes, data=data, stimulus_id=stimulus_id
        )

    def handle_worker_status_change(self, status: str, stimulus_id: str) -> None:
        """Log errors only while retiring: the scheduler no longer knows this worker."""
        set_log_level("ERROR" if status == Status.closing_gracefully.name else "WARNING")
        super().handle_worker_status_change(status, stimulus_id)

    async def close(self, *args: Any, **kwargs: Any) -> Any:
        """Close, without complaints about what is closed already."""
        self._first_use.stopped.set()
        set_log_level("CRITICAL")
        if kwargs.get("reason") == RUN_IS_OVER:  # plugins close, Dask tasks are not waited for
            kwargs["executor_wait"] = False
        return await super().close(*args, **kwargs)


def _import_packages(plan: MemoryPlan, exchange: str) -> None:
    """Import what the worker needs before it registers, while it has one thread."""
    # CuPy by all means: its libraries must not be loaded in a thread while UCX loads its own
    needed = ["dask_cuda.device_host_file", "cupy", *plan.libraries]
    if plan.allocator != "cuda":
        needed += ["rmm", *(f"rmm.allocators.{library}" for library in plan.libraries)]
    load([*needed, UCX] if exchange == "ucx" else needed)
    with contextlib.suppress(ImportError):
        import cupy
        import cupyx

        # Lazy modules of CuPy 14.2, loaded by the first look at them. The lock of one, and the
        # import locks of its parts, which dask.array imports too, deadlocked two threads
        for module in (cupy.testing, cupyx):
            dir(module)
