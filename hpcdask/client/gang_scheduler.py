"""The scheduler's side of gangs: who gets which workers, when all start, and who failed first.

A gang's ranks are plain Dask tasks, each restricted to one worker. Gangs never share a worker, so
two of them cannot wait for each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dask.typing import Key
from distributed import Scheduler, rpc
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
#: Seconds for which a worker that ended with a gang is expected back.
RETURN_S = 60.0
#: Seconds that calls get to end when nobody is left to say how many.
GRACE_S = 5.0
#: Of these seconds a nanny gives a worker 80 % to close before it kills it; for its answer.
KILL_S, NANNY_S = 1.0, 30.0
#: How an exception reads that is the consequence of another rank's end.
_CONSEQUENCE = re.compile(
    r"connect|broken ?pipe|\bpeer\b|\beof|remote process|nccl|socket|incomplete ?read", re.I
)
_TAKEN_AWAY = re.compile(r"hpcdask-(force-out-walltime)|hpcdask-force-out|retire")


@dataclass
class Failure:
    """Why a gang ends: what happened to one rank."""

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
        """The ranks whose call has begun, and not ended."""
        return [rank for rank in range(self.size) if self.started and rank not in self.left]


class Gangs(SchedulerPlugin):
    """All gangs of one scheduler, in the order in which they came."""

    name = NAME

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._gangs: dict[str, Gang] = {}
        self._ranks: dict[Key, tuple[Gang, int]] = {}
        self._returning: dict[str, float] = {}
        self._ending: set[asyncio.Task[Any]] = set()
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

    # What clients ask

    async def reserve(
        self, gang: str, client: str, size: int, keys: Sequence[Key], held: Sequence[Any]
    ) -> list[str] | float:
        """Wait until workers are there for a gang, and return the addresses by rank.

        If there will never be enough workers, return how many there are. `keys` are those of the
        gang's Dask tasks, `held` those of the data of each rank.
        """
        if size > (most := self._most()):
            return most
        mine = self._gangs[gang] = Gang(size, client)
        try:
            while not (workers := self._choose(gang, mine, held)):
                await self._change()
                if mine.over:
                    return []
        except BaseException:
            self._gangs.pop(gang, None)
            self._tell()
            raise
        mine.workers = workers
        self._tell()
        self._ranks.update({key: (mine, rank) for rank, key in enumerate(keys)})
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
        while (stuck := self._there(mine)) and (left_s := deadline - monotonic()) > 0:
            await self._change(left_s)
        try:
            if stuck:
                await self._restart([mine.workers[rank] for rank in stuck])
        finally:
            self._gangs.pop(gang, None)
            self._ranks = {key: one for key, one in self._ranks.items() if one[0] is not mine}
            self._tell()
        return {**state, "stuck": {rank: str(mine.workers[rank].name) for rank in stuck}}

    async def _restart(self, workers: Collection[WorkerState]) -> None:
        """Tell nannies to kill workers that had their grace, and to start them again.

        The scheduler's own way gives each of them 4 s to close.
        """
        for ws in workers:
            self._expect(ws)
        await asyncio.gather(*map(self._kill, workers))

    async def _kill(self, ws: WorkerState) -> None:
        reason, access = f"hpcdask-gang-{time()}", self._scheduler.connection_args
        if ws.nanny is None:
            await self._scheduler.remove_worker(ws.address, stimulus_id=reason)
            return
        try:
            async with asyncio.timeout(NANNY_S), rpc(ws.nanny, connection_args=access) as nanny:
                # a TimeoutError of the nanny's: it was killed, and takes longer to be gone
                with contextlib.suppress(TimeoutError):
                    await nanny.kill(timeout=KILL_S, reason=reason)
        except (OSError, TimeoutError):
            await self._scheduler.remove_worker(ws.address, stimulus_id=reason)

    def _tell(self) -> None:
        """Wake all that wait for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _change(self, seconds: float = LOOK_S) -> None:
        """Wait until anything of gangs or workers changes, or for so many seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    # What ranks tell

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
        """A rank's call has ended."""
        if gang in self._gangs:
            self._gangs[gang].left.add(rank)
            self._tell()

    # What the scheduler tells

    def transition(self, key: Key, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        """See `SchedulerPlugin.transition`."""
        if finish == "erred" and key in self._ranks:
            gang, rank = self._ranks[key]
            # a failed argument has no text of its own
            gang.fail(rank, self._scheduler.tasks[key].exception_text or "", raised=True)
            self._tell()

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """See `SchedulerPlugin.add_worker`: a gang may have waited for it."""
        self._tell()

    def remove_worker(
        self, scheduler: Scheduler, worker: str, *, stimulus_id: str, **kwargs: Any
    ) -> None:
        """See `SchedulerPlugin.remove_worker`: the end of a rank whose result is not elsewhere."""
        for key, (gang, rank) in self._ranks.items():
            ws = gang.workers[rank]
            ts = scheduler.tasks.get(key)
            if ws.address != worker or (ts is not None and ts.state == "memory"):
                continue
            gang.fail(rank, _why_gone(stimulus_id), raised=False)
            if not _TAKEN_AWAY.search(stimulus_id):
                self._expect(ws)
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
        """The workers of a gang by rank; none if there are not enough, or others come first.

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
        placed = _nearest([self._nbytes(keys, free) for keys in held])
        free -= placed.keys()
        rest = sorted(free, key=lambda ws: (max(0, len(ws.processing) + 1 - ws.nthreads), _of(ws)))
        others = iter(sorted(rest[: gang.size - len(placed)], key=_of))
        by_rank = {rank: ws for ws, rank in placed.items()}
        return [by_rank[rank] if rank in by_rank else next(others) for rank in range(gang.size)]

    def _nbytes(
        self, keys: Collection[Key], free: Collection[WorkerState]
    ) -> dict[WorkerState, int]:
        """Return how much of the data these workers have, who has most first."""
        nbytes: dict[WorkerState, int] = {}
        for key in keys:
            ts = self._scheduler.tasks.get(key)
            for ws in (ts and ts.who_has) or ():
                if ws in free and ts is not None:
                    nbytes[ws] = nbytes.get(ws, 0) + ts.get_nbytes()
        return dict(sorted(nbytes.items(), key=lambda one: (-one[1], _of(one[0]))))

    def _most(self) -> float:
        """Return how many workers there are, or will be without further ado."""
        there = {str(ws.name) for ws in self._scheduler.workers.values()}
        self._returning = {
            name: until
            for name, until in self._returning.items()
            if until > monotonic() and name not in there
        }
        told: Callable[[], float] = self._scheduler.extensions.get(MOST_WORKERS, lambda: 0)
        return max(len(there) + len(self._returning), told())

    def _there(self, gang: Gang) -> list[int]:
        """The ranks whose call runs on, on a worker that is still there."""
        workers = self._scheduler.workers
        return [rank for rank in gang.calling() if gang.workers[rank].address in workers]

    def _expect(self, ws: WorkerState) -> None:
        """A worker will be back by its nanny."""
        if ws.nanny:
            self._returning[str(ws.name)] = monotonic() + RETURN_S


def install(dask_scheduler: Scheduler) -> None:
    """Add gangs to a scheduler."""
    if NAME not in dask_scheduler.plugins:
        dask_scheduler.add_plugin(Gangs(dask_scheduler))


def workers_wanted(scheduler: Scheduler) -> int:
    """Return how many workers the gangs of a scheduler need."""
    plugin = scheduler.plugins.get(NAME)
    return plugin.wanted() if isinstance(plugin, Gangs) else 0


def _nearest(sizes: Sequence[Mapping[WorkerState, int]]) -> dict[WorkerState, int]:
    """Return the rank of each worker that has data of ranks.

    Ranks with most data choose first, and of those the ones whose data are on fewest workers.
    """

    def order(rank: int) -> tuple[int, int]:
        return -max(sizes[rank].values(), default=0), len(sizes[rank])

    placed: dict[WorkerState, int] = {}
    for rank in sorted(range(len(sizes)), key=order):
        left = [ws for ws in sizes[rank] if ws not in placed]
        placed.update((ws, rank) for ws in left[:1])
    return placed


def _of(ws: WorkerState) -> list[Any]:
    """Sort workers by host, then name, with numbers in them as numbers."""
    return [natural(ws.host), natural(str(ws.name))]


def _is_consequence(failure: Failure) -> bool:
    return failure.raised and bool(_CONSEQUENCE.search(failure.text))


def _why_gone(stimulus_id: str) -> str:
    """Why a worker is removed, from what distributed and `clusters.retire` call it."""
    taken = _TAKEN_AWAY.search(stimulus_id)
    if taken is None:
        return "its worker died: it was killed, or ran out of memory, or its node was lost"
    if taken[1]:
        return "its worker's job reached its walltime. Request a longer one, or save in between"
    return "its worker was taken away, as the cluster was scaled down or its job came to its end"


def describe(scheduler: Scheduler) -> list[dict[str, Any]]:
    """Return the progress of each gang of a scheduler."""
    plugin = scheduler.plugins.get(NAME)
    return plugin.describe() if isinstance(plugin, Gangs) else []
