"""The doctor under a launcher: rank 0 asks the others, which do what it asks for."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any

from hpcdask.bootstrap.orders import MessageStream
from hpcdask.bootstrap.ranks import Rank
from hpcdask.comm import fabric
from hpcdask.gpu.driver import answer_deadline_s, read
from hpcdask.logs import complain
from hpcdask.runner import mpi
from hpcdask.runner.link import find_leader, publish
from hpcdask.runner.rendezvous import Rendezvous, RendezvousInfo
from hpcdask.security.credentials import create_credentials
from hpcdask.security.ports import current

from . import nccl, ports, stack
from .collect import Gathering
from .launch import Launch, Route
from .nodes import RankFacts, assemble
from .ports import Listening

#: Seconds beyond a deadline of another rank; those in which ranks leave after the report.
SPARE_S, LEAVE_DEADLINE_S = 10.0, 5.0
#: How often each clock is read: the quickest answer counts.
CLOCK_READINGS = 5


class Member:
    """Rank that answers; what it is asked about, and its answers, are JSON."""

    def __init__(self, gathering: Gathering) -> None:
        self._gathering = gathering

    async def facts(self, about: Any) -> Any:
        """Return what the rank gathered."""
        return await asyncio.to_thread(self._gathering.results)

    async def clock(self, about: Any) -> Any:
        """Return the time."""
        return time.time()

    async def stack(self, about: Any) -> Any:
        """Prove that the CUDA packages load."""
        return (await stack.prove()).to_json()

    async def nccl(self, about: Any) -> Any:
        """Run the processes of a rank's GPUs."""
        return {number: told.to_json() for number, told in (await nccl.obey(about)).items()}

    async def listen(self, about: Any) -> Any:
        """Listen in the range of ports."""
        return Listening.start(_own_address()).to_json()

    async def reach(self, about: Any) -> Any:
        """Connect to other nodes' ports."""
        return await ports.connect({name: Listening.from_json(one) for name, one in about.items()})


class Leader:
    """Rank 0, which asks all ranks, itself among them."""

    def __init__(self, launch: Launch, member: Member) -> None:
        self.launch, self._member = launch, member
        self._channels: dict[int, MessageStream] = {}
        self._asked: dict[int, tuple[int, asyncio.Future[Any]]] = {}
        self._numbers = itertools.count()
        self._changed = asyncio.Event()
        launch.place(0, launch.rank.host, boot_id())

    async def open(self, meeting: Rendezvous) -> None:
        """Let the other ranks arrive, as many as do in time."""
        launch, address = self.launch, _own_address()
        others = [one.address for one in fabric.interfaces() if one.address != address]
        server, port = await publish(
            launch.rank, address, create_credentials(), meeting, self._arrived, others
        )
        launch.address = f"{address}:{port}"
        await self._until(lambda: len(launch.hosts) == launch.rank.size, launch.timeout)
        server.close()
        meeting.close()

    async def _arrived(self, hello: dict[str, Any], channel: MessageStream) -> None:
        rank = int(hello["rank"])
        self.launch.place(rank, hello["host"], hello["boot"])
        self.launch.routes[rank] = Route(hello["address"], hello["failed"])
        self._channels[rank] = channel
        self._changed.set()
        while (message := await channel.receive()) is not None:
            if asked := self._asked.pop(message["id"], None):
                asked[1].set_result(message["answer"])
        del self._channels[rank]
        channel.close()
        for asked_rank, answer in self._asked.values():
            if asked_rank == rank and not answer.done():
                answer.set_result(None)
        self._changed.set()

    async def _until(self, done: Callable[[], bool], seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not done():
                    self._changed.clear()
                    await self._changed.wait()

    async def _ask(self, rank: int, what: str, seconds: float = SPARE_S, about: Any = None) -> Any:
        """Return a rank's answer, or None if it has gone or does not answer in time."""
        if rank == 0:
            return await getattr(self._member, what)(about)
        if rank not in self._channels:
            return None
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        self._asked[number] = rank, answer
        self._channels[rank].send(id=number, what=what, about=about)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                return await answer
        return None

    async def hear(self, *, with_nccl: bool) -> None:
        """Ask all ranks for their facts, and let nodes try what needs several of them."""
        launch, ranks = self.launch, list(self.launch.hosts)
        await asyncio.gather(*map(self._hear_facts, ranks), *map(self._read_clock, ranks))
        # proofs use GPUs, and so come after all ranks have read NVML
        await asyncio.gather(*map(self._hear_proof, launch.one_of_each().values()))
        if current() is not None and len(set(launch.hosts.values())) > 1:
            await self._try_ports()
        if with_nccl:
            nodes = assemble(launch.reports, launch.hosts)
            launch.nccl = await nccl.measure(nccl.members(nodes), self._ask_nccl)

    async def _hear_facts(self, rank: int) -> None:
        seconds = answer_deadline_s() + SPARE_S
        if (told := await self._ask(rank, "facts", seconds)) is not None:
            self.launch.reports[rank] = RankFacts.from_json(told)

    async def _read_clock(self, rank: int) -> None:
        for _ in range(CLOCK_READINGS if rank else 0):
            sent = time.time()
            if (told := await self._ask(rank, "clock")) is not None:
                reading = time.time() - sent, told - time.time()
                self.launch.clocks.setdefault(rank, []).append(reading)

    async def _hear_proof(self, rank: int) -> None:
        known = self.launch.reports.get(rank)
        if known and known.gpus and known.gpus.gpus:
            told = await self._ask(rank, "stack", stack.DEADLINE_S + SPARE_S)
            proof = stack.Told() if told is None else stack.Told.from_json(told)
            self.launch.reports[rank] = replace(known, stack=proof)

    async def _try_ports(self) -> None:
        """Listen in one rank of each node, in the range of ports, and connect to the others'."""
        chosen = self.launch.one_of_each()
        told = await asyncio.gather(*(self._ask(rank, "listen") for rank in chosen.values()))
        known = zip(chosen, told, strict=True)
        listening = {host: Listening.from_json(one) for host, one in known if one is not None}

        async def reach(host: str) -> None:
            others = {name: one.to_json() for name, one in ports.targets(host, listening).items()}
            failed = await self._ask(chosen[host], "reach", ports.DEADLINE_S + SPARE_S, others)
            if failed is not None:
                self.launch.reached[host] = failed
            if error := listening[host].error:
                self.launch.reached.setdefault(host, {})[host] = error

        await asyncio.gather(*map(reach, listening))

    async def _ask_nccl(self, rank: int, order: dict[str, Any]) -> dict[str, stack.Told]:
        told = await self._ask(rank, "nccl", nccl.DEADLINE_S + SPARE_S, order)
        return {number: stack.Told.from_json(one) for number, one in (told or {}).items()}

    async def end(self, code: int) -> None:
        """Let the other ranks go, with the exit code."""
        for channel in self._channels.values():
            channel.send(end=code)
        await self._until(lambda: not self._channels, LEAVE_DEADLINE_S)
        if len(self.launch.hosts) < self.launch.rank.size:
            mpi.abort_launch(self.launch.rank, code)


async def follow(rank: Rank, member: Member, meeting: Rendezvous, timeout: float) -> int:
    """Do what rank 0 asks for, and return its exit code."""
    info, channel, address, failed = await find_leader(rank, meeting, timeout, unreachable)
    who = {"rank": rank.index, "host": rank.host, "boot": boot_id()}
    channel.send(**who, address=address, failed=failed)

    async def answer(order: dict[str, Any]) -> None:
        call: Callable[..., Coroutine[Any, Any, Any]] = getattr(member, order["what"])
        channel.send(id=order["id"], answer=await call(order["about"]))

    work = []
    while (order := await channel.receive()) is not None:
        if "end" in order:
            return int(order["end"])
        work.append(asyncio.create_task(answer(order)))
    if rank.index == 1:
        complain(f"rank 0 on {info.host} is gone: see what it printed")
    return 2


def boot_id() -> str:
    """Return the id of this system since its start, which no other node has."""
    return read("/proc/sys/kernel/random/boot_id")


def _own_address() -> str:
    from distributed.utils import get_ip

    return str(get_ip())  # where the scheduler would listen


def unreachable(info: RendezvousInfo, failed: Mapping[str, str]) -> str:
    """Say why a rank has no connection to rank 0, by address."""
    tried = ", ".join(f"{address}: {why}" for address, why in failed.items())
    return (
        f"cannot reach rank 0 on {info.host} at port {info.port} ({tried}): the network "
        f"between the nodes is closed to it. Ask the site's staff which interface and ports jobs "
        f"may use"
    )
