"""One worker: bound to its device and cores before anything of Dask or CUDA starts in it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping
from typing import Any

from distributed import Nanny, Security
from distributed.comm import get_address_host, unparse_host_port
from distributed.core import Status
from distributed.utils import get_ip

from hpcdask.comm.ucx_config import ucx_environment
from hpcdask.comm.ucx_hooks import environment
from hpcdask.errors import ClusterError, root_cause
from hpcdask.gpu import memory
from hpcdask.logs import say
from hpcdask.security import listening
from hpcdask.spec.specs import WorkerSpec

from . import forkserver
from .device_worker import DeviceWorker
from .gpu_probe import GpuProbe
from .placement import WorkerPlacement

#: Why workers are closed at the end of a run, as they are told.
RUN_IS_OVER = "the run is over"
#: Failed starts in a row after which a dead worker is given up, and seconds after the first of
#: them; twice as long after each further one.
RESTART_ATTEMPTS = 5
RESTART_PAUSE_S = 1.0
NOT_RESTARTED = "the worker did not start again"


class BoundNanny(Nanny):
    """A nanny that starts again what fails to start, up to a limit.

    ``reason`` is why its worker closed for good, as distributed names it; None if that was not
    said. The probe ``prestarted`` may have a process that is ready to be the first worker.
    """

    def __init__(self, scheduler: str, *, env: Mapping[str, str], **kwargs: Any) -> None:
        super().__init__(scheduler, env=dict(env), **kwargs)
        self.reason: str | None = None
        self.prestarted: GpuProbe | None = None
        self._own_env = dict(env)
        self._dismissed = asyncio.Event()
        self._starting = asyncio.Lock()
        self._exit_code: int | None = None
        listening.prepare()

    async def listen(self, *args: Any, **kwargs: Any) -> None:
        """Listen, with limits for strangers."""
        await super().listen(*args, **kwargs)
        listening.guard(self)

    def close_gracefully(self, reason: str = "nanny-close-gracefully") -> None:
        """The worker closes for good, and says why."""
        self.reason = reason
        self._dismissed.set()
        super().close_gracefully(reason=reason)

    async def wait_closed(self) -> str | None:
        """Wait until the worker closes for good; return `reason`."""
        ends = [
            asyncio.ensure_future(self.finished()),
            asyncio.ensure_future(self._dismissed.wait()),
        ]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()
        return self.reason

    async def instantiate(self) -> Status:
        """Start the worker; after its death again, at growing intervals if that fails."""
        early, self.prestarted = self.prestarted, None
        if early is not None and early.uuid is not None:
            if self._would_be(early.uuid):
                forkserver.adopt(*early.give())
            else:  # before its context is in the way of the worker's
                await asyncio.to_thread(early.dismiss)
        async with self._starting:
            if self.status == Status.running:
                return await self._start_again()
            self._exit_code = None  # its first start, or it is closing
            try:
                status = await super().instantiate()
            except Exception:
                self._give_up_process()
                raise
            if status != Status.running and (how := self._end_of_process()):
                raise ClusterError(f"its process {how} while it started")
            return status

    def _is_over(self) -> bool:
        return self.status != Status.running

    async def _start_again(self) -> Status:
        for attempt in range(1, RESTART_ATTEMPTS + 1):
            if self._is_over() or self.process is None:
                return Status.failed
            status: Status = self.process.status
            if status == Status.running:  # by another call
                return status
            self.process.worker_kwargs["restarted"] = True
            self._exit_code = None
            try:
                async with asyncio.timeout(self.death_timeout or None):
                    if await self.process.start() == Status.running:
                        return Status.running
                why = f"its process {self._end_of_process() or 'did not register'}"
            except TimeoutError:  # what has hung so long is ended with the nanny
                why, attempt = f"it took more than {self.death_timeout:g} s", RESTART_ATTEMPTS
            except Exception as error:
                why = root_cause(error)
                self._give_up_process()
            pause = RESTART_PAUSE_S * 2 ** (attempt - 1)
            then = f"next attempt in {pause:g} s" if attempt < RESTART_ATTEMPTS else "given up"
            say(f"warning: worker {self.name} does not start again: {why}; {then}")
            if attempt == RESTART_ATTEMPTS:
                break
            await asyncio.sleep(pause)
        # not in this task, which belongs to what is closed
        self.loop.add_callback(self.close, reason=NOT_RESTARTED)
        return Status.failed

    def _give_up_process(self) -> None:
        """Have the nanny close where no process was started: it would wait for its end."""
        if self.process is not None and self.process.status == Status.starting:
            self.process.status = Status.stopped

    def _end_of_process(self) -> str:
        """How the worker's process ended, in words; empty if it was not seen to end."""
        code = self._exit_code
        if code is None:
            return ""
        return (
            f"ended with exit code {code}"
            if code >= 0
            else f"was killed by {signal.Signals(-code).name}"
        )

    def _on_worker_exit_sync(self, exitcode: int) -> None:
        self._exit_code = exitcode
        super()._on_worker_exit_sync(exitcode)

    def _would_be(self, uuid: str) -> bool:
        """Whether a process that has its context on this GPU, and its imports, is like the worker.

        The driver and libraries have read their variables by then, and Dask's configuration and
        plugins may add some.
        """
        others = self.env.items() - self._own_env.items() - self.pre_spawn_env.items()
        same = all(os.environ.get(name) == value for name, value in others)
        return same and self.env["CUDA_VISIBLE_DEVICES"] == uuid


def make_nanny(
    spec: WorkerSpec,
    placement: WorkerPlacement,
    *,
    scheduler: str,
    security: Security,
    scratch: str,
    tells: bool = False,
) -> BoundNanny:
    """The nanny of one worker; await it to start both.

    An empty Security is plain tcp. The rank removes the scratch folder. ``tells``: the worker
    itself writes that it is warm.
    """
    tcp = "tls" if security.require_encryption else "tcp"
    if placement.interface is None:
        # nanny and worker listen on the network of the scheduler only; by itself a worker would
        # listen on all
        host = unparse_host_port(get_ip(get_address_host(scheduler)))
    else:
        host = None
    exchange = placement.protocol
    if exchange == "ucx" and spec.protocol == "auto":
        exchange = "auto"  # what was not asked for by name may fail to start
    optional = {
        "host": host,
        "lifetime": spec.lifetime and f"{spec.lifetime} s",
        "lifetime_stagger": spec.lifetime_stagger and f"{spec.lifetime_stagger} s",
        "lifetime_restart": spec.lifetime_restart or None,
        "preload": list(spec.preload) or None,
        "preload_nanny": list(spec.preload_nanny) or None,
        "data": memory.store(placement.device_memory, placement.memory_limit),
    }
    return BoundNanny(
        scheduler,
        name=placement.name,
        nthreads=placement.nthreads,
        memory_limit=placement.memory_limit,
        local_directory=scratch,
        resources=spec.resources,
        security=security,
        interface=placement.interface,
        death_timeout=spec.death_timeout,
        protocol=tcp,
        worker_class=DeviceWorker,
        dashboard=False,
        # none where it computes on the CPU: the job may have GPUs all the same
        env={
            "CUDA_VISIBLE_DEVICES": placement.gpu.uuid if placement.gpu else "",
            **environment(os.environ),
            **ucx_environment(spec, os.environ),
        },
        exchange=exchange,
        reach=placement.reach,
        tells=tells,
        bind_cores=placement.cores,
        bind_gpu=placement.gpu and placement.gpu.uuid,
        device_memory=placement.device_memory,
        **{name: value for name, value in optional.items() if value is not None},
    )
