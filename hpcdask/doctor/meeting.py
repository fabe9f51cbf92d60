"""The doctor under a launcher: the ranks meet, and rank 0 hears what each has gathered.

A rank that cannot reach rank 0 where the scheduler would listen tries its other addresses, so that
the report can say so.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
import ssl
import sys
import time
from collections.abc import Callable
from typing import Any

from hpcdask.bootstrap.ranks import Rank
from hpcdask.comm import fabric
from hpcdask.errors import HpcdaskError, LaunchError
from hpcdask.node.channel import MessageStream
from hpcdask.runner import rendezvous
from hpcdask.runner.control import ControlServer, connect_to_leader
from hpcdask.runner.rendezvous import Note, Rendezvous
from hpcdask.security.credentials import Credentials, create_credentials, to_security

from . import stack
from .collect import DEADLINE_S, Gathering
from .launch import Launch, Route

Show = Callable[[Launch], int]
DIAL_DEADLINE_S = 5.0
#: Seconds that the other ranks get to leave before rank 0 does.
LEAVE_DEADLINE_S = 3.0
#: Beside the deadline of what a rank does, the time that its answer may take.
SPARE_S = 5.0
#: The clock of each rank is read this often; the quickest answer counts.
CLOCK_READINGS = 3


def take_part(rank: Rank | None, gathering: Gathering, timeout: float, show: Show) -> int:
    """Meet the other ranks, and lead or follow; return this rank's exit code.

    All have to arrive within `timeout` seconds. `show` prints the report of rank 0 and returns the
    exit code.
    """
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # through `finally`
    try:
        rank, meeting = rendezvous.meet(rank, timeout)
        if rank.index == 0:
            return asyncio.run(_Leader(rank, gathering, meeting, timeout).lead(show))
        return asyncio.run(_follow(rank, gathering, meeting, timeout))
    except HpcdaskError as error:
        if rank is None or rank.index == 0:
            raise
        _complain(error)
        return 0  # mpirun would kill rank 0 before it has reported


def _complain(text: object) -> None:
    print(f"hpcdask: error: {text}", file=sys.stderr, flush=True)


def own_address() -> str:
    """Where the scheduler would listen: see `hpcdask.runner.leader`."""
    from distributed.utils import get_ip

    return str(get_ip())


class _Leader:
    """Rank 0."""

    def __init__(
        self, rank: Rank, gathering: Gathering, meeting: Rendezvous, timeout: float
    ) -> None:
        self.rank = rank
        self.gathering = gathering
        self.meeting = meeting
        self.timeout = timeout
        self.launch = Launch(rank, timeout)
        self.channels: dict[int, MessageStream] = {}
        self.changed = asyncio.Event()

    async def lead(self, show: Show) -> int:
        """Hear all ranks, print the report, let the others go."""
        try:
            return await self._lead(show)
        finally:
            self.meeting.close()

    async def _lead(self, show: Show) -> int:
        launch = self.launch
        launch.hosts[0] = self.rank.host
        own = asyncio.create_task(asyncio.to_thread(self.gathering.results))
        hub = await self._listen()
        everyone = set(range(self.rank.size))
        await self._until(lambda: set(launch.hosts) >= everyone, self.timeout)
        hub.close()
        self.meeting.close()
        launch.reports[0] = await own
        wait = DEADLINE_S + SPARE_S
        await self._until(lambda: all(map(self._has_reported, self.channels)), wait)
        await self._prove_stacks()
        code = show(launch)
        for channel in self.channels.values():
            channel.send(op="end", code=code)
        await self._until(lambda: not self.channels, LEAVE_DEADLINE_S)
        if set(launch.hosts) < everyone:
            rendezvous.abort_launch(self.rank, code)
        return code

    def _has_reported(self, rank: int) -> bool:
        readings = self.launch.clocks.get(rank, ())
        return rank in self.launch.reports and len(readings) == CLOCK_READINGS

    async def _listen(self) -> ControlServer:
        credentials = create_credentials()
        address = own_address()
        nonce = secrets.token_hex(16)
        hub = ControlServer(nonce, self._arrived)
        everywhere = "::" if ":" in address else "0.0.0.0"
        port = await hub.listen(everywhere, _context(credentials, "scheduler"))
        others = [one.address for one in fabric.interfaces() if one.address != address]
        self.launch.address = f"{address}:{port}"
        note = {
            "address": address,
            "others": others,
            "port": port,
            "host": self.rank.host,
            "nonce": nonce,
            "credentials": credentials,
        }
        self.meeting.publish(note)
        return hub

    async def _arrived(self, hello: dict[str, Any], channel: MessageStream) -> None:
        rank = int(hello["rank"])
        launch = self.launch
        launch.hosts[rank] = hello["host"]
        launch.routes[rank] = Route(hello["address"], hello["failed"])
        self.channels[rank] = channel
        self.changed.set()
        for _ in range(CLOCK_READINGS):
            channel.send(op="clock", sent=time.time())
        while (message := await channel.receive()) is not None:
            match message.get("op"):
                case "clock":
                    launch.clocks.setdefault(rank, []).append(
                        (time.time() - message["sent"], message["time"] - time.time())
                    )
                case "facts":
                    launch.reports[rank] = message["facts"]
                case "stack":
                    launch.reports[rank]["stack"] = message["facts"]
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
        """One rank of each node proves that the CUDA packages load, after all have read NVML."""
        chosen: dict[str, int] = {}
        for rank, facts in sorted(self.launch.reports.items()):
            if facts.get("gpus", {}).get("gpus") and (rank == 0 or rank in self.channels):
                chosen.setdefault(self.launch.hosts[rank], rank)
        others = set(chosen.values()) - {0}
        for rank in others:
            self.channels[rank].send(op="stack")
        if 0 in chosen.values():
            self.launch.reports[0]["stack"] = await stack.run()
        wait = stack.DEADLINE_S + SPARE_S
        await self._until(lambda: not self._unproved(others) & set(self.channels), wait)
        for rank in self._unproved(others):
            self.launch.reports[rank]["stack"] = stack.SILENCE

    def _unproved(self, ranks: set[int]) -> set[int]:
        return {rank for rank in ranks if "stack" not in self.launch.reports[rank]}


async def _follow(rank: Rank, gathering: Gathering, meeting: Rendezvous, timeout: float) -> int:
    """Report to rank 0 and do what it says. Returns its exit code."""
    note, channel, failed, address = await _find(rank, meeting, timeout)
    channel.send(rank=rank.index, host=rank.host, address=address, failed=failed)
    work = [asyncio.create_task(_report(gathering, channel))]
    while (order := await channel.receive()) is not None:
        match order.get("op"):
            case "clock":
                channel.send(op="clock", sent=order["sent"], time=time.time())
            case "stack":
                work.append(asyncio.create_task(_prove(channel)))
            case "end":
                return int(order["code"])
    if rank.index == 1:
        _complain(f"rank 0 on {note['host']} is gone: see what it printed")
    return 2


async def _report(gathering: Gathering, channel: MessageStream) -> None:
    channel.send(op="facts", facts=await asyncio.to_thread(gathering.results))


async def _prove(channel: MessageStream) -> None:
    channel.send(op="stack", facts=await stack.run())


async def _find(
    rank: Rank, meeting: Rendezvous, timeout: float
) -> tuple[Note, MessageStream, dict[str, str], str]:
    """Dial rank 0: where the scheduler would be, else at its other addresses.

    Returns the note, the line, by address why it could not be reached, and the address that was.
    """
    deadline = time.monotonic() + timeout
    failed: dict[str, str] = {}
    note = None
    while time.monotonic() < deadline:
        note = meeting.fetch() or note
        if note is not None:
            context = _context(note["credentials"], "worker")
            failed = {}
            for address in [note["address"], *note["others"]]:
                try:
                    async with asyncio.timeout(DIAL_DEADLINE_S):
                        channel = await connect_to_leader(
                            address, note["port"], context, note["nonce"]
                        )
                        return note, channel, failed, address
                except TimeoutError:
                    failed[address] = f"no answer in {DIAL_DEADLINE_S:g} s"
                except OSError as error:
                    failed[address] = error.strerror or str(error)
        await asyncio.sleep(0.05)
    me = f"rank {rank.index} of {rank.size} on {rank.host}"
    if note is None:
        raise LaunchError(
            f"{me} heard nothing of rank 0 within {timeout:g} s. See that rank 0 starts, or allow "
            f"more with --timeout"
        )
    tried = ", ".join(f"{address}: {why}" for address, why in failed.items())
    raise LaunchError(
        f"{me} cannot reach rank 0 on {note['host']} at port {note['port']} ({tried}): the network "
        f"between the nodes is closed to it. Ask the site's staff which interface and ports jobs "
        f"may use"
    )


def _context(credentials: Credentials, role: str) -> ssl.SSLContext:
    access = to_security(credentials)
    if role == "scheduler":
        context = access.get_listen_args(role)["ssl_context"]
    else:
        context = access.get_connection_args(role)["ssl_context"]
    assert isinstance(context, ssl.SSLContext)
    return context
