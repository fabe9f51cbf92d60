"""Worker bound to its GPU and cores."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Sequence
from typing import Any

from distributed.comm import CommClosedError
from distributed.core import Status
from distributed.metrics import time
from distributed.protocol.serialize import dask_deserialize
from distributed.worker_state_machine import ExecuteFailureEvent

from hpcdask.bootstrap import resources
from hpcdask.client.defaults import send_at_once
from hpcdask.comm.peers import UCX, WORKING, PeerWorker, load
from hpcdask.errors import HpcdaskError
from hpcdask.gpu import context, memory, oom
from hpcdask.gpu.context import CONTEXT_MADE, make_context
from hpcdask.gpu.first_use import FirstUse
from hpcdask.gpu.memory_plan import ON_HOST, MemoryPlan
from hpcdask.gpu.reporting import GpuReporter
from hpcdask.logs import say, set_log_level, sign_lines
from hpcdask.process import make_observable, mark
from hpcdask.security import ports

#: Reason for which workers are closed at the end of a run.
RUN_IS_OVER = "the run is over"
#: What a worker and its nanny are asked by who looks at them.
LOOK = "hpcdask_look"
#: Seconds that the failure of a Dask task gets to reach the scheduler before its worker ends.
TOLD_DEADLINE_S = 1.0


class DeviceWorker(PeerWorker):
    """distributed's worker, bound to its placement first.

    That is, to CPU cores and to a GPU by its UUID, whose context is made before any transport
    starts. ``restarted``: it follows a worker that died.
    """

    _reporter: GpuReporter | None = None

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
        if bind_cores:
            resources.widen_threads(bind_cores)
        if bind_gpu is not None:
            try:
                make_context()
                mark(CONTEXT_MADE)
                # not beside it, in a thread: what packages put into the environment while the
                # driver reads it ended one worker of 100 by SIGSEGV
                load(_needed(device_memory, kwargs.get("exchange", "tcp")))
                mark("packages imported")
                memory.apply(device_memory, restarted=restarted)
            except HpcdaskError:
                set_log_level("CRITICAL")  # the nanny says it, in one line
                raise
            mark("device memory set up")
        make_observable()
        if bind_gpu is None:
            dask_deserialize.register_lazy("cupy", _receive_cupy_arrays)
        self.device_memory, self.port_range = device_memory, port_range
        self._context_lost = False
        self._first_use = FirstUse()
        super().__init__(*args, on_device=bind_gpu is not None, **kwargs)
        if bind_gpu is not None:
            self._reporter = GpuReporter(self, bind_gpu)
        self.handlers[LOOK] = self._tell_work
        send_at_once(self.batched_stream)

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
        if self._reporter is not None:
            self._reporter.start()
        await super()._warm()
        if self.on_device and self.status in WORKING:
            self._first_use.start()

    async def execute(self, *args: Any, **kwargs: Any) -> Any:
        """Run a Dask task, and survive that its device is full, or that it broke the context."""
        self._first_use.stop()
        event = await super().execute(*args, **kwargs)
        event = await oom.explained(self, self.device_memory, event)
        if self.on_device and isinstance(event, ExecuteFailureEvent) and (why := context.lost()):
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
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TOLD_DEADLINE_S):
                # the worker's state machine has no event for it
                while key in {task.key for task in self.state.executing}:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                await self.batched_stream.close()
        os._exit(1)

    async def gather_dep(self, *args: Any, **kwargs: Any) -> Any:
        """Fetch from another worker, and survive that the device is full."""
        event = await super().gather_dep(*args, **kwargs)
        return await oom.explained(self, self.device_memory, event)

    def handle_worker_status_change(self, status: str, stimulus_id: str) -> None:
        """Being retired is no reason to complain that the scheduler does not know it any more."""
        set_log_level("ERROR" if status == Status.closing_gracefully.name else "WARNING")
        super().handle_worker_status_change(status, stimulus_id)

    async def close(self, *args: Any, **kwargs: Any) -> Any:
        """Close, without complaints about what is closed already."""
        self._first_use.stop()
        if self._reporter is not None:
            self._reporter.stop()
        set_log_level("CRITICAL")
        if kwargs.get("reason") == RUN_IS_OVER:  # plugins close, Dask tasks are not waited for
            kwargs["executor_wait"] = False
        try:
            return await super().close(*args, **kwargs)
        except CommClosedError:
            # Its nanny ended while it was told, and distributed's worker stays half closed then
            os._exit(1)


def _receive_cupy_arrays() -> None:
    from hpcdask.comm.host_arrays import receive_cupy_arrays

    receive_cupy_arrays()


def _needed(plan: MemoryPlan, exchange: str) -> list[str]:
    """Return the modules that the worker imports before it registers."""
    needed = ["dask_cuda.device_host_file", *plan.libraries]
    if plan.allocator != "cuda":
        needed += ["rmm", *(f"rmm.allocators.{library}" for library in plan.libraries)]
    return [*needed, UCX] if exchange == "ucx" else needed
