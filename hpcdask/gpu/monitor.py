"""The scheduler's side: who samples which GPUs, what they did of late, and what a run used."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, NamedTuple

from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.metrics import time
from distributed.scheduler import WorkerState
from tornado.ioloop import PeriodicCallback

from hpcdask.security import webserver
from hpcdask.spec.records import Record

from .reporting import METRIC, NAME, READ, SAMPLE, TOPIC
from .samples import INTERVAL_S, GpuSample, Reading
from .usage import GpuUsage, RunUsage, summary

#: Ticks without a new worker after which it is decided who samples: not while a cluster starts.
SETTLE_TICKS = 2
#: Seconds for which the past of each GPU is kept, and for a worker to read its GPUs at the end.
KEPT_S, READ_DEADLINE_S = 600.0, 0.5


class Moment(NamedTuple):
    """One GPU at one time: percent, bytes, watts and bytes per second."""

    time: float
    utilisation: float | None
    memory: int | None
    power: float | None
    nvlink: float | None


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
    """What is known of one GPU: `since` when `workers` have it; None while none does."""

    state: GpuState | None = None
    workers: list[WorkerState] = field(default_factory=list)
    usage: GpuUsage = field(default_factory=GpuUsage)
    lap: GpuUsage = field(default_factory=GpuUsage)
    past: deque[Moment] = field(default_factory=deque)
    since: float | None = None

    def take(self, sample: GpuSample) -> None:
        """Take a sample that is newer than the last one."""
        before = self.state.sample if self.state else None
        if before is not None and sample.time <= before.time:
            return
        self.usage.add(before, sample)
        self.lap.add(before, sample)
        nvlink = _rate(before, sample, ("nvlink_sent", "nvlink_received"))
        pcie = _rate(before, sample, ("pcie_sent", "pcie_received"))
        names = ", ".join(str(ws.name) for ws in self.workers)
        pools = [(ws.metrics.get("rmm") or {}).get("rmm-total") or 0 for ws in self.workers]
        self.state = GpuState(sample, names, sum(pools) or None, nvlink, pcie)
        now = sample.time
        self.past.append(
            Moment(now, sample.utilisation, sample.memory_used, sample.power_w, nvlink)
        )
        while self.past[0].time < now - KEPT_S:
            self.past.popleft()

    def count(self, *, ends: bool = False) -> None:
        """Count the time that a worker has had it; `ends` if none does any more."""
        now = time()
        if self.since is not None:
            self.usage.held_s += now - self.since
            self.lap.held_s += now - self.since
            self.since = None if ends else now


def _rate(before: GpuSample | None, now: GpuSample, names: Iterable[str]) -> float | None:
    """How fast counters rise together."""
    if before is None:
        return None
    ends = [getattr(now, name) for name in names]
    starts = [getattr(before, name) for name in names]
    if None in ends or None in starts:
        return None
    return max(0.0, float(sum(ends) - sum(starts)) / (now.time - before.time))


class GpuMonitor(SchedulerPlugin):
    """Knows the GPUs of a scheduler's workers, those of workers that are gone as well."""

    name = NAME

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._uuids: dict[str, str] = {}  # by worker, in the order in which they came
        self._unseen: set[tuple[str, str]] = set()
        self._orders: dict[str, list[str]] = {}
        self._settling = 0
        self._gpus: dict[str, _Gpu] = {}
        callback = PeriodicCallback(self.tick, INTERVAL_S * 1000)
        scheduler.periodic_callbacks[NAME] = callback
        callback.start()
        webserver.add_page(scheduler, "gpus", "hpcdask.gpu.page")
        if find_spec("prometheus_client"):  # distributed serves what is registered there
            from .metrics import COLLECTOR

            COLLECTOR.add(self)

    # What the scheduler tells

    def log_event(self, topic: str, msg: Any) -> None:
        """See `SchedulerPlugin.log_event`: a worker tells which GPU it has."""
        worker = msg["worker"] if topic == TOPIC else None
        if worker in self._uuids or worker not in self._scheduler.workers:
            return
        self._uuids[worker] = msg["uuid"]
        gpu = self._gpus.setdefault(msg["uuid"], _Gpu())
        gpu.since = gpu.since or time()
        gpu.workers.append(self._scheduler.workers[worker])
        self._settling = SETTLE_TICKS

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        """See `SchedulerPlugin.remove_worker`: others may have to sample for it."""
        if (uuid := self._uuids.pop(worker, None)) is not None:
            gpu = self._gpus[uuid]
            gpu.workers = [ws for ws in gpu.workers if ws.address != worker]
            if not gpu.workers:
                gpu.count(ends=True)
        self._orders.pop(worker, None)
        self._settling = SETTLE_TICKS

    def tick(self) -> None:
        """Take what workers told with their last heartbeats."""
        if self._settling:
            self._settling -= 1
            if not self._settling:
                self._assign()
        for address in list(self._orders):
            if (ws := self._scheduler.workers.get(address)) is not None:
                self._take(address, ws.metrics.get(METRIC) or {})

    def _assign(self) -> None:
        hosts = {address: self._scheduler.workers[address].host for address in self._uuids}
        orders = assign(self._uuids, hosts, self._unseen)
        for address in self._uuids:
            if (uuids := orders.get(address, [])) != self._orders.get(address, []):
                self._scheduler.worker_send(address, {"op": SAMPLE, "uuids": uuids})
        self._orders = orders

    def _take(self, address: str, told: Mapping[str, Any]) -> None:
        if not told:
            return
        reading = Reading.from_json(told)
        mine = self._orders.get(address, ())
        unseen = {(address, uuid) for uuid in reading.unseen if uuid in mine}
        if not unseen <= self._unseen:
            self._unseen |= unseen
            self._settling = self._settling or 1
        for sample in reading.samples:
            if sample.uuid in mine:
                self._gpus[sample.uuid].take(sample)

    # What others ask

    async def refresh(self) -> None:
        """Have the workers that sample read now; who does not answer at once is left out."""

        async def ask(address: str) -> None:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(READ_DEADLINE_S):
                    call = getattr(self._scheduler.rpc(address), READ)
                    self._take(address, await call())

        await asyncio.gather(*map(ask, list(self._orders)))

    def states(self) -> list[GpuState]:
        """The GPUs that workers have, as they are, by host and index."""
        states = [gpu.state for gpu in self._gpus.values() if gpu.state and gpu.since]
        return sorted(states, key=lambda one: (one.sample.host, one.sample.index or 0))

    def past(self, since: float = 0.0) -> dict[str, list[Moment]]:
        """What each GPU did of late, by its label."""
        return {
            gpu.usage.label: [one for one in gpu.past if one.time >= since]
            for gpu in self._gpus.values()
            if gpu.past
        }

    def usage(self) -> RunUsage | None:
        """What all GPUs did so far; None if none was sampled."""
        for gpu in self._gpus.values():
            gpu.count()
        return summary([gpu.usage for gpu in self._gpus.values()])

    async def start_lap(self) -> None:
        """Begin to sum up anew, beside the sums of the run."""
        await self.refresh()
        for gpu in self._gpus.values():
            gpu.count()
            gpu.lap = GpuUsage()

    async def lap(self) -> RunUsage | None:
        """What all GPUs did since `start_lap`; None if none was sampled."""
        await self.refresh()
        for gpu in self._gpus.values():
            gpu.count()
        return summary([gpu.lap for gpu in self._gpus.values()])


def assign(
    uuids: Mapping[str, str], hosts: Mapping[str, str], unseen: Collection[tuple[str, str]]
) -> dict[str, list[str]]:
    """Which worker samples which GPUs: of each host the first one all of them.

    But a GPU that it does not see, in a job that a cgroup confines, is sampled by its own worker.
    `uuids` and `hosts` are by worker.
    """
    first: dict[str, str] = {}
    owner: dict[str, str] = {}
    orders: dict[str, list[str]] = {}
    for address, uuid in uuids.items():
        one = first.setdefault(hosts[address], address)
        if uuid in owner:
            continue
        owner[uuid] = address
        sampler = address if (one, uuid) in unseen else one
        orders.setdefault(sampler, []).append(uuid)
    return orders
