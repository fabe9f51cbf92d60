"""The doctor under a launcher: the ranks meet, and rank 0 hears what each has gathered."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from hpcdask.bootstrap.orders import MessageStream
from hpcdask.bootstrap.ranks import Rank
from hpcdask.comm import fabric
from hpcdask.errors import HpcdaskError
from hpcdask.logs import complain
from hpcdask.runner import mpi
from hpcdask.runner.link import find_leader, publish
from hpcdask.runner.rendezvous import Rendezvous, RendezvousInfo
from hpcdask.security.credentials import create_credentials
from hpcdask.security.ports import current

from . import nccl, ports, stack
from .collect import DEADLINE_S, Gathering
from .findings import Facts
from .launch import Launch, Route

Show = Callable[[Launch], int]
#: Seconds that the other ranks get to leave before rank 0 does.
LEAVE_DEADLINE_S = 3.0
#: Beside the deadline of what a rank does, the time that its answer may take.
SPARE_S = 5.0
#: The clock of each rank is read this often; the quickest answer counts.
CLOCK_READINGS = 3


def take_part(
    rank: Rank | None, gathering: Gathering, timeout: float, show: Show, *, with_nccl: bool
) -> int:
    """Meet the other ranks, and lead or follow; return this rank's exit code.

    All have to arrive within `timeout` seconds. `show` prints the report of rank 0 and returns the
    exit code. They try NCCL `with_nccl` only.
    """
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # through `finally`
    try:
        rank = mpi.find_rank(rank, timeout)
        meeting = Rendezvous.of(rank)
        if rank.index:
            return asyncio.run(_follow(rank, gathering, meeting, timeout))
        try:
            leader = _Leader(Launch(rank, timeout), with_nccl)
            return asyncio.run(leader.lead(gathering, meeting, show))
        finally:
            meeting.close()
    except HpcdaskError as error:
        if rank is None or rank.index == 0:
            raise
        complain(error)
        return 0  # mpirun would kill rank 0 before it has reported


class _Leader:
    """Rank 0."""

    def __init__(self, launch: Launch, with_nccl: bool) -> None:
        self.launch, self.with_nccl = launch, with_nccl
        self.channels: dict[int, MessageStream] = {}
        self.listeners: dict[str, Facts] = {}
        self.obeyed: dict[tuple[int, str], dict[str, Facts]] = {}
        self.changed = asyncio.Event()

    async def lead(self, gathering: Gathering, meeting: Rendezvous, show: Show) -> int:
        """Hear all ranks, print the report, let the others go."""
        from distributed.utils import get_ip

        launch, rank = self.launch, self.launch.rank
        launch.hosts[0] = rank.host
        own = asyncio.create_task(asyncio.to_thread(gathering.results))
        address = str(get_ip())  # where the scheduler would listen
        others = [one.address for one in fabric.interfaces() if one.address != address]
        credentials = create_credentials()
        server, port = await publish(rank, address, credentials, meeting, self._arrived, others)
        launch.address = f"{address}:{port}"
        everyone = set(range(rank.size))
        await self._until(lambda: set(launch.hosts) >= everyone, launch.timeout)
        server.close()
        meeting.close()
        launch.reports[0] = await own
        await self._until(lambda: all(map(self._has_reported, self.channels)), DEADLINE_S + SPARE_S)
        await self._prove_stacks()
        if current() is not None:
            await self._try_ports()
        if self.with_nccl:
            launch.nccl = await nccl.measure(nccl.members(launch), self._ask_nccl)
        code = show(launch)
        for channel in self.channels.values():
            channel.send(op="end", code=code)
        await self._until(lambda: not self.channels, LEAVE_DEADLINE_S)
        if set(launch.hosts) < everyone:
            mpi.abort_launch(rank, code)
        return code

    def _has_reported(self, rank: int) -> bool:
        readings = self.launch.clocks.get(rank, ())
        return rank in self.launch.reports and len(readings) == CLOCK_READINGS

    async def _arrived(self, hello: dict[str, Any], channel: MessageStream) -> None:
        rank, launch = int(hello["rank"]), self.launch
        launch.hosts[rank] = hello["host"]
        launch.routes[rank] = Route(hello["address"], hello["failed"])
        self.channels[rank] = channel
        self.changed.set()
        for _ in range(CLOCK_READINGS):
            channel.send(op="clock", sent=time.time())
        while (message := await channel.receive()) is not None:
            match message.get("op"):
                case "clock":
                    reading = time.time() - message["sent"], message["time"] - time.time()
                    launch.clocks.setdefault(rank, []).append(reading)
                case "facts":
                    launch.reports[rank] = message["facts"]
                case "stack":
                    launch.reports[rank]["stack"] = message["facts"]
                case "nccl":
                    self.obeyed[rank, message["id"]] = message["told"]
                case "listens":
                    self.listeners[launch.hosts[rank]] = message["facts"]
                case "reached":
                    launch.reached[launch.hosts[rank]] = message["failed"]
            self.changed.set()
        self.channels.pop(rank, None)
        channel.close()
        self.changed.set()

    async def _until(self, done: Callable[[], bool], seconds: float) -> None:
        """Wait for what the other ranks send, or the deadline."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not done():
                    self.changed.clear()
                    await self.changed.wait()

    async def _prove_stacks(self) -> None:
        """Prove in one rank of each node that the CUDA packages load, after all have read NVML."""
        reports = self.launch.reports
        chosen: dict[str, int] = {}
        for rank, facts in sorted(reports.items()):
            if facts.get("gpus", {}).get("gpus") and (rank == 0 or rank in self.channels):
                chosen.setdefault(self.launch.hosts[rank], rank)
        others = set(chosen.values()) - {0}
        for rank in others:
            self.channels[rank].send(op="stack")
        if 0 in chosen.values():
            reports[0]["stack"] = await stack.run()

        def silent() -> set[int]:
            return {rank for rank in others if "stack" not in reports[rank]}

        await self._until(lambda: not silent() & set(self.channels), stack.DEADLINE_S + SPARE_S)
        for rank in silent():
            reports[rank]["stack"] = stack.SILENCE

    async def _ask_nccl(self, rank: int, order: Facts) -> dict[str, Facts]:
        """Return what the processes of a rank's GPUs told; nothing where the rank has gone."""
        if rank == 0:
            return await nccl.obey(order)
        answer = rank, order["id"]
        if rank in self.channels:
            self.channels[rank].send(op="nccl", order=order)
        await self._until(
            lambda: answer in self.obeyed or rank not in self.channels,
            nccl.DEADLINE_S + SPARE_S,
        )
        return self.obeyed.get(answer, {})

    async def _try_ports(self) -> None:
        """Listen in one rank of each node, in the range of ports, and connect to the others'."""
        launch = self.launch
        chosen: dict[str, int] = {}
        for rank in (0, *sorted(self.channels)):
            chosen.setdefault(launch.hosts[rank], rank)
        if len(chosen) < 2:
            return
        home, *others = chosen
        own = ports.Listener(launch.address.rpartition(":")[0])
        self.listeners[home] = own.facts()
        for host in others:
            self.channels[chosen[host]].send(op="listen")
        await self._until(lambda: set(self.listeners) >= set(chosen), SPARE_S)
        for host in self.listeners.keys() - {home}:
            asked = ports.targets(host, self.listeners)
            self.channels[chosen[host]].send(op="reach", others=asked)
        launch.reached[home] = await ports.connect(ports.targets(home, self.listeners))
        await self._until(
            lambda: set(launch.reached) >= set(self.listeners), ports.DEADLINE_S + SPARE_S
        )
        for host, one in self.listeners.items():
            if one["error"]:
                launch.reached.setdefault(host, {})[host] = one["error"]
        own.close()


async def _follow(rank: Rank, gathering: Gathering, meeting: Rendezvous, timeout: float) -> int:
    """Report to rank 0 and do what it says. Returns its exit code."""
    from distributed.utils import get_ip

    info, channel, address, failed = await find_leader(rank, meeting, timeout, unreachable)
    channel.send(rank=rank.index, host=rank.host, address=address, failed=failed)

    async def report() -> None:
        channel.send(op="facts", facts=await asyncio.to_thread(gathering.results))

    async def prove() -> None:
        channel.send(op="stack", facts=await stack.run())

    async def reach(others: dict[str, Facts]) -> None:
        channel.send(op="reached", failed=await ports.connect(others))

    async def obey(order: Facts) -> None:
        channel.send(op="nccl", id=order["id"], told=await nccl.obey(order))

    work = [asyncio.create_task(report())]
    while (order := await channel.receive()) is not None:
        match order.get("op"):
            case "clock":
                channel.send(op="clock", sent=order["sent"], time=time.time())
            case "stack":
                work.append(asyncio.create_task(prove()))
            case "nccl":
                work.append(asyncio.create_task(obey(order["order"])))
            case "listen":
                listener = ports.Listener(str(get_ip()))  # until this process ends
                channel.send(op="listens", facts=listener.facts())
            case "reach":
                work.append(asyncio.create_task(reach(order["others"])))
            case "end":
                return int(order["code"])
    if rank.index == 1:
        complain(f"rank 0 on {info.host} is gone: see what it printed")
    return 2


def unreachable(info: RendezvousInfo, failed: Mapping[str, str]) -> str:
    """Why a rank has no line to rank 0, by address."""
    tried = ", ".join(f"{address}: {why}" for address, why in failed.items())
    return (
        f"cannot reach rank 0 on {info.host} at port {info.port} ({tried}): the network "
        f"between the nodes is closed to it. Ask the site's staff which interface and ports jobs "
        f"may use"
    )
