"""Nanny of one worker, bound to its device and cores before Dask or CUDA starts in it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from dask.utils import format_bytes
from distributed import Nanny, Security
from distributed.comm import get_address_host, unparse_host_port
from distributed.core import Status, rpc
from distributed.utils import get_ip

from hpcdask.comm.ucx_config import environment, ucx_environment
from hpcdask.errors import ClusterError, root_cause
from hpcdask.gpu import memory
from hpcdask.gpu.samples import read_gpu
from hpcdask.logs import DIED, say
from hpcdask.process import signal_name
from hpcdask.spec.specs import WorkerSpec

from .device_worker import LOOK, DeviceWorker
from .observe import observe
from .placement import WorkerPlacement

#: Seconds between the attempts to start a dead worker again, after which it is given up.
RESTART_PAUSES_S = (1.0, 2.0, 4.0, 8.0)
#: Seconds that a worker's event loop, and the driver, have to answer their own node.
ANSWER_S = 8.0
#: Topic under which a nanny tells that it ends its worker for its memory.
OVER_MEMORY = "worker-restart-memory"


class BoundNanny(Nanny):
    """A nanny that starts again what fails to start, up to a limit; ``give_up`` hears why.

    ``reason`` is why its worker closed for good, as distributed names it; None if that was not
    said. ``parts`` are the processes of its rank beside the workers.
    """

    def __init__(self, scheduler: str, **kwargs: Any) -> None:
        super().__init__(scheduler, **kwargs)
        self.give_up: Callable[[str], None] = lambda why: None
        self.reason: str | None = None
        self.parts: Mapping[str, int] = {}
        self.handlers[LOOK] = self.look
        self._dismissed = asyncio.Event()
        self._starting = asyncio.Lock()
        self._exit_code: int | None = None
        self._asked_to_kill = self._over_memory = self._given_up = False

    def close_gracefully(self, reason: str = "nanny-close-gracefully") -> None:
        """Note why the worker closes for good."""
        self.reason = reason
        self._dismissed.set()
        super().close_gracefully(reason=reason)

    async def look(self) -> dict[str, Any]:
        """Return what the worker does now, and its rank's other processes, also silent ones."""
        work, worker, *parts = await asyncio.gather(
            self._ask_worker(),
            asyncio.to_thread(observe, self.pid or 0),
            *(asyncio.to_thread(observe, pid) for pid in self.parts.values()),
        )
        gpu: dict[str, Any] = {}
        if uuid := self.env.get("CUDA_VISIBLE_DEVICES"):
            with contextlib.suppress(Exception):  # a driver that hangs or fails hides nothing else
                async with asyncio.timeout(ANSWER_S):
                    sample = await asyncio.to_thread(read_gpu, uuid)
                    gpu = sample.to_json() if sample else {}
        return {
            "name": str(self.name),
            "host": socket.gethostname(),
            "worker": asdict(worker),
            "work": work,
            "parts": {name: asdict(one) for name, one in zip(self.parts, parts, strict=True)},
            "gpu": gpu,
        }

    async def _ask_worker(self) -> Any:
        """Return what the worker's event loop tells; None where it does not answer."""
        access = self.security.get_connection_args("worker")
        with contextlib.suppress(Exception):
            async with asyncio.timeout(ANSWER_S):
                async with rpc(self.worker_address, connection_args=access) as worker:
                    return await getattr(worker, LOOK)()
        return None

    async def wait_closed(self) -> str | None:
        """Wait until the worker closes for good; return `reason`."""
        ends = [asyncio.ensure_future(end) for end in (self.finished(), self._dismissed.wait())]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        return self.reason

    async def instantiate(self) -> Status:
        """Start the worker; after its death again, at growing intervals if that fails."""
        async with self._starting:
            if self._given_up:  # distributed asks once for each end of a process
                return Status.failed
            if self.status == Status.running:
                return await self._start_again()
            self._exit_code = None  # its first start, or it is closing
            status = await super().instantiate()
            if status != Status.running and (how := self._end_of_process()):
                raise ClusterError(f"its process {how} while it started")
            return status

    def log_event(self, topic: str | list[str], msg: Any) -> None:
        """Note that the worker is ended for its memory, too."""
        self._over_memory = self._over_memory or topic == OVER_MEMORY
        super().log_event(topic, msg)

    async def kill(self, *args: Any, **kwargs: Any) -> None:
        """End the worker's process, as somebody wants, such as `Client.restart`."""
        self._asked_to_kill = True
        await super().kill(*args, **kwargs)

    async def _start_again(self) -> Status:
        if not self._asked_to_kill and (how := self._end_of_process()):
            line = f"worker {self.name} {how}, and is replaced"
            say(line)
            self.log_event(DIED, line)
        self._asked_to_kill = False
        for pause in (*RESTART_PAUSES_S, None):
            if self.status != Status.running or self.process is None:
                return Status.failed
            if self.process.status == Status.running:  # by another call
                return Status.running
            self.process.worker_kwargs["restarted"] = True
            self._exit_code, self._over_memory = None, False
            try:
                async with asyncio.timeout(self.death_timeout or None):
                    if await self.process.start() == Status.running:
                        return Status.running
                why = f"its process {self._end_of_process() or 'did not register'}"
            except TimeoutError:  # what has hung so long is ended with the nanny
                why, pause = f"it took more than {self.death_timeout:g} s", None
            except Exception as error:
                why = root_cause(error)
            then = "given up" if pause is None else f"next attempt in {pause:g} s"
            say(f"warning: worker {self.name} does not start again: {why}; {then}")
            if pause is None:
                break
            await asyncio.sleep(pause)
        self._given_up = True
        self.give_up(why)
        # not in this task, which belongs to what is closed
        self.loop.add_callback(self.close, reason="the worker did not start again")
        return Status.failed

    def _end_of_process(self) -> str:
        """Return how the worker's process ended, in words; empty if that was not seen."""
        code = self._exit_code
        if code is None:
            return ""
        if self._over_memory:
            limit = format_bytes(self.memory_manager.memory_limit or 0)
            return f"used more than its {limit} of memory (memory=; in a run --memory-limit)"
        return f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"

    def _on_worker_exit_sync(self, exitcode: int) -> None:
        self._exit_code = exitcode
        super()._on_worker_exit_sync(exitcode)


def make_nanny(
    spec: WorkerSpec,
    placement: WorkerPlacement,
    scheduler: str,
    security: Security,
    scratch: str,
) -> BoundNanny:
    host = None
    if placement.interface is None:
        # nanny and worker listen on the network of the scheduler only; by itself a worker would
        # listen on all
        host = unparse_host_port(get_ip(get_address_host(scheduler)))
    exchange = placement.protocol
    if exchange == "ucx" and spec.protocol == "auto":
        exchange = "auto"  # what was not asked for by name may fail to start
    return BoundNanny(
        scheduler,
        name=placement.name,
        nthreads=placement.nthreads,
        memory_limit=placement.memory_limit,
        local_directory=scratch,
        resources=spec.all_resources(on_gpu=placement.gpu is not None),
        security=security,
        host=host,
        interface=placement.interface,
        death_timeout=spec.death_timeout,
        protocol="tls" if security.require_encryption else "tcp",
        worker_class=DeviceWorker,
        dashboard=False,
        lifetime=spec.lifetime and f"{spec.lifetime} s",
        lifetime_stagger=spec.lifetime_stagger and f"{spec.lifetime_stagger} s",
        lifetime_restart=spec.lifetime_restart or None,
        preload=list(spec.preload) or None,
        preload_nanny=list(spec.preload_nanny) or None,
        data=memory.store(placement.device_memory, placement.memory_limit),
        # none where it computes on the CPU: the job may have GPUs all the same
        env={
            "CUDA_VISIBLE_DEVICES": placement.gpu.uuid if placement.gpu else "",
            **environment(os.environ),
            **ucx_environment(spec, os.environ),
        },
        exchange=exchange,
        reach=placement.reach,
        bind_cores=placement.cores,
        bind_gpu=placement.gpu and placement.gpu.uuid,
        device_memory=placement.device_memory,
        port_range=spec.port_range,
    )
