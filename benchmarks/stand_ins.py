"""Stand-ins for ranks and for workers, hundreds in one process, for `scale.py`.

They speak the real protocols: a rank finds rank 0 by its note, dials the link and reports;
a worker registers with distributed's scheduler as a worker and its nanny do, over connections of
its own, and sends heartbeats. What they lack is a process, a device and Dask tasks.

`python benchmarks/stand_ins.py DESCRIPTOR` takes orders, lines of JSON, from a socket, and answers
each when all of its stand-ins have done it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any

from distributed import Security
from distributed.batched import BatchedSend
from distributed.comm import Comm, connect
from distributed.core import send_recv
from distributed.system_monitor import SystemMonitor
from distributed.versions import get_versions

from hpcdask.bootstrap.orders import read
from hpcdask.bootstrap.ranks import Rank
from hpcdask.bootstrap.stream import MessageStream
from hpcdask.comm.peers import TOPIC
from hpcdask.node.placement import Inventory
from hpcdask.process import raise_descriptor_limit
from hpcdask.runner.link import (
    EndRun,
    RankReport,
    Rendezvous,
    RendezvousInfo,
    StartWorkers,
    find_leader,
)
from hpcdask.security.credentials import to_security

#: Ranks, cores and bytes of memory of a node that is not there.
PER_NODE, CORES, MEMORY = 4, 64, 2**38
DIAL_TIMEOUT_S = 900.0
#: How many of a process dial or register at a time.
AT_ONCE = 8


def stand_in_rank(index: int, size: int, launch_id: str) -> Rank:
    """A rank on a node of `PER_NODE`."""
    node, place = divmod(index, PER_NODE)
    return Rank(index, size, place, PER_NODE, f"stand-in-{node}", "srun", launch_id)


class StandInWorker:
    """What a scheduler sees of a worker and its nanny."""

    def __init__(self, name: str, number: int, scheduler: str, security: Security) -> None:
        self.name, self.scheduler = name, scheduler
        scheme = scheduler.partition("://")[0]
        high, low = divmod(number, 250)
        self.address = f"{scheme}://10.77.{high}.{low + 1}:40000"
        self.nanny = f"{scheme}://10.77.{high}.{low + 1}:40001"
        self.beats = 0
        self.late_s = 0.0
        self._arguments = security.get_connection_args("worker")
        self._stream: Comm | None = None
        self._calls: Comm | None = None
        self._batched = BatchedSend(interval="2ms")
        self._reader: asyncio.Task[None] | None = None
        self._interval_s = 0.5

    async def join(self) -> None:
        """Register the nanny, then the worker, and tell that it is warm."""
        nanny = await self._connect()
        await nanny.write({"op": "register_nanny", "address": self.nanny})
        await nanny.read()
        self._stream = await self._connect()
        await self._stream.write(
            {
                "op": "register-worker",
                "reply": False,
                "address": self.address,
                "status": "running",
                "nthreads": 1,
                "name": self.name,
                "now": time.time(),
                "resources": {},
                "memory_limit": MEMORY // PER_NODE,
                "local_directory": "/tmp/stand-in",
                "services": {},
                "nanny": self.nanny,
                "pid": 1,
                "versions": get_versions(),
                "metrics": metrics(),
                "extra": {},
                "stimulus_id": f"worker-connect-{time.time()}",
                "server_id": f"Worker-{self.name}",
            },
            serializers=["msgpack"],
        )
        answer = await self._stream.read(deserializers=["msgpack"])
        if answer["status"] != "OK":
            raise RuntimeError(f"{self.name} was not registered: {answer}")
        self._interval_s = answer["heartbeat-interval"]
        self._batched.start(self._stream)
        self._reader = asyncio.create_task(self._listen())
        await nanny.write({"status": "ok"})
        await nanny.close()
        self._calls = await self._connect()
        await self.beat()
        found = {"worker": self.address, "name": self.name, "seconds": 0.0, "links": []}
        self._batched.send({"op": "log-event", "topic": TOPIC, "msg": found})

    async def _connect(self) -> Comm:
        # a scheduler that is busy with hundreds of handshakes may take longer than usual
        return await connect(self.scheduler, timeout=DIAL_TIMEOUT_S, **self._arguments)

    async def _listen(self) -> None:
        assert self._stream is not None
        with contextlib.suppress(OSError):
            while True:
                await self._stream.read()

    async def beat(self) -> None:
        """One heartbeat."""
        assert self._calls is not None
        start = time.time()
        answer: Any = await send_recv(
            self._calls,
            op="heartbeat_worker",
            address=self.address,
            now=start,
            metrics=metrics(),
            executing={},
            extensions={},
        )
        if answer["status"] != "OK":
            raise RuntimeError(f"the scheduler does not know {self.name}: {answer}")
        self._interval_s = answer["heartbeat-interval"]
        self.beats += 1
        self.late_s = max(self.late_s, time.time() - start)

    async def beat_for(self, seconds: float) -> None:
        """Heartbeats as often as the scheduler wants them; they begin one after another."""
        end = time.monotonic() + seconds
        pause = self._interval_s * (hash(self.name) % 1000) / 1000
        while time.monotonic() + pause < end:
            await asyncio.sleep(pause)
            await self.beat()
            pause = self._interval_s
        await asyncio.sleep(max(0.0, end - time.monotonic()))

    async def leave(self) -> None:
        """Close as a worker does."""
        with contextlib.suppress(OSError):
            self._batched.send({"op": "close-stream"})
            await self._batched.close()
            if self._calls is not None:
                await self._calls.close()
        if self._reader is not None:
            self._reader.cancel()


_monitor = SystemMonitor()
_monitor.update()


def metrics() -> dict[str, Any]:
    """What an idle worker tells with each heartbeat."""
    counts = ("incoming_bytes", "incoming_count", "incoming_count_total")
    sent = ("outgoing_bytes", "outgoing_count", "outgoing_count_total")
    nested: dict[str, Any] = {}
    for key, value in _monitor.recent().items():
        group, _, name = key.rpartition(".")
        (nested.setdefault(group, {}) if group else nested)[name] = value
    return {
        "task_counts": {},
        "bandwidth": {"total": 1e8, "workers": {}, "types": {}},
        "digests_total_since_heartbeat": {"latency": 0.001, "tick-duration": 0.5},
        "managed_bytes": 0,
        "spilled_bytes": {"memory": 0, "disk": 0},
        "transfer": dict.fromkeys((*counts, *sent), 0),
        "event_loop_interval": 0.02,
        **nested,
    }


class StandInRank:
    """A rank other than 0, with at most one worker."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.worker: StandInWorker | None = None
        self._channel: MessageStream | None = None
        self._info: RendezvousInfo | None = None

    async def dial(self) -> None:
        """Find rank 0 and open the line to it."""
        rendezvous = Rendezvous(self.rank.launch_id, shared=True)
        found = await find_leader(self.rank, rendezvous, DIAL_TIMEOUT_S)
        self._info, self._channel, _, _ = found

    async def report(self) -> None:
        """Say what it sees."""
        rank, cores = self.rank, tuple(range(CORES))
        seen = Inventory(rank.index, rank.host, rank.local_index, (), cores, MEMORY)
        self._line.send(RankReport(rank.index, rank.host, 2**22 + rank.index, "", seen))

    async def order(self) -> None:
        """Wait for the order to start the worker."""
        order = read(await self._line.receive() or EndRun(1, 0.0).to_json())
        if not isinstance(order, StartWorkers):
            raise TypeError(f"rank {self.rank.index} was told {order}")
        assert self._info is not None
        (placement,) = order.placements
        security = to_security(self._info.credentials)
        self.worker = StandInWorker(placement.name, self.rank.index, order.scheduler, security)

    async def end(self) -> None:
        """Wait for the end of the run, and leave."""
        while (order := await self._line.receive()) is not None:
            if isinstance(read(order), EndRun):
                break
        if self.worker is not None:
            await self.worker.leave()
        self._line.close()

    @property
    def _line(self) -> MessageStream:
        assert self._channel is not None
        return self._channel


async def at_once(work: Iterable[Coroutine[Any, Any, None]], most: int) -> None:
    """Do this, so many at a time."""
    room = asyncio.Semaphore(most)

    async def one(part: Coroutine[Any, Any, None]) -> None:
        async with room:
            await part

    await asyncio.gather(*(one(part) for part in work))


class Company:
    """All stand-ins of this process, and what they can be told."""

    def __init__(self) -> None:
        self.ranks: list[StandInRank] = []
        self.workers: list[StandInWorker] = []

    async def ranks_dial(self, first: int, last: int, size: int, launch_id: str, most: int) -> None:
        """Ranks from `first` up to `last` dial rank 0."""
        numbers = range(first, last)
        self.ranks = [StandInRank(stand_in_rank(one, size, launch_id)) for one in numbers]
        await at_once((rank.dial() for rank in self.ranks), most)

    async def ranks_report(self) -> None:
        """Each says what it sees."""
        await asyncio.gather(*(rank.report() for rank in self.ranks))

    async def ranks_order(self) -> str:
        """Each is told to start its worker; where the scheduler is."""
        await asyncio.gather(*(rank.order() for rank in self.ranks))
        self.workers = [rank.worker for rank in self.ranks if rank.worker is not None]
        return self.workers[0].scheduler

    def workers_are(
        self, names: Sequence[str], first: int, scheduler: str, credentials: Mapping[str, str]
    ) -> None:
        """Workers of jobs, without ranks."""
        security = to_security(credentials)
        numbered = enumerate(names, first)
        self.workers = [StandInWorker(name, one, scheduler, security) for one, name in numbered]

    async def workers_join(self, most: int) -> None:
        """All workers register."""
        await at_once((worker.join() for worker in self.workers), most)

    async def workers_beat(self, seconds: float) -> dict[str, float]:
        """All send heartbeats for a while; how many, and the longest that one took."""
        before = sum(worker.beats for worker in self.workers)
        await asyncio.gather(*(worker.beat_for(seconds) for worker in self.workers))
        beats = sum(worker.beats for worker in self.workers) - before
        return {"beats": beats, "longest_s": max(worker.late_s for worker in self.workers)}

    async def ranks_end(self) -> None:
        """All wait for the end of the run."""
        await asyncio.gather(*(rank.end() for rank in self.ranks))


async def obey(sock: socket.socket) -> None:
    """Do what the socket says until it closes."""
    company, channel = Company(), await MessageStream.over(sock)
    while (order := await channel.receive()) is not None:
        method: Callable[..., Any] = getattr(company, order.pop("do"))
        try:
            result = method(**order)
            channel.send(done=await result if asyncio.iscoroutine(result) else result)
        except Exception as error:
            channel.send(error=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    raise_descriptor_limit()
    asyncio.run(obey(socket.socket(fileno=int(sys.argv[1]))))
