"""GPUs of a scheduler's workers: their present state, and their use in a run."""

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

from .samples import INTERVAL_S, METRIC, READ, GpuSample
from .usage import GpuUsage, RunUsage, summary

#: Name of the monitor among the scheduler's plugins.
NAME = "hpcdask-gpus"
#: Seconds for a worker to read its GPU at the end.
READ_DEADLINE_S = 0.5


@dataclass(frozen=True)
class GpuState(Record):
    """Present state of a GPU.

    Attributes
    ----------
    sample
        The last one of NVML.
    worker
        Name of the worker that has the GPU, or had it last.
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
    """Record of one GPU: the workers that have it, and since when by `time`."""

    workers: list[WorkerState] = field(default_factory=list)
    since: float = 0.0
    state: GpuState | None = None
    usage: GpuUsage = field(default_factory=GpuUsage)
    lap: GpuUsage = field(default_factory=GpuUsage)

    def add(self, told: dict[str, Any] | None) -> None:
        """Add a sample if it is newer than the last one."""
        before = self.state.sample if self.state else None
        if told is None or (before and told["time"] <= before.time):
            return
        sample = GpuSample.from_json(told)
        self.usage.add(before, sample)
        self.lap.add(before, sample)
        names = ", ".join(str(ws.name) for ws in self.workers)
        pool = sum((ws.metrics.get("rmm") or {}).get("rmm-total") or 0 for ws in self.workers)
        nvlink = _rate(before, sample, ("nvlink_sent", "nvlink_received"))
        pcie = _rate(before, sample, ("pcie_sent", "pcie_received"))
        self.state = GpuState(sample, names, pool or None, nvlink, pcie)

    def count_time(self) -> None:
        """Count the time until now in which workers have had the GPU."""
        now = time()
        if self.workers:
            self.usage.held_s += now - self.since
            self.lap.held_s += now - self.since
        self.since = now


def _rate(before: GpuSample | None, now: GpuSample, names: Iterable[str]) -> float | None:
    """Return how much counters together rise in a second."""
    pairs = [(getattr(before, name, None), getattr(now, name)) for name in names]
    if before is None or any(None in pair for pair in pairs):
        return None
    rose: float = sum(end - start for start, end in pairs)
    return max(0.0, rose / (now.time - before.time))


class GpuMonitor(SchedulerPlugin):
    """Monitor of the GPUs of a scheduler's workers, present and past."""

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
            gpu.count_time()
            gpu.workers.append(ws)

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        """See `SchedulerPlugin.remove_worker`."""
        for gpu in self._held():
            gpu.count_time()
            gpu.workers = [ws for ws in gpu.workers if ws.address != worker]
            if not gpu.workers:  # others may use the GPU meanwhile: that is not of this run
                gpu.state = None

    def _tick(self) -> None:
        """Add the samples of the workers' last heartbeats."""
        for gpu in self._held():
            gpu.add(gpu.workers[0].metrics[METRIC]["sample"])

    def _held(self) -> list[_Gpu]:
        return [gpu for gpu in self._gpus.values() if gpu.workers]

    async def refresh(self) -> None:
        """Ask workers to read their GPUs now; leave out workers that do not answer at once."""

        async def ask(gpu: _Gpu) -> None:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(READ_DEADLINE_S):
                    call = getattr(self._scheduler.rpc(gpu.workers[0].address), READ)
                    gpu.add((await call())["sample"])

        await asyncio.gather(*map(ask, self._held()))
        for gpu in self._gpus.values():
            gpu.count_time()

    def states(self) -> list[GpuState]:
        """Return the present states of the GPUs that workers have, by host and index."""
        states = [gpu.state for gpu in self._held() if gpu.state]
        return sorted(states, key=lambda one: (one.sample.host, one.sample.index or 0))

    def usage(self) -> RunUsage | None:
        """Return the use of all GPUs so far; None if none was sampled."""
        for gpu in self._gpus.values():
            gpu.count_time()
        return summary([gpu.usage for gpu in self._gpus.values()])

    async def start_lap(self) -> None:
        """Start new sums, beside those of the run."""
        await self.refresh()
        for gpu in self._gpus.values():
            gpu.lap = GpuUsage()

    async def lap(self) -> RunUsage | None:
        """Return the use of all GPUs since `start_lap`; None if none was sampled."""
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
    """Return the lines for the user on the GPUs of a run; none where no GPU was sampled."""
    monitor = monitor_of(scheduler)
    usage = monitor and monitor.usage()
    return usage.lines() if usage else []
