"""GPUs of a scheduler's workers: their present state as a table, and their use in a run."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dask.utils import format_bytes
from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.scheduler import WorkerState
from tornado.ioloop import PeriodicCallback

from hpcdask.logs import html_table, natural, text_table

from .samples import INTERVAL_S, METRIC, READ, UNKNOWN, GpuState
from .usage import GpuUsage, RunUsage, summary

if TYPE_CHECKING:
    from distributed import Client

#: Name of the monitor among the scheduler's plugins.
NAME = "hpcdask-gpus"
#: Seconds for a worker to read its GPU at the end.
READ_DEADLINE_S = 0.5


class GpuTable(tuple[GpuState, ...]):
    """Table of the GPUs of a cluster's workers, by node and index.

    A tuple of `hpcdask.gpu.samples.GpuState`. What NVML does not tell of a GPU, such as the power
    of a MIG slice, is unknown.
    """

    def summary(self) -> str:
        """Return models, memory in use and utilisation of all together, in one line."""
        models = Counter(gpu.model or "GPU" for gpu in self)
        names = ", ".join(f"{count} x {model}" for model, count in models.items())
        used = sum(gpu.memory_used or 0 for gpu in self)
        total = sum(gpu.memory_total or 0 for gpu in self)
        memory = f"{format_bytes(used)} of {format_bytes(total)}" if total else UNKNOWN
        busy = [gpu.utilisation for gpu in self if gpu.utilisation is not None]
        mean = f"{sum(busy) / len(busy):.0f} %" if busy else UNKNOWN
        return f"{names}, memory {memory}, utilisation {mean}"

    def _rows(self) -> list[list[str]]:
        rows = [state.cells() for state in self]
        return [list(rows[0]), *(list(row.values()) for row in rows)]

    def __repr__(self) -> str:
        return text_table(self._rows()) if self else "no GPU was sampled"

    def _repr_html_(self) -> str:
        return html_table(self._rows()) if self else repr(self)


def gpus(client: Client | None = None) -> Any:
    """Return the present state of a cluster's GPUs as a table.

    Parameters
    ----------
    client
        A client of a cluster of this package; by default the current one.

    Returns
    -------
    GpuTable
        Empty where workers compute on the CPU, and for some seconds after the start. With an
        asynchronous client, an awaitable of it.

    Raises
    ------
    ValueError
        There is no client.
    """
    from distributed import default_client

    mine = client or default_client()
    return mine.sync(_fetch, mine)


async def _fetch(client: Client) -> GpuTable:
    return GpuTable(map(GpuState.from_json, await client.run_on_scheduler(_states)))


def _states(dask_scheduler: Any) -> list[dict[str, Any]]:
    return [state.to_json() for state in monitor_of(dask_scheduler).table()]


class GpuMonitor(SchedulerPlugin):
    """Monitor of the GPUs of a scheduler's workers, present and past."""

    name = NAME
    _scheduler: Scheduler | None = None

    def __init__(self) -> None:
        self._states: dict[str, GpuState] = {}
        self._usage: defaultdict[str, GpuUsage] = defaultdict(GpuUsage)
        self._lap: defaultdict[str, GpuUsage] = defaultdict(GpuUsage)

    async def start(self, scheduler: Scheduler) -> None:
        """See `SchedulerPlugin.start`."""
        self._scheduler = scheduler
        scheduler.periodic_callbacks[NAME] = PeriodicCallback(self._tick, INTERVAL_S * 1000)

    def _workers(self) -> dict[str, list[WorkerState]]:
        """Return the workers that have GPUs, by its UUID."""
        found = defaultdict(list)
        for ws in self._scheduler.workers.values() if self._scheduler else ():
            if told := ws.metrics.get(METRIC):
                found[told["uuid"]].append(ws)
        return found

    def _tick(self) -> None:
        """Add the states of the workers' last heartbeats."""
        held = self._workers()
        for uuid in self._states.keys() - held:  # what others do there meanwhile is not of this run
            del self._states[uuid]
        for workers in held.values():
            self._add(workers[0].metrics[METRIC], workers)

    def _add(self, told: dict[str, Any], workers: list[WorkerState]) -> None:
        """Add a state of the workers that have the GPU, if it is newer than the last one."""
        now = GpuState.from_json(told)
        before = self._states.get(now.uuid)
        if now.time <= (before.time if before else 0):
            return
        for usage in (self._usage, self._lap):
            usage[now.uuid].add(before, now)
        names = ", ".join(sorted((str(ws.name) for ws in workers), key=natural))
        pool = sum((ws.metrics.get("rmm") or {}).get("rmm-total") or 0 for ws in workers) or None
        nvlink, pcie = (now.rate(before, link) for link in ("nvlink", "pcie"))
        new = replace(now, worker=names, pool=pool, nvlink=nvlink, pcie=pcie)
        self._states[now.uuid] = new

    async def refresh(self) -> None:
        """Ask workers to read their GPUs now; leave out workers that do not answer at once."""

        async def ask(workers: list[WorkerState]) -> None:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(READ_DEADLINE_S):
                    peer: Any = self._scheduler and self._scheduler.rpc(workers[0].address)
                    self._add(await getattr(peer, READ)(), workers)

        await asyncio.gather(*map(ask, self._workers().values()))

    def table(self) -> GpuTable:
        """Return the present states of the GPUs that workers have, by host and index."""
        states = [self._states[uuid] for uuid in self._workers() if uuid in self._states]
        return GpuTable(sorted(states, key=lambda state: natural(state.label)))

    def usage(self) -> RunUsage | None:
        """Return the use of all GPUs so far; None if none was sampled."""
        return summary(self._usage.values())

    async def start_lap(self) -> None:
        """Start new sums, beside those of the run."""
        await self.refresh()
        self._lap.clear()

    async def lap(self) -> RunUsage | None:
        """Return the use of all GPUs since `start_lap`; None if none was sampled."""
        await self.refresh()
        return summary(self._lap.values())


def monitor_of(scheduler: Any) -> GpuMonitor:
    """Return the monitor of a scheduler, or one without GPUs."""
    return (scheduler and scheduler.plugins.get(NAME)) or GpuMonitor()


def usage_lines(scheduler: Scheduler) -> list[str]:
    """Return the lines for the user on the GPUs of a run; none where no GPU was sampled."""
    usage = monitor_of(scheduler).usage()
    return usage.lines() if usage else []
