"""Stand-ins for ranks and workers, a thousand in one process, for `scale.py`.

They speak the real protocols: a rank finds rank 0 by its note, connects to it and reports; a worker
registers with distributed's scheduler as a worker and its nanny do, over connections of its own,
and sends heartbeats. What they lack is a process, a device and Dask tasks.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable, Coroutine, Iterable
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
from hpcdask.runner.link import EndRun, RankReport, StartWorkers, find_leader
from hpcdask.security.credentials import to_security

#: Ranks, cores and bytes of memory of a node that is not there.
PER_NODE, CORES, MEMORY = 4, 64, 2**38
#: Seconds for any step.
PATIENCE_S = 900.0
#: How many connect or register at a time.
AT_ONCE = 32

versions = functools.cache(get_versions)


async def together(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Await coroutines, `AT_ONCE` at a time."""
    room = asyncio.Semaphore(AT_ONCE)

    async def enter(part: Coroutine[Any, Any, None]) -> None:
        async with room:
            await part

    await asyncio.gather(*map(enter, work))


async def until(condition: Callable[[], Any]) -> Any:
    """Wait for a condition to be true, and return its value."""
    async with asyncio.timeout(PATIENCE_S):
        while not (found := condition()):  # noqa: ASYNC110 other processes have no events
            await asyncio.sleep(0.05)
    return found


def stand_in_rank(index: int, size: int, launch_id: str) -> Rank:
    """Return a rank on a node of `PER_NODE`."""
    node, place = divmod(index, PER_NODE)
    return Rank(index, size, place, PER_NODE, f"stand-in-{node}", "srun", launch_id)


@functools.cache
def metrics() -> dict[str, Any]:
    """Return what an idle worker tells with each heartbeat."""
    monitor = SystemMonitor()
    monitor.update()
    directions = ("incoming", "outgoing")
    counts = [f"{way}_{what}" for way in directions for what in ("bytes", "count", "count_total")]
    nested: dict[str, Any] = {}
    for key, value in monitor.recent().items():
        group, _, name = key.rpartition(".")
        (nested.setdefault(group, {}) if group else nested)[name] = value
    return {
        "task_counts": {},
        "bandwidth": {"total": 1e8, "workers": {}, "types": {}},
        "digests_total_since_heartbeat": {"latency": 0.001, "tick-duration": 0.5},
        "managed_bytes": 0,
        "spilled_bytes": {"memory": 0, "disk": 0},
        "transfer": dict.fromkeys(counts, 0),
        "event_loop_interval": 0.02,
        **nested,
    }


class StandInWorker:
    """What a scheduler sees of a worker and its nanny."""

    def __init__(self, name: str, number: int, scheduler: str, security: Security) -> None:
        self.name, self.scheduler, self.beats = name, scheduler, 0
        host = "{}://10.77.{}.{}".format(scheduler.partition("://")[0], *divmod(number, 250))
        self.address, self.nanny = f"{host}:40000", f"{host}:40001"
        self._arguments = security.get_connection_args("worker")
        self._interval_s = 0.5

    async def join(self) -> None:
        """Register the nanny, then the worker, and tell that it is warm."""
        nanny = await self._connect()
        await nanny.write({"op": "register_nanny", "address": self.nanny})
        await nanny.read()
        stream = await self._connect()
        await stream.write(
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
                "versions": versions(),
                "metrics": metrics(),
                "extra": {},
                "stimulus_id": f"worker-connect-{time.time()}",
                "server_id": f"Worker-{self.name}",
            },
            serializers=["msgpack"],
        )
        answer = await stream.read(deserializers=["msgpack"])
        if answer["status"] != "OK":
            raise RuntimeError(f"{self.name} was not registered: {answer}")
        self._batched = BatchedSend(interval="2ms")
        self._batched.start(stream)
        self._reader = asyncio.create_task(self._listen(stream))
        await nanny.write({"status": "ok"})
        await nanny.close()
        self._calls = await self._connect()
        await self.beat()
        found = {"worker": self.address, "name": self.name, "seconds": 0.0, "links": []}
        self._batched.send({"op": "log-event", "topic": TOPIC, "msg": found})

    async def _connect(self) -> Comm:
        # a scheduler that is busy with hundreds of handshakes may take longer than usual
        return await connect(self.scheduler, timeout=PATIENCE_S, **self._arguments)

    async def _listen(self, stream: Comm) -> None:
        with contextlib.suppress(OSError):
            while True:
                await stream.read()

    async def beat(self) -> None:
        """Send a heartbeat."""
        told = {"address": self.address, "now": time.time(), "metrics": metrics()}
        more: dict[str, Any] = {"executing": {}, "extensions": {}}
        answer: Any = await send_recv(self._calls, op="heartbeat_worker", **told, **more)
        if answer["status"] != "OK":
            raise RuntimeError(f"the scheduler does not know {self.name}: {answer}")
        self._interval_s = answer["heartbeat-interval"]
        self.beats += 1

    async def beat_for(self, seconds: float) -> None:
        """Send heartbeats as often as the scheduler wants them; they begin one after another."""
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
            await self._calls.close()
        self._reader.cancel()


class StandInRank:
    """A rank other than 0, with a worker."""

    worker: StandInWorker
    _stream: MessageStream

    def __init__(self, rank: Rank) -> None:
        self.rank = rank

    async def connect(self) -> None:
        """Find rank 0 and connect to it."""
        self._info, self._stream, *_ = await find_leader(self.rank, PATIENCE_S)

    async def report(self) -> None:
        """Report, and wait for the order to start the worker."""
        rank, cores = self.rank, tuple(range(CORES))
        seen = Inventory(rank.index, rank.host, rank.local_index, (), cores, MEMORY)
        self._stream.send(RankReport(rank.index, rank.host, 2**22 + rank.index, "", seen))
        order = read(await self._stream.receive() or EndRun(0.0).to_json())
        if not isinstance(order, StartWorkers):
            raise TypeError(f"rank {rank.index} was told {order}")
        (placement,) = order.placements
        security = to_security(self._info.credentials)
        self.worker = StandInWorker(placement.name, rank.index, order.scheduler, security)

    async def end(self) -> None:
        """Wait for the end of the run, and leave."""
        async for order in self._stream:
            if isinstance(order, EndRun):
                break
        await self.worker.leave()
        self._stream.close()
