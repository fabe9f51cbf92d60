"""A rank other than 0: finds rank 0, runs what it is told, ends with it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping
from functools import partial

from hpcdask.errors import LaunchError
from hpcdask.logs import complain
from hpcdask.node.channel import MessageStream
from hpcdask.process import TERM_DEADLINE_S

from . import protocol
from .agent import RankAgent
from .control import find_leader
from .rendezvous import Rendezvous, RendezvousInfo


async def follow(agent: RankAgent, rendezvous: Rendezvous) -> int:
    """Take part until rank 0 says that the run is over; return this rank's exit code."""
    agent.signals.watch_launcher(partial(agent.workers.leave, 128 + signal.SIGTERM))
    try:
        spec, late = agent.spec, partial(unreachable, agent.spec.timeout)
        found = await find_leader(agent.rank, rendezvous, spec.timeout, late, tls=spec.tls)
    except LaunchError as error:
        complain(error)
        agent.abort_launch(error.exit_code)
        return error.exit_code
    info, channel = found.info, found.channel
    agent.credentials = info.credentials

    def on_signal(number: int) -> None:
        channel.send(**protocol.Signal(int(number)).to_json())
        if number != signal.SIGINT:  # a program may take its time after Ctrl-C
            asyncio.get_running_loop().call_later(
                TERM_DEADLINE_S, agent.workers.leave, 128 + number
            )

    agent.signals.handle(on_signal)
    report = await asyncio.to_thread(agent.report)
    channel.send(**report.to_json())
    work: list[asyncio.Task[None]] = []
    while (order := await channel.receive()) is not None:
        match protocol.read(order):
            case protocol.StartWorkers() as wanted:
                work.append(asyncio.create_task(_work(agent, channel, wanted)))
            case protocol.EndRun(code):
                await agent.close_workers()
                return code
    if agent.rank.index == 1:
        complain(
            f"rank 0 on {info.host} is gone: its host failed or it was killed. See what it "
            f"printed. The run ends"
        )
    return 1


async def _work(agent: RankAgent, channel: MessageStream, wanted: protocol.StartWorkers) -> None:
    def failed(name: str | None, text: str) -> None:
        channel.send(**protocol.WorkerFailed(name, text).to_json())

    await agent.start_workers(wanted.placements, wanted.scheduler, failed)


def unreachable(timeout: float, info: RendezvousInfo, failed: Mapping[str, str]) -> str:
    """Why no line to rank 0 came up, though its note was there."""
    return (
        f"got no answer from rank 0 at {info.address}:{info.port} on {info.host} within "
        f"{timeout:g} s ({failed[info.address]}): the note is stale, or the network between the "
        f"nodes is closed. --interface chooses another network"
    )
