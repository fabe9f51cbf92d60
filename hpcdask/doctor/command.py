"""``hpcdask doctor``, alone or in each rank of a launch: all ranks report to rank 0."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import click

from hpcdask.bootstrap import ranks
from hpcdask.bootstrap.ranks import Rank
from hpcdask.bootstrap.stream import MessageStream
from hpcdask.comm import fabric
from hpcdask.errors import HpcdaskError, root_cause
from hpcdask.gpu.driver import answer_deadline_s, read
from hpcdask.logs import complain
from hpcdask.process import FILES, detach_standard_streams, leave
from hpcdask.runner import mpi
from hpcdask.runner.link import Rendezvous, find_leader
from hpcdask.security.credentials import create_credentials
from hpcdask.security.ports import use
from hpcdask.spec.parsing import configured_port_range, parse_port_range

from . import nodes, proofs, report
from .launch import Launch
from .nodes import RankFacts
from .proofs import Outcome

#: A fork, so that nothing is imported again: this process has one thread.
CONTEXT = multiprocessing.get_context("fork")
#: Seconds beyond a deadline of another rank; those in which ranks leave after the report.
SPARE_S, LEAVE_DEADLINE_S = 10.0, 5.0


def run(
    *, as_json: bool, timeout: float, port_range: str | None, with_nccl: bool, gpus: bool
) -> NoReturn:
    """Check this node, or under a launcher all nodes, print one report, and end this process.

    Must be called while the process has one thread. All ranks have to arrive within `timeout`
    seconds. All have the same exit code: 0 all is well, 1 with warnings, 2 with errors. NCCL is
    tried `with_nccl` only; without `gpus` no GPU is looked at.

    Raises UsageError if the range is malformed, HpcdaskError if the ranks cannot meet.
    """
    use(parse_port_range(port_range, "--port-range") or configured_port_range())
    rank = ranks.detect()
    first = rank is None or rank.local_index == 0
    readers = {
        name: group.read
        for name, group in nodes.GROUPS.items()
        if group.read and (first or group.by_all)
    }
    if not gpus:
        del readers["gpus"]
        readers["fabric"] = functools.partial(fabric.look, gpus=False)
    gathering = Gathering(readers, answer_deadline_s())
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # through `finally`
    try:
        if rank is None or rank.size > 1:
            rank = mpi.find_rank(rank, timeout)
        if rank.index:
            code = asyncio.run(_follow(rank, gathering, timeout))
        else:
            code = asyncio.run(_Leader(Launch(rank, timeout)).run(gathering, as_json, with_nccl))
    except HpcdaskError as error:
        if rank is None or rank.index == 0:
            raise
        complain(error)
        code = 0  # mpirun would kill rank 0 before it has reported
    leave(code)  # Python's own end would wait for what hangs


class Gathering:
    """Groups of facts that are being gathered, each in a process that is given up in time.

    A driver or a network file system that hangs cannot be interrupted, not even by SIGKILL, but its
    process can be left behind.
    """

    def __init__(self, readers: Mapping[str, Callable[[], Any]], deadline_s: float) -> None:
        self._deadline_s, self._until = deadline_s, time.monotonic() + deadline_s
        self._running = {}
        for name, reader in readers.items():
            ours, theirs = CONTEXT.Pipe(duplex=False)
            process = CONTEXT.Process(target=_answer, args=(reader, theirs), daemon=True)
            process.start()
            theirs.close()
            self._running[name] = process, ours

    def results(self) -> dict[str, Any]:
        """Return the facts by group, with ``problems`` that say why some are missing."""
        problems: dict[str, str] = {}
        found: dict[str, Any] = {"problems": problems}
        for name, (process, pipe) in self._running.items():
            problem = f"did not answer within {self._deadline_s:g} s"
            try:
                if pipe.poll(max(0.0, self._until - time.monotonic())):
                    found[name], problem = pipe.recv()
            except (EOFError, OSError):
                problem = "its process has died"
            if problem:
                problems[name] = problem
            process.kill()
        return found


def _answer(reader: Callable[[], Any], pipe: Connection) -> None:
    # a launcher waits for the end of the descriptors that it gave the rank
    detach_standard_streams()
    os.closerange(3, pipe.fileno())
    os.closerange(pipe.fileno() + 1, FILES)
    try:
        pipe.send((reader(), ""))
    except Exception as error:
        pipe.send((None, str(error) if isinstance(error, HpcdaskError) else root_cause(error)))


async def _gather(gathering: Gathering, *, proves: bool) -> RankFacts:
    """Return the facts of a rank; one that `proves` also uses each GPU of its node."""
    facts = RankFacts(**await asyncio.to_thread(gathering.results))
    if proves and facts.gpus and facts.gpus.gpus:
        return replace(facts, stack=await proofs.prove_stack())
    return facts


class _Leader:
    """Rank 0, to which the other ranks report."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._channels: dict[int, MessageStream] = {}
        self._complete = asyncio.Event()
        launch.place(0, launch.rank.host, _boot_id())

    async def run(self, gathering: Gathering, as_json: bool, with_nccl: bool) -> int:
        """Gather the reports of all ranks, print one, and return its exit code."""
        launch = self._launch
        if launch.rank.size > 1:
            await self._meet(Rendezvous(launch.rank))
        seconds, others = answer_deadline_s() + proofs.STACK_DEADLINE_S + SPARE_S, [*self._channels]
        reports = asyncio.gather(*(self._receive(rank, seconds) for rank in others))
        launch.arrivals[0].facts = await _gather(gathering, proves=True)
        for rank, told in zip(others, await reports, strict=True):
            if told is not None:
                launch.arrivals[rank].facts = RankFacts.from_json(told["facts"])
        if with_nccl:
            launch.nccl = await proofs.measure(proofs.members(launch.nodes()), self._try_nccl)
        code = show(launch, as_json)
        for channel in self._channels.values():
            channel.send(end=code)
        await asyncio.gather(*(self._receive(rank, LEAVE_DEADLINE_S) for rank in self._channels))
        if len(launch.arrivals) < launch.rank.size:
            mpi.abort_launch(launch.rank, code)
        return code

    async def _meet(self, meeting: Rendezvous) -> None:
        """Wait for the other ranks, as many as arrive in time."""
        from distributed.utils import get_ip

        launch, address = self._launch, str(get_ip())  # the scheduler's address in a run
        others = [one.address for one in fabric.interfaces() if one.address != address]
        keys = create_credentials()
        try:
            port = await meeting.open(self._note_arrival, keys, address, others)
            launch.address = f"{address}:{port}"
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._complete.wait(), launch.timeout)
        finally:
            meeting.close()

    async def _note_arrival(self, hello: dict[str, Any], channel: MessageStream) -> None:
        rank, ahead = int(hello["rank"]), hello["time"] - time.time()
        more = {"address": hello["address"], "failed": hello["failed"], "ahead": ahead}
        self._launch.place(rank, hello["host"], hello["boot"], **more)
        self._channels[rank] = channel
        if len(self._launch.arrivals) == self._launch.rank.size:
            self._complete.set()

    async def _receive(self, rank: int, seconds: float) -> dict[str, Any] | None:
        """Return the next message of a rank; None if it is gone, or silent."""
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(self._channels[rank].receive(), seconds)
        return None

    async def _try_nccl(self, rank: int, order: dict[str, Any]) -> list[Outcome]:
        """Return the outcomes of a rank's GPUs; none of a rank that has gone."""
        if rank == 0:
            return await proofs.obey(0, order)
        self._channels[rank].send(nccl=order)
        told = await self._receive(rank, proofs.NCCL_DEADLINE_S + SPARE_S) or {}
        return [Outcome.from_json(one) for one in told.get("nccl", ())]


async def _follow(rank: Rank, gathering: Gathering, timeout: float) -> int:
    """Report to rank 0, do what it orders, and return its exit code."""
    _, channel, address, failed = await find_leader(rank, timeout)
    who = {"rank": rank.index, "host": rank.host, "address": address, "failed": failed}
    channel.send(**who, boot=_boot_id(), time=time.time())
    facts = await _gather(gathering, proves=rank.local_index == 0)
    channel.send(facts=facts.to_json())
    while (order := await channel.receive()) is not None:
        if "end" in order:
            return int(order["end"])
        outcomes = await proofs.obey(rank.index, order["nccl"])
        channel.send(nccl=[one.to_json() for one in outcomes])
    return 2


def _boot_id() -> str:
    """Return the id of this system since its start, which no other node has."""
    return read("/proc/sys/kernel/random/boot_id")


def show(launch: Launch, as_json: bool) -> int:
    """Print the report, as far as that can be written, and return the exit code."""
    made = launch.report()
    text = report.to_json(made) if as_json else report.to_text(made)
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    text = text.encode(encoding, "backslashreplace").decode(encoding)
    with contextlib.suppress(OSError, ValueError):  # a full disk, a closed pipe
        # Open MPI gives rank 0 a terminal, whatever mpirun writes to
        click.echo(text, color=None if made.ranks == 1 else False)
    return made.exit_code
