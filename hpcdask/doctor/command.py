"""``hpcdask doctor``, alone or in each rank of a launch: all ranks report to rank 0."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hpcdask.bootstrap import ranks
from hpcdask.bootstrap.ranks import Rank
from hpcdask.bootstrap.stream import MessageStream
from hpcdask.comm import fabric
from hpcdask.errors import HpcdaskError, UsageError
from hpcdask.gpu.driver import answer_deadline_s, read
from hpcdask.logs import complain
from hpcdask.process import leave
from hpcdask.runner import mpi
from hpcdask.runner.link import Listener, Rendezvous, find_leader
from hpcdask.security.credentials import create_credentials
from hpcdask.security.ports import use
from hpcdask.spec.parsing import configured_port_range, parse_port_range

from . import launch, nccl, nodes, report, stack
from .collect import Gathering
from .launch import Launch, Route
from .nodes import RankFacts
from .report import Report, differences
from .stack import Told

#: Seconds beyond a deadline of another rank; those in which ranks leave after the report.
SPARE_S, LEAVE_DEADLINE_S = 10.0, 5.0


def run(
    *,
    as_json: bool,
    timeout: float,
    port_range: str | None = None,
    with_nccl: bool = False,
    gpus: bool = True,
) -> int:
    """Check this node, or under a launcher all nodes, and print one report.

    Must be called while the process has one thread. All ranks have to arrive within `timeout`
    seconds. All return the same exit code: 0 all is well, 1 with warnings, 2 with errors. NCCL is
    tried `with_nccl` only; without `gpus` no GPU is looked at.

    Raises UsageError if timeout or range are malformed, HpcdaskError if the ranks cannot meet.
    """
    if not 0 < timeout < math.inf:
        raise UsageError(f"--timeout: {timeout:g} is not a time. Accepted: a number of seconds")
    use(parse_port_range(port_range, "--port-range") or configured_port_range())
    rank = ranks.detect()
    first = rank is None or rank.local_index == 0
    readers = {name: group.read for name, group in nodes.GROUPS.items() if first or group.by_all}
    if not gpus:
        del readers["gpus"]
        readers["fabric"] = functools.partial(fabric.look, gpus=False)
    gathering = Gathering(readers, answer_deadline_s())
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # through `finally`
    try:
        meeting = None
        if rank is None or rank.size > 1:
            rank = mpi.find_rank(rank, timeout)
            meeting = Rendezvous.of(rank)
        if meeting and rank.index:
            code = asyncio.run(_follow(rank, gathering, meeting, timeout))
        else:
            leader = _Leader(Launch(rank, timeout))
            code = asyncio.run(leader.run(gathering, meeting, as_json, with_nccl))
    except HpcdaskError as error:
        if rank is None or rank.index == 0:
            raise
        complain(error)
        code = 0  # mpirun would kill rank 0 before it has reported
    if gathering.hangs:
        leave(code)
    return code


async def _report(gathering: Gathering, *, proves: bool) -> RankFacts:
    """Return the facts of a rank; one that `proves` also uses each GPU of its node."""
    known = RankFacts(**await asyncio.to_thread(gathering.results))
    if proves and known.gpus and known.gpus.gpus:
        return replace(known, stack=await stack.prove())
    return known


class _Leader:
    """Rank 0, to which the other ranks report."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._channels: dict[int, MessageStream] = {}
        self._of_nccl: dict[int, dict[str, Told]] = {}
        self._changed = asyncio.Event()
        launch.place(0, launch.rank.host, _boot_id())

    async def run(
        self, gathering: Gathering, meeting: Rendezvous | None, as_json: bool, with_nccl: bool
    ) -> int:
        """Gather the reports of all ranks, print one, and return its exit code."""
        launch = self._launch
        if meeting is not None:
            await self._open(meeting)
        launch.reports[0] = await _report(gathering, proves=True)
        seconds = answer_deadline_s() + stack.DEADLINE_S + SPARE_S
        await self._until(lambda: self._channels.keys() <= launch.reports.keys(), seconds)
        if with_nccl:
            members = nccl.members(nodes.assemble(launch.reports, launch.hosts))
            launch.nccl = await nccl.measure(members, self._try_nccl)
        code = show(launch, as_json)
        for channel in self._channels.values():
            channel.send(end=code)
        await self._until(lambda: not self._channels, LEAVE_DEADLINE_S)
        if len(launch.hosts) < launch.rank.size:
            mpi.abort_launch(launch.rank, code)
        return code

    async def _open(self, meeting: Rendezvous) -> None:
        """Wait for the other ranks, as many as arrive in time."""
        from distributed.utils import get_ip

        launch, address = self._launch, str(get_ip())  # the scheduler's address in a run
        others = [one.address for one in fabric.interfaces() if one.address != address]
        server = Listener(self._serve, create_credentials())
        try:
            port = await server.publish(meeting, launch.rank, address, others)
            launch.address = f"{address}:{port}"
            await self._until(lambda: len(launch.hosts) == launch.rank.size, launch.timeout)
        finally:
            server.close()
            meeting.close()

    async def _serve(self, hello: dict[str, Any], channel: MessageStream) -> None:
        """Note what a rank reports, until it ends."""
        rank = int(hello["rank"])
        self._launch.place(rank, hello["host"], hello["boot"])
        self._launch.routes[rank] = Route(hello["address"], hello["failed"])
        self._channels[rank] = channel
        self._changed.set()
        while (message := await channel.receive()) is not None:
            if "nccl" in message:
                told = message["nccl"].items()
                self._of_nccl[rank] = {number: Told.from_json(one) for number, one in told}
            else:
                self._launch.ahead[rank] = message["time"] - time.time()
                self._launch.reports[rank] = RankFacts.from_json(message["facts"])
            self._changed.set()
        del self._channels[rank]
        channel.close()
        self._changed.set()

    async def _until(self, done: Callable[[], bool], seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not done():
                    self._changed.clear()
                    await self._changed.wait()

    async def _try_nccl(self, rank: int, order: dict[str, Any]) -> dict[str, Told]:
        """Return the reports of the processes of a rank's GPUs; none of a rank that has gone."""
        if rank == 0:
            return await nccl.obey(order)
        if rank in self._channels:
            self._channels[rank].send(nccl=order)
        answered = lambda: rank in self._of_nccl or rank not in self._channels  # noqa: E731
        await self._until(answered, nccl.DEADLINE_S + SPARE_S)
        return self._of_nccl.get(rank, {})


async def _follow(rank: Rank, gathering: Gathering, meeting: Rendezvous, timeout: float) -> int:
    """Report to rank 0, do what it orders, and return its exit code."""
    info, channel, address, failed = await find_leader(rank, meeting, timeout)
    who = {"rank": rank.index, "host": rank.host, "boot": _boot_id()}
    channel.send(**who, address=address, failed=failed)
    facts = await _report(gathering, proves=rank.local_index == 0)
    channel.send(facts=facts.to_json(), time=time.time())
    while (order := await channel.receive()) is not None:
        if "end" in order:
            return int(order["end"])
        told = await nccl.obey(order["nccl"])
        channel.send(nccl={number: one.to_json() for number, one in told.items()})
    if rank.index == 1:
        complain(f"rank 0 on {info.host} is gone: see what it printed")
    return 2


def _boot_id() -> str:
    """Return the id of this system since its start, which no other node has."""
    return read("/proc/sys/kernel/random/boot_id")


def build(heard: Launch) -> Report:
    """Return the report of a launch."""
    found = nodes.assemble(heard.reports, heard.hosts, heard.rank.launcher)
    between = [*launch.check_transport(found), *nccl.check(heard.nccl)]
    if heard.rank.size > 1:
        between = [*launch.check(heard), *between]
    examined = [(node, nodes.examine(node)) for node in found]
    return Report(examined, between, differences(found) if len(found) > 1 else [], heard.rank.size)


def show(heard: Launch, as_json: bool) -> int:
    """Print the report, as far as that can be written, and return the exit code."""
    made = build(heard)
    with contextlib.suppress(OSError, ValueError):  # a full disk, a closed pipe
        if as_json:
            print(report.to_json(made), flush=True)
        else:
            report.print_text(made)
    return made.exit_code
