"""The scheduler: a process with nothing but distributed's, and rank 0's hold on it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import warnings
from collections.abc import Callable
from typing import Any

from distributed import Scheduler
from distributed.comm import get_address_host
from distributed.diagnostics.plugin import SchedulerPlugin

from hpcdask.bootstrap.orders import Message
from hpcdask.bootstrap.stream import MessageStream
from hpcdask.bootstrap.supervisor import CONTEXT
from hpcdask.comm.warmup import TOPIC
from hpcdask.errors import root_cause
from hpcdask.gpu.monitor import GpuMonitor, monitor_of, usage_lines
from hpcdask.logs import say, set_log_level
from hpcdask.process import make_observable
from hpcdask.security import ports, webserver
from hpcdask.security.credentials import Credentials, to_security
from hpcdask.upstream.distributed import cull_by_layer, run_in_loop, send_at_once

from . import link
from .link import Events, Loss, WorkersChanged, WorkerWarm

#: Seconds in which it asks the workers what the GPUs did, and says so.
USAGE_DEADLINE_S = 1.0


class _WorkerReporter(SchedulerPlugin):
    """Reporter to the rank of workers that come, go and are warm."""

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


def main(
    sock: socket.socket, credentials: Credentials, port_range: str | None, options: dict[str, Any]
) -> None:
    """Serve until the rank says so or is gone. Runs in a process of its own."""
    set_log_level()
    # it moves to another, which the run's first line names
    warnings.filterwarnings("ignore", message="Port .* is already in use", category=UserWarning)
    # As the `dask scheduler` command does: a graph is many small objects, none of them garbage.
    gc.set_threshold(*(3 * count for count in gc.get_threshold()))
    make_observable()
    ports.use(port_range)
    run_in_loop(_main(sock, {"security": to_security(credentials), **options}))


async def _main(sock: socket.socket, options: dict[str, Any]) -> None:
    channel = await MessageStream.over(sock)
    try:
        scheduler = Scheduler(port=0, dashboard=False, **options)
        webserver.guard(scheduler)
        webserver.add_lazy_dashboard(scheduler)
        scheduler.add_plugin(_WorkerReporter(channel.send))
        cull_by_layer()
        scheduler.add_plugin(GpuMonitor())
        await scheduler
    except Exception as error:
        advice = "See Dask's configuration (distributed.scheduler) and hpcdask doctor"
        text = (
            f"the scheduler did not start: {root_cause(error)}. {advice} on {socket.gethostname()}"
        )
        channel.send(link.SchedulerStarted(error=text))
        return
    server: Any = scheduler.http_server
    local = server.address == link.LOOPBACK
    host = link.LOOPBACK if local else str(get_address_host(scheduler.address))
    channel.send(link.SchedulerStarted(scheduler.address, host, server.port))
    told = asyncio.create_task(_obey(scheduler, channel))
    await scheduler.finished()
    told.cancel()
    channel.send(link.GpuUsageTold(usage_lines(scheduler)))
    channel.send(link.SchedulerClosed())


async def _obey(scheduler: Scheduler, channel: MessageStream) -> None:
    async for _ in channel:  # `EndSoon`
        set_log_level("CRITICAL")
        await monitor_of(scheduler).refresh()
        channel.send(link.GpuUsageTold(usage_lines(scheduler)))
    await scheduler.close(reason="the run is over")


class SchedulerProcess:
    """Scheduler's process; its words become events, its end is one of two: closed or lost."""

    def __init__(self, events: Events) -> None:
        self.started = link.SchedulerStarted()
        self.registered: set[str] = set()
        self.nannies: dict[str, str] = {}
        self._events = events
        self._usage_told = asyncio.Event()
        self._orders: MessageStream | None = None

    async def start(self, credentials: Credentials, port_range: str | None, **options: Any) -> int:
        """Start the process, with options of distributed's scheduler; return its id."""
        line, theirs = socket.socketpair()
        given = theirs, credentials, port_range, options
        self._process = CONTEXT.Process(target=main, args=given, name="scheduler")
        self._process.start()
        theirs.close()
        self._orders = await MessageStream.over(line)
        self._listening = asyncio.create_task(self._listen(self._orders))
        return self._process.pid or 0

    async def _listen(self, channel: MessageStream) -> None:
        """Turn what it tells into events, until its end."""
        closed = False
        async for message in channel:
            match message:
                case link.WorkersChanged(came, gone):
                    self.registered.difference_update(gone)
                    self.registered.update(came)
                    self.nannies.update(came)
                case link.GpuUsageTold(lines) if not self._usage_told.is_set():
                    for line in lines:
                        say(line)
                    self._usage_told.set()
                case link.SchedulerStarted():
                    self.started = message
                case link.SchedulerClosed():
                    closed = True
            self._events.put_nowait(message)
        self._usage_told.set()
        if not closed:
            text = "the scheduler's process was killed: see whether the node ran out of memory"
            self._events.put_nowait(Loss(text))

    async def end_soon(self) -> None:
        """Order the scheduler to log no more, and wait for its lines on the GPUs."""
        if self._orders is not None:
            self._orders.send(link.EndSoon())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._usage_told.wait(), USAGE_DEADLINE_S)

    async def end(self) -> None:
        """Close it; after a second, by force."""
        if self._orders is not None:
            self._orders.close()
            await asyncio.to_thread(self._process.join, 1.0)
            self._process.kill()
