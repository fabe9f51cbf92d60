"""A rank other than 0: finds rank 0, runs what it is told, ends with it."""

from __future__ import annotations

import asyncio
import signal
import time
from functools import partial
from typing import Any

from hpcdask.errors import ClusterError, LaunchError
from hpcdask.logs import complain
from hpcdask.node.channel import MessageStream
from hpcdask.node.placement import WorkerPlacement
from hpcdask.security.credentials import to_security

from .agent import TERM_DEADLINE_S, RankAgent
from .control import connect_to_leader
from .rendezvous import Note, Rendezvous


async def follow(member: RankAgent, rendezvous: Rendezvous) -> int:
    """Take part until rank 0 says that the run is over; return this rank's exit code."""
    member.signals.watch_launcher(partial(member.leave, 128 + signal.SIGTERM))
    try:
        note, channel = await _find_leader(member, rendezvous)
    except LaunchError as error:
        complain(error)
        member.abort_launch(error.exit_code)
        return error.exit_code
    member.credentials = note["credentials"]

    def on_signal(number: int) -> None:
        channel.send(op="signal", number=int(number))
        if number != signal.SIGINT:  # a program may take its time after Ctrl-C
            asyncio.get_running_loop().call_later(TERM_DEADLINE_S, member.leave, 128 + number)

    member.signals.handle(on_signal)
    report = await asyncio.to_thread(member.report)
    channel.send(**report.to_json())
    work: list[asyncio.Task[None]] = []
    while (order := await channel.receive()) is not None:
        match order.get("op"):
            case "work":
                work.append(asyncio.create_task(_work(member, channel, order)))
            case "program":
                work.append(asyncio.create_task(_run_program(member, channel, order["address"])))
            case "signal":
                member.pass_on(order["number"])
            case "end":
                member.end_program()
                await member.close_workers()
                return int(order["code"])
    if member.rank.index == 1:
        complain(
            f"rank 0 on {note['host']} is gone: its host failed or it was killed. The run ends"
        )
    member.end_program()
    return 1


async def _work(member: RankAgent, channel: MessageStream, order: dict[str, Any]) -> None:
    def failed(name: str | None, text: str) -> None:
        channel.send(op="failed", name=name, error=text)

    try:
        places = [WorkerPlacement.from_json(place) for place in order["places"]]
        await member.start_workers(places, order["scheduler"], failed)
    except Exception as error:
        failed(None, f"{type(error).__name__}: {error}")


async def _run_program(member: RankAgent, channel: MessageStream, address: str) -> None:
    assert member.program is not None
    try:
        member.start_program(address)
        code = await member.program.wait()
    except ClusterError as error:
        complain(error)
        code = error.exit_code
    channel.send(op="program-ended", code=code)


async def _find_leader(member: RankAgent, rendezvous: Rendezvous) -> tuple[Note, MessageStream]:
    """Read notes until one leads to rank 0: a note may be left over from an earlier life."""
    deadline = time.monotonic() + member.spec.timeout
    heard: Note | None = None
    pause = 0.02
    while time.monotonic() < deadline:
        note = rendezvous.fetch()
        if note is not None:
            if member.spec.tls and not note["credentials"]:
                raise LaunchError(
                    "rank 0's note has no keys, though --no-tls is not among this rank's options: "
                    "give all ranks the same options"
                )
            heard = note
            try:
                return note, await _dial(note)
            except (OSError, TimeoutError):
                pass
        await asyncio.sleep(pause)
        pause = min(pause * 1.1, 0.5)  # a shared file system has better things to do
    me = f"rank {member.rank.index} of {member.rank.size} on {member.rank.host}"
    limit = f"within {member.spec.timeout:g} s"
    if heard is None:
        raise LaunchError(
            f"{me} heard nothing of rank 0 {limit}. See that rank 0 starts, or allow more "
            f"with --timeout"
        )
    raise LaunchError(
        f"{me} got no answer from rank 0 at {heard['address']}:{heard['port']} on "
        f"{heard['host']} {limit}: the note is stale, or the network between the nodes is "
        f"closed. --interface chooses another network"
    )


async def _dial(note: Note) -> MessageStream:
    context = None
    if note["credentials"]:
        arguments = to_security(note["credentials"]).get_connection_args("worker")
        context = arguments["ssl_context"]
    async with asyncio.timeout(5):
        return await connect_to_leader(note["address"], note["port"], context, note["nonce"])
