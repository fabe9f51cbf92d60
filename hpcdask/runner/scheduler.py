"""The scheduler's process: nothing but distributed's Scheduler, told what to do by the rank."""

from __future__ import annotations

import asyncio
import gc
import socket
import warnings
from collections.abc import Callable
from typing import Any

from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin

from hpcdask.bootstrap.orders import Message, MessageStream, read
from hpcdask.client.defaults import send_at_once
from hpcdask.comm.warmup import TOPIC
from hpcdask.gpu.devices import start_nvml
from hpcdask.gpu.monitor import GpuMonitor, refresh, usage_lines
from hpcdask.logs import set_log_level
from hpcdask.process import make_observable, raise_descriptor_limit
from hpcdask.security import ports, webserver
from hpcdask.security.credentials import to_security
from hpcdask.upstream.dask import cull_by_layer
from hpcdask.upstream.distributed import run_in_loop

from . import protocol
from .protocol import WorkersChanged, WorkerWarm


class _WorkerReporter(SchedulerPlugin):
    """Tells the rank which workers come and go, and which are warm."""

    name = "hpcdask-census"

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self._names: dict[str, str] = {}

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        send_at_once(scheduler.stream_comms[worker])
        state = scheduler.workers[worker]
        self._names[worker] = str(state.name)
        self._send(WorkersChanged(came={self._names[worker]: state.nanny or ""}, gone=[]))

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        if name := self._names.pop(worker, None):
            self._send(WorkersChanged(came={}, gone=[name]))

    async def before_close(self) -> None:
        set_log_level("ERROR")  # a client may close it, and workers that are told still say it

    def log_event(self, topic: str, msg: Any) -> None:
        if topic == TOPIC:
            self._send(WorkerWarm(msg))


def main(sock: socket.socket) -> None:
    """Serve until the rank says so or is gone. Runs in a process of its own."""
    set_log_level()
    raise_descriptor_limit()
    start_nvml()
    # A dashboard port that was asked for by number is checked before; the default one may move.
    warnings.filterwarnings("ignore", message="Port .* is already in use", category=UserWarning)
    # As the `dask scheduler` command does: a graph is many small objects, none of them garbage.
    gc.set_threshold(*(3 * count for count in gc.get_threshold()))
    run_in_loop(_main(sock))


async def _main(sock: socket.socket) -> None:
    channel = await MessageStream.over(sock)

    def send(message: Message) -> None:
        channel.send(**message.to_json())

    received = await channel.receive()
    order = read(received) if received else None
    if not isinstance(order, protocol.StartScheduler):  # the run has ended before
        return
    make_observable()
    ports.use(order.port_range)
    try:
        with webserver.without_proxy():
            scheduler = Scheduler(
                host=order.host,
                interface=order.interface,
                protocol=order.protocol,
                port=0,
                security=to_security(order.credentials),
                dashboard=False,
                local_directory=order.scratch,
                dashboard_address=order.dashboard,
            )
        webserver.guard(scheduler)
        webserver.add_lazy_dashboard(scheduler)
        scheduler.add_plugin(_WorkerReporter(send))
        cull_by_layer()
        scheduler.add_plugin(GpuMonitor(scheduler))
        await scheduler
    except Exception as error:
        what = error if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        advice = "See Dask's configuration (distributed.scheduler) and hpcdask doctor"
        text = f"the scheduler did not start: {what}. {advice} on {socket.gethostname()}"
        send(protocol.SchedulerFailed(text))
        await channel.flush()
        return
    server: Any = scheduler.http_server
    send(protocol.SchedulerStarted(scheduler.address, server.address, server.port))
    told = asyncio.create_task(_obey(scheduler, channel))
    await scheduler.finished()
    told.cancel()
    send(protocol.GpuUsageTold(usage_lines(scheduler)))
    send(protocol.SchedulerClosed())
    await channel.flush()


async def _obey(scheduler: Scheduler, channel: MessageStream) -> None:
    while (received := await channel.receive()) is not None:
        order = read(received)
        set_log_level("CRITICAL")
        if isinstance(order, protocol.TellGpuUsage):
            await refresh(scheduler)
            channel.send(**protocol.GpuUsageTold(usage_lines(scheduler)).to_json())
        if isinstance(order, protocol.CloseScheduler):
            break
    set_log_level("CRITICAL")
    await scheduler.close(reason="the run is over")
