"""A rank other than 0: finds rank 0, runs what it is told, ends with it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping
from functools import partial
from typing import Any

from hpcdask.errors import ClusterError, LaunchError
from hpcdask.logs import complain
from hpcdask.node.channel import MessageStream
from hpcdask.node.placement import WorkerPlacement
from hpcdask.spec.specs import RunSpec

from .agent import TERM_DEADLINE_S, RankAgent
from .control import find_leader
from .rendezvous import Note, Rendezvous


async def follow(member: RankAgent, rendezvous: Rendezvous) -> int:
    """Take part until rank 0 says that the run is over; return this rank's exit code."""
    member.signals.watch_launcher(partial(member.leave, 128 + signal.SIGTERM))
    try:
        spec, unreachable = member.spec, partial(_unreachable, member.spec)
        found = await find_leader(member.rank, rendezvous, spec.timeout, unreachable, tls=spec.tls)
    except LaunchError as error:
        complain(error)
        member.abort_launch(error.exit_code)
        return error.exit_code
    note, channel = found.note, found.channel
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


def _unreachable(spec: RunSpec, note: Note, failed: Mapping[str, str]) -> str:
    """Why no line to rank 0 came up, though its note was there."""
    return (
        f"got no answer from rank 0 at {note['address']}:{note['port']} on {note['host']} within "
        f"{spec.timeout:g} s: the note is stale, or the network between the nodes is closed. "
        f"--interface chooses another network"
    )
