"""The scheduler's side of gangs: who gets which workers, when all start, and who failed first.

A gang's ranks are plain Dask tasks, each restricted to one worker. Gangs never share a worker, so
two of them cannot wait for each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from dask.typing import Key
from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.metrics import monotonic, time
from distributed.scheduler import WorkerState

from hpcdask.logs import natural

NAME = "hpcdask-gangs"
#: Under this name a cluster tells how many workers it may come to have.
MOST_WORKERS = "hpcdask-most-workers"
#: Seconds after which a wait looks by itself: no plugin is told that a worker is paused no more.
LOOK_S = 1.0
#: Seconds in which the failure that caused the first one may still arrive.
SETTLE_S = 1.0
#: Seconds in which a worker that was lost may be back by its nanny.
RETURN_S = 15.0
#: Seconds that calls get to end when nobody is left to say how many, and a nanny to kill a worker.
GRACE_S, NANNY_S = 5.0, 30.0
#: How an exception reads that is the consequence of another rank's end.
_CONSEQUENCE = re.compile(
    r"connect|broken ?pipe|\bpeer\b|\beof|remote process|nccl|socket|incomplete ?read", re.I
)
_TAKEN_AWAY = re.compile(r"hpcdask-(force-out-walltime)|hpcdask-force-out|retire")


@dataclass
class Failure:
    """Reason for which a gang ends: what happened to one rank."""

    rank: int
    worker: str
    host: str
    text: str
    raised: bool
    started: bool


@dataclass
class Gang:
    """Gang, from the wish for workers to the end of its last call."""

    size: int
    client: str
    keys: Sequence[Key]
    workers: list[WorkerState] = field(default_factory=list)
    hosts: dict[int, str] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)
    port: int = 0
    failures: list[Failure] = field(default_factory=list)
    started: bool = False
    over: bool = False
    decided: asyncio.Event = field(default_factory=asyncio.Event)

    def fail(self, rank: int, text: str, *, raised: bool) -> None:
        """Note that a rank failed; once for each."""
        if rank not in (failure.rank for failure in self.failures):
            worker, started = self.workers[rank], self.started
            host = self.hosts.get(rank, worker.host)
            self.failures.append(Failure(rank, str(worker.name), host, text, raised, started))

    def calling(self) -> list[int]:
        """Return the ranks whose call has begun, and not ended."""
        return [rank for rank in range(self.size) if self.started and rank not in self.left]


class Gangs(SchedulerPlugin):
    """All gangs of one scheduler, in the order in which they came."""

    name = NAME

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._gangs: dict[str, Gang] = {}
        self._ending: set[asyncio.Task[Any]] = set()
        self._lost_at = -RETURN_S
        self._changed = asyncio.Event()
        scheduler.handlers |= {
            "gang_reserve": self.reserve,
            "gang_arrive": self.arrive,
            "gang_failure": self.failure,
            "gang_end": self.end,
        }
        scheduler.stream_handlers["gang-left"] = self.left

    def wanted(self) -> int:
        """Return how many workers the gangs need that run or wait."""
        return sum(gang.size for gang in self._gangs.values())

    def describe(self) -> list[dict[str, Any]]:
        """Return each gang's workers by rank, and which ranks have come, or call."""
        return [
            {
                "size": gang.size,
                "workers": [str(ws.name) for ws in gang.workers],
                "arrived": sorted(gang.hosts),
                "started": gang.started,
                "calling": gang.calling(),
            }
            for gang in self._gangs.values()
        ]

    # Requests of clients

    async def reserve(
        self, gang: str, client: str, size: int, keys: Sequence[Key], held: Sequence[Any]
    ) -> list[str] | int:
        """Wait until workers are there for a gang, and return the addresses by rank.

        If there are too few workers, and none that was just lost may return, return how many there
        are. `keys` are those of the gang's Dask tasks, `held` those of the data of each rank.
        """
        mine = self._gangs[gang] = Gang(size, client, keys)
        try:
            while not (workers := self._choose(gang, mine, held)):
                if size > (most := self._most()) and monotonic() > self._lost_at + RETURN_S:
                    del self._gangs[gang]
                    return int(most)
                await self._change()
                if mine.over:
                    return []
        except BaseException:
            self._gangs.pop(gang, None)
            self._tell()
            raise
        mine.workers = workers
        self._tell()
        return [ws.address for ws in workers]

    async def failure(self, gang: str) -> dict[str, Any] | None:
        """Wait until a gang fails, and return what happened first; None if it is over before."""
        mine = self._gangs.get(gang)
        settled: float | None = None
        while mine is not None and not mine.over:
            if mine.failures:
                settled = settled or monotonic() + SETTLE_S
                failure = min(mine.failures, key=_is_consequence)
                if not _is_consequence(failure) or monotonic() >= settled:
                    return vars(failure)
            await self._change(LOOK_S if settled is None else settled - monotonic())
        return None

    async def end(self, gang: str, grace_s: float) -> dict[str, Any]:
        """End a gang's calls, and restart the workers on which they do not end.

        Returns what it was doing: whether it had `started`, its `calling` ranks, and the names of
        the workers that are restarted, by rank, as `stuck`.
        """
        mine = self._gangs.get(gang)
        if mine is None:
            return {"started": False, "calling": [], "stuck": {}}
        state = {"started": mine.started, "calling": mine.calling()}
        mine.over = True
        mine.decided.set()
        self._tell()
        deadline = monotonic() + grace_s
        while (stuck := self._stuck(mine)) and (left_s := deadline - monotonic()) > 0:
            await self._change(left_s)
        try:
            if stuck:
                await self._scheduler.restart_workers(
                    [ws.address for ws in stuck.values()],
                    timeout=NANNY_S,
                    wait_for_workers=False,
                    on_error="return",
                    stimulus_id=f"hpcdask-gang-{time()}",
                )
        finally:
            self._gangs.pop(gang, None)
            self._tell()
        return {**state, "stuck": {rank: str(ws.name) for rank, ws in stuck.items()}}

    def _tell(self) -> None:
        """Wake all that wait for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _change(self, seconds: float = LOOK_S) -> None:
        """Wait until anything of gangs or workers changes, or for so many seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    # Messages of ranks

    async def arrive(self, gang: str, rank: int, host: str, port: int) -> dict[str, Any]:
        """Wait for the other ranks, and return where all meet; nothing if the gang is over."""
        if self._is_over(gang):
            return {}
        mine = self._gangs[gang]
        mine.hosts[rank] = host
        mine.port = port or mine.port
        if len(mine.hosts) == mine.size and not mine.failures:
            mine.started = True
            mine.decided.set()
        await mine.decided.wait()
        if self._is_over(gang):
            return {}
        hosts = [ws.host for ws in mine.workers]
        return {
            "rank": rank,
            "world_size": mine.size,
            "local_rank": hosts[:rank].count(hosts[rank]),
            "local_world_size": hosts.count(hosts[rank]),
            "master_addr": hosts[0],
            "master_port": mine.port,
        }

    def _is_over(self, gang: str) -> bool:
        return gang not in self._gangs or self._gangs[gang].over

    def left(self, gang: str, rank: int, worker: str) -> None:
        """Note that a rank's call has ended."""
        if gang in self._gangs:
            self._gangs[gang].left.add(rank)
            self._tell()

    # Events of the scheduler

    def transition(self, key: Key, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        """See `SchedulerPlugin.transition`."""
        if finish != "erred":
            return
        for gang in self._gangs.values():
            if key in gang.keys and gang.workers:
                # a failed argument has no text of its own
                text = self._scheduler.tasks[key].exception_text or ""
                gang.fail(gang.keys.index(key), text, raised=True)
                self._tell()

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """See `SchedulerPlugin.add_worker`: a gang may have waited for it."""
        self._tell()

    def remove_worker(
        self, scheduler: Scheduler, worker: str, *, stimulus_id: str, **kwargs: Any
    ) -> None:
        """See `SchedulerPlugin.remove_worker`: the end of a rank whose result is not elsewhere."""
        self._lost_at = monotonic()
        for gang in self._gangs.values():
            for rank, ws in enumerate(gang.workers):
                ts = scheduler.tasks.get(gang.keys[rank])
                if ws.address == worker and (ts is None or ts.state != "memory"):
                    gang.fail(rank, _why_gone(stimulus_id), raised=False)
        self._tell()

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """See `SchedulerPlugin.remove_client`: its gangs end with it."""
        for name, gang in self._gangs.items():
            if gang.client == client and not gang.over:
                task = asyncio.create_task(self.end(name, GRACE_S))
                self._ending.add(task)
                task.add_done_callback(self._ending.discard)

    # Workers

    def _choose(self, name: str, gang: Gang, held: Sequence[Any]) -> list[WorkerState]:
        """Return the workers of a gang by rank; none if there are not enough, or others come first.

        A rank goes where its data are. The others get the least busy workers, by host and name.
        """
        running = self._scheduler.running
        for other_name, other in self._gangs.items():
            if other_name == name:
                break
            if not other.workers and not other.over and other.size <= len(running):
                return []
        taken = {ws.address for one in self._gangs.values() for ws in one.workers}
        free = {ws for ws in running if ws.address not in taken}
        if len(free) < gang.size:
            return []
        holders = {rank: self._holders(keys) & free for rank, keys in enumerate(held)}
        placed: dict[int, WorkerState] = {}
        for rank in sorted(holders, key=lambda rank: len(holders[rank])):  # least choice first
            if near := holders[rank] & free:
                placed[rank] = min(near, key=_of)
                free.remove(placed[rank])
        rest = sorted(free, key=lambda ws: (max(0, len(ws.processing) + 1 - ws.nthreads), _of(ws)))
        others = iter(sorted(rest[: gang.size - len(placed)], key=_of))
        return [placed.get(rank) or next(others) for rank in range(gang.size)]

    def _holders(self, keys: Collection[Key]) -> set[WorkerState]:
        """Return the workers that have any of these data."""
        found = (self._scheduler.tasks.get(key) for key in keys)
        return {ws for ts in found if ts is not None for ws in ts.who_has or ()}

    def _most(self) -> float:
        """Return how many workers there are, or may come to be."""
        told: Callable[[], float] = self._scheduler.extensions.get(MOST_WORKERS, lambda: 0)
        return max(len(self._scheduler.workers), told())

    def _stuck(self, gang: Gang) -> dict[int, WorkerState]:
        """Return the workers that are there, by rank, whose call has not ended."""
        there = self._scheduler.workers
        found = {rank: gang.workers[rank] for rank in gang.calling()}
        return {rank: ws for rank, ws in found.items() if ws.address in there}


def install(dask_scheduler: Scheduler) -> None:
    """Add gangs to a scheduler."""
    if NAME not in dask_scheduler.plugins:
        dask_scheduler.add_plugin(Gangs(dask_scheduler))


def workers_wanted(scheduler: Scheduler) -> int:
    """Return how many workers the gangs of a scheduler need."""
    plugin = scheduler.plugins.get(NAME)
    return plugin.wanted() if isinstance(plugin, Gangs) else 0


def describe(scheduler: Scheduler) -> list[dict[str, Any]]:
    """Return the progress of each gang of a scheduler."""
    plugin = scheduler.plugins.get(NAME)
    return plugin.describe() if isinstance(plugin, Gangs) else []


def _of(ws: WorkerState) -> list[Any]:
    """Return the key to sort workers by host, then name, with numbers in them as numbers."""
    return [natural(ws.host), natural(str(ws.name))]


def _is_consequence(failure: Failure) -> bool:
    return failure.raised and bool(_CONSEQUENCE.search(failure.text))


def _why_gone(stimulus_id: str) -> str:
    """Return why a worker is removed, from what distributed and `clusters.retire` call it."""
    taken = _TAKEN_AWAY.search(stimulus_id)
    if taken is None:
        return "its worker died: it was killed, or ran out of memory, or its node was lost"
    if taken[1]:
        return "its worker's job reached its walltime. Request a longer one, or save in between"
    return "its worker was taken away, as the cluster was scaled down or its job came to its end"
