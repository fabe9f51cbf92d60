"""Scheduler's half of gangs, which reserve all of their workers at once, and share none."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dask.typing import Key
from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.metrics import monotonic, time
from distributed.scheduler import WorkerState

from hpcdask.logs import natural

NAME = "hpcdask-gangs"
#: Scheduler extension by which a cluster tells how many workers it may come to have.
MOST_WORKERS = "hpcdask-most-workers"
POLL_S = 0.02
#: Seconds in which a nanny brings a lost worker back, so that a gang does not call it missing.
RETURN_S = 15.0
#: Grace of a gang whose client has gone, and the limit of a restart by a nanny, in seconds.
GRACE_S, NANNY_S = 5.0, 30.0
#: Seconds that an error of a connection waits for the failure of the peer that caused it.
SETTLE_S = 1.0
_LOST_PEER = re.compile(
    r"connect|broken ?pipe|\bpeer\b|\beof|remote process|nccl|socket|incomplete ?read", re.I
)


@dataclass
class Gang:
    """Gang, from its request for workers to the end of its last call."""

    size: int
    client: str
    keys: Sequence[Key]
    workers: list[WorkerState] = field(default_factory=list)
    hosts: dict[int, str] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)
    port: int = 0
    started: bool = False
    #: The failure to report, or None: the gang is over once this is set.
    failure: asyncio.Future[dict[str, Any] | None] = field(default_factory=asyncio.Future)

    def fail(self, rank: int, text: str, *, raised: bool) -> None:
        """Report a rank's failure, unless another one comes first."""
        ws = self.workers[rank]
        failure = {"rank": rank, "worker": str(ws.name), "host": self.hosts.get(rank, ws.host)}
        failure |= {"text": text, "raised": raised}
        lost_peer = raised and _LOST_PEER.search(text)
        asyncio.get_running_loop().call_later(SETTLE_S if lost_peer else 0, self.settle, failure)

    def settle(self, failure: dict[str, Any] | None) -> None:
        if not self.failure.done():
            self.failure.set_result(failure)

    def calling(self) -> list[int]:
        """Return the ranks whose call has begun and not ended."""
        return [rank for rank in range(self.size) if self.started and rank not in self.left]


class Gangs(SchedulerPlugin):
    """All gangs of one scheduler, in the order in which they came."""

    name = NAME

    def __init__(self, scheduler: Scheduler) -> None:
        self.gangs: dict[str, Gang] = {}
        self._scheduler = scheduler
        self._lost_at = -RETURN_S
        scheduler.handlers |= {
            "gang_reserve": self.reserve,
            "gang_failure": self.failure,
            "gang_arrive": self.arrive,
            "gang_end": self.end,
        }
        scheduler.stream_handlers["gang-left"] = self.left

    async def reserve(
        self, gang: str, client: str, size: int, keys: Sequence[Key], data: Sequence[Sequence[Key]]
    ) -> list[str] | int:
        """Wait for workers and return their addresses by rank, or how many there are at most."""
        mine = self.gangs[gang] = Gang(size, client, keys)
        while not mine.failure.done() and not (workers := self._choose(mine, data)):
            told = self._scheduler.extensions.get(MOST_WORKERS, lambda: 0)
            most = max(len(self._scheduler.workers), told())
            if size > most and monotonic() > self._lost_at + RETURN_S:
                del self.gangs[gang]
                return int(most)
            await asyncio.sleep(POLL_S)
        if mine.failure.done():
            return []
        mine.workers = workers
        return [ws.address for ws in workers]

    def _choose(self, gang: Gang, data: Sequence[Sequence[Key]]) -> list[WorkerState]:
        """Return workers by rank, near their data; none while too few are free or others wait."""
        running = self._scheduler.running
        gangs = list(self.gangs.values())
        for earlier in gangs[: gangs.index(gang)]:
            if not earlier.workers and not earlier.failure.done() and earlier.size <= len(running):
                return []
        free = set(running).difference(*(other.workers for other in gangs))
        if len(free) < gang.size:
            return []
        known = self._scheduler.tasks
        holders = [
            {ws for key in keys if key in known for ws in known[key].who_has or ()} & free
            for keys in data
        ]
        placed: dict[int, WorkerState] = {}
        for rank in sorted(range(len(data)), key=lambda rank: len(holders[rank])):
            if near := holders[rank] & free:  # ranks with the least choice choose first
                placed[rank] = min(near, key=_place)
                free.remove(placed[rank])
        idle = sorted(
            free, key=lambda ws: (max(0, len(ws.processing) + 1 - ws.nthreads), _place(ws))
        )
        others = iter(sorted(idle[: gang.size - len(placed)], key=_place))
        return [placed.get(rank) or next(others) for rank in range(gang.size)]

    async def failure(self, gang: str) -> dict[str, Any] | None:
        """Wait until a gang fails, and return what failed first; None if it ends before."""
        return await self.gangs[gang].failure if gang in self.gangs else None

    async def end(self, gang: str, grace_s: float) -> dict[str, Any]:
        """End a gang, and restart workers whose call does not end within the grace."""
        mine = self.gangs.get(gang)
        if mine is None:
            return {"started": False, "calling": [], "stuck": {}}
        calling = mine.calling()
        mine.settle(None)
        deadline = monotonic() + grace_s
        live = self._scheduler.workers.values()
        while stuck := [rank for rank in mine.calling() if mine.workers[rank] in live]:
            if monotonic() > deadline:
                break
            await asyncio.sleep(POLL_S)
        try:
            if stuck:
                await self._scheduler.restart_workers(
                    [mine.workers[rank].address for rank in stuck],
                    timeout=NANNY_S,
                    wait_for_workers=False,
                    on_error="return",
                    stimulus_id=f"hpcdask-gang-{time()}",
                )
        finally:
            self.gangs.pop(gang, None)
        names = {rank: str(mine.workers[rank].name) for rank in stuck}
        return {"started": mine.started, "calling": calling, "stuck": names}

    async def arrive(self, gang: str, rank: int, host: str, port: int) -> int:
        """Wait for the other ranks, and return the port of rank 0; 0 if the gang is over."""
        mine = self.gangs.get(gang)
        if mine is None:
            return 0
        mine.hosts[rank] = host
        mine.port = port or mine.port
        mine.started = len(mine.hosts) == mine.size and not mine.failure.done()
        while not mine.started and not mine.failure.done():  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
        return mine.port if mine.started else 0

    def left(self, gang: str, rank: int, worker: str) -> None:
        if gang in self.gangs:
            self.gangs[gang].left.add(rank)

    def transition(self, key: Key, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        """Note a rank that raised, or whose arguments failed: those have no text of their own."""
        if finish == "erred":
            for gang in self.gangs.values():
                if gang.workers and key in gang.keys:
                    text = self._scheduler.tasks[key].exception_text or ""
                    gang.fail(gang.keys.index(key), text, raised=True)

    def remove_worker(
        self, scheduler: Scheduler, worker: str, *, stimulus_id: str, **kwargs: Any
    ) -> None:
        """Note a rank that lost its worker, unless another worker has its result."""
        self._lost_at = monotonic()
        for gang in self.gangs.values():
            for rank, ws in enumerate(gang.workers):
                ts = scheduler.tasks.get(gang.keys[rank])
                if ws.address == worker and (ts is None or ts.state != "memory"):
                    gang.fail(rank, _reason(stimulus_id), raised=False)

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        for name, gang in self.gangs.items():
            if gang.client == client and not gang.failure.done():
                scheduler.loop.add_callback(self.end, name, GRACE_S)


def install(dask_scheduler: Scheduler) -> None:
    """Add gangs to a scheduler, once."""
    if NAME not in dask_scheduler.plugins:
        dask_scheduler.add_plugin(Gangs(dask_scheduler))


def workers_wanted(scheduler: Scheduler) -> int:
    """Return how many workers the gangs of a scheduler have or wait for."""
    return sum(one["size"] for one in describe(scheduler))


def describe(scheduler: Scheduler) -> list[dict[str, Any]]:
    """Return each gang's workers by rank, and which ranks have arrived or are calling."""
    return [
        {
            "size": gang.size,
            "workers": [str(ws.name) for ws in gang.workers],
            "arrived": sorted(gang.hosts),
            "started": gang.started,
            "calling": gang.calling(),
        }
        for gang in getattr(scheduler.plugins.get(NAME), "gangs", {}).values()
    ]


def _place(ws: WorkerState) -> list[Any]:
    return [natural(ws.host), natural(str(ws.name))]


def _reason(stimulus_id: str) -> str:
    """Return why a worker was removed, by the names that distributed and `clusters.retire` use."""
    if "hpcdask-force-out-walltime" in stimulus_id:
        return "its worker's job reached its walltime. Request a longer one, or save in between"
    if "hpcdask-force-out" in stimulus_id or "retire" in stimulus_id:
        return (
            "its worker was taken away, as the cluster was scaled down or its job came to its end"
        )
    return "its worker died: it was killed, or ran out of memory, or its node was lost"
