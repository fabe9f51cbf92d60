"""The GPUs of a scheduler's workers: what they do, what they did of late, what a run used."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.metrics import time
from distributed.scheduler import WorkerState
from tornado.ioloop import PeriodicCallback

from hpcdask.spec.records import Record

from .reporting import METRIC, READ
from .samples import INTERVAL_S, GpuSample
from .usage import GpuUsage, RunUsage, summary

#: Name of the monitor among the scheduler's plugins.
NAME = "hpcdask-gpus"
#: Seconds for a worker to read its GPU at the end.
READ_DEADLINE_S = 0.5


@dataclass(frozen=True)
class GpuState(Record):
    """A GPU as it is now.

    Attributes
    ----------
    sample
        What NVML told last.
    worker
        Name of the worker that has it, or had it last.
    pool
        Bytes of its memory that belong to the worker's RMM pool; None if it has none.
    nvlink, pcie
        Bytes per second, sent and received; None if unknown.
    """

    sample: GpuSample
    worker: str
    pool: int | None = None
    nvlink: float | None = None
    pcie: float | None = None


@dataclass
class _Gpu:
    """Record of one GPU: the workers that have it, and since when, by `time`, some have."""

    workers: list[WorkerState] = field(default_factory=list)
    since: float = 0.0
    state: GpuState | None = None
    usage: GpuUsage = field(default_factory=GpuUsage)
    lap: GpuUsage = field(default_factory=GpuUsage)

    def take(self, told: dict[str, Any] | None) -> None:
        """Take a sample if it is newer than the last one."""
        if told is None:
            return
        sample = GpuSample.from_json(told)
        before = self.state.sample if self.state else None
        if before is not None and sample.time <= before.time:
            return
        self.usage.add(before, sample)
        self.lap.add(before, sample)
        names = ", ".join(str(ws.name) for ws in self.workers)
        pools = [(ws.metrics.get("rmm") or {}).get("rmm-total") or 0 for ws in self.workers]
        nvlink = _rate(before, sample, ("nvlink_sent", "nvlink_received"))
        pcie = _rate(before, sample, ("pcie_sent", "pcie_received"))
        self.state = GpuState(sample, names, sum(pools) or None, nvlink, pcie)

    def count(self) -> None:
        """Count the time until now in which workers have had it."""
        now = time()
        if self.workers:
            self.usage.held_s += now - self.since
            self.lap.held_s += now - self.since
        self.since = now


def _rate(before: GpuSample | None, now: GpuSample, names: Iterable[str]) -> float | None:
    """Return how fast counters rise together, a second."""
    pairs = [(getattr(before, name, None), getattr(now, name)) for name in names]
    if before is None or any(None in pair for pair in pairs):
        return None
    rose: float = sum(end - start for start, end in pairs)
    return max(0.0, rose / (now.time - before.time))


class GpuMonitor(SchedulerPlugin):
    """Monitor of the GPUs of a scheduler's workers, also of workers that are gone."""

    name = NAME

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._gpus: dict[str, _Gpu] = {}
        scheduler.periodic_callbacks[NAME] = PeriodicCallback(self._tick, INTERVAL_S * 1000)

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """See `SchedulerPlugin.add_worker`."""
        ws = scheduler.workers[worker]
        if told := ws.metrics.get(METRIC):
            gpu = self._gpus.setdefault(told["uuid"], _Gpu())
            gpu.count()
            gpu.workers.append(ws)

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        """See `SchedulerPlugin.remove_worker`."""
        for gpu in self._held():
            gpu.count()
            gpu.workers = [ws for ws in gpu.workers if ws.address != worker]
            if not gpu.workers:  # what others do with it meanwhile is not of this run
                gpu.state = None

    def _tick(self) -> None:
        """Take what workers told with their last heartbeats."""
        for gpu in self._held():
            gpu.take(gpu.workers[0].metrics[METRIC]["sample"])

    def _held(self) -> list[_Gpu]:
        return [gpu for gpu in self._gpus.values() if gpu.workers]

    async def refresh(self) -> None:
        """Ask workers to read their GPUs now; those that do not answer at once are left out."""

        async def ask(gpu: _Gpu) -> None:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(READ_DEADLINE_S):
                    call = getattr(self._scheduler.rpc(gpu.workers[0].address), READ)
                    gpu.take((await call())["sample"])

        await asyncio.gather(*map(ask, self._held()))
        for gpu in self._gpus.values():
            gpu.count()

    def states(self) -> list[GpuState]:
        """Return the GPUs that workers have, as they are, by host and index."""
        states = [gpu.state for gpu in self._held() if gpu.state]
        return sorted(states, key=lambda one: (one.sample.host, one.sample.index or 0))

    def usage(self) -> RunUsage | None:
        """Return what all GPUs did so far; None if none was sampled."""
        for gpu in self._gpus.values():
            gpu.count()
        return summary([gpu.usage for gpu in self._gpus.values()])

    async def start_lap(self) -> None:
        """Begin to sum up anew, beside the sums of the run."""
        await self.refresh()
        for gpu in self._gpus.values():
            gpu.lap = GpuUsage()

    async def lap(self) -> RunUsage | None:
        """Return what all GPUs did since `start_lap`; None if none was sampled."""
        await self.refresh()
        return summary([gpu.lap for gpu in self._gpus.values()])


def monitor_of(scheduler: Any) -> GpuMonitor | None:
    """Return the monitor of a scheduler; None if it has none."""
    return None if scheduler is None else scheduler.plugins.get(NAME)


async def refresh(scheduler: Scheduler) -> None:
    """Read the GPUs of a scheduler's workers now."""
    if (monitor := monitor_of(scheduler)) is not None:
        await monitor.refresh()


def usage_lines(scheduler: Scheduler) -> list[str]:
    """Return what the user is told of the GPUs at the end; nothing where none was sampled."""
    monitor = monitor_of(scheduler)
    usage = monitor.usage() if monitor is not None else None
    return usage.lines() if usage is not None else []
