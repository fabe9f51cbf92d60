"""How workers tell the scheduler of their GPUs, through distributed's worker metrics.

A worker says which GPU it has as soon as it is connected. From the first one on the scheduler has a
`hpcdask.gpu.monitor.GpuMonitor`, which has one worker of each node sample all GPUs there.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from distributed.diagnostics.plugin import SchedulerPlugin

if TYPE_CHECKING:
    from distributed import Scheduler, Worker

    from .monitor import GpuMonitor
    from .samples import Sampler

#: Name of the monitor among the scheduler's plugins.
NAME = "hpcdask-gpus"
#: Where workers tell of their GPUs, and the order to sample some.
TOPIC, SAMPLE = "hpcdask-gpu", "hpcdask-sample-gpus"
#: The worker's metric, and what it answers when it is asked to read now.
METRIC, READ = "hpcdask-gpus", "hpcdask-read-gpus"


class GpuReporter:
    """A worker's side: it tells of its GPU, and samples those that it is told to."""

    def __init__(self, worker: Worker, uuid: str) -> None:
        self._worker, self._uuid = worker, uuid
        self._sampler: Sampler | None = None
        worker.stream_handlers[SAMPLE] = self.sample
        worker.handlers[READ] = self.read
        worker.metrics[METRIC] = self._latest  # not later: a heartbeat may be going through them

    def announce(self) -> None:
        """Tell the scheduler which GPU this worker has."""
        self._worker.log_event(TOPIC, {"worker": self._worker.address, "uuid": self._uuid})

    def sample(self, uuids: list[str]) -> None:
        """Sample these GPUs from now on, instead of others."""
        from .samples import Sampler

        self.stop()
        if uuids:
            self._sampler = Sampler(uuids)
            self._sampler.start()

    def stop(self) -> None:
        """Sample nothing more."""
        if self._sampler is not None:
            self._sampler.stop()
            self._sampler = None

    def _latest(self, worker: Worker) -> dict[str, Any]:
        return self._sampler.latest.to_json() if self._sampler else {}

    async def read(self) -> dict[str, Any]:
        """Read the GPUs now, and return it."""
        if self._sampler is None:
            return {}
        return (await asyncio.to_thread(self._sampler.read)).to_json()


class _FirstGpu(SchedulerPlugin):
    """Waits for the first GPU, and then makes room for the monitor."""

    name = "hpcdask-first-gpu"

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def log_event(self, topic: str, msg: Any) -> None:
        if topic == TOPIC:
            from .monitor import GpuMonitor

            monitor = GpuMonitor(self._scheduler)
            self._scheduler.add_plugin(monitor)
            self._scheduler.remove_plugin(self.name)
            monitor.log_event(topic, msg)


def expect_gpus(scheduler: Scheduler) -> None:
    """Have a scheduler monitor GPUs once a worker tells of one."""
    scheduler.add_plugin(_FirstGpu(scheduler))


def monitor_of(scheduler: Any) -> GpuMonitor | None:
    """The monitor of a scheduler; None if no worker has told of a GPU."""
    return None if scheduler is None else scheduler.plugins.get(NAME)


async def refresh(scheduler: Scheduler) -> None:
    """Have the GPUs of a scheduler's workers read now."""
    if (monitor := monitor_of(scheduler)) is not None:
        await monitor.refresh()


def usage_lines(scheduler: Scheduler) -> list[str]:
    """What the user is told of a scheduler's GPUs at the end; nothing where none was sampled."""
    monitor = monitor_of(scheduler)
    usage = monitor.usage() if monitor is not None else None
    return usage.lines() if usage is not None else []
