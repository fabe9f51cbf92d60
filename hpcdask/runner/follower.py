"""Agent of a rank other than 0: finds rank 0, runs what it is told, ends with it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Mapping
from functools import partial

from distributed import Security

from hpcdask.bootstrap.environment import own_process
from hpcdask.bootstrap.orders import AbortLaunch, Message, MessageStream, Signal, read
from hpcdask.errors import HpcdaskError, LaunchError
from hpcdask.logs import complain
from hpcdask.node.host_agent import HostAgent
from hpcdask.node.placement import WorkerPlacement
from hpcdask.process import TERM_DEADLINE_S
from hpcdask.security.credentials import to_security
from hpcdask.spec.specs import RunSpec

from . import protocol
from .link import find_leader
from .protocol import RankReport
from .rendezvous import Rendezvous, RendezvousInfo


class Follower:
    """Agent of a rank other than 0."""

    def __init__(self, agent: HostAgent, spec: RunSpec, rendezvous: Rendezvous) -> None:
        self.agent, self._spec, self._rendezvous = agent, spec, rendezvous
        self._leader: MessageStream | None = None

    def hear(self, message: Message) -> None:
        """Pass signals on to rank 0; without it, end this rank."""
        if not isinstance(message, Signal):
            return
        number = message.number
        if self._leader is None:
            self.agent.leave(128 + number)
        self._leader.send(**message.to_json())
        if number != signal.SIGINT:  # a program may take its time after Ctrl-C
            loop = asyncio.get_running_loop()
            loop.call_later(TERM_DEADLINE_S, self.agent.leave, 128 + number)

    async def follow(self, problem: HpcdaskError | None) -> int:
        """Take part until rank 0 says that the run is over; return this rank's exit code."""
        agent, spec = self.agent, self._spec
        try:
            late = partial(unreachable, spec.timeout)
            found = await find_leader(
                agent.rank, self._rendezvous, spec.timeout, late, tls=spec.tls
            )
        except LaunchError as error:
            complain(error)
            agent.tell(AbortLaunch())
            return error.exit_code
        self._leader = channel = found.channel
        security = to_security(found.info.credentials)
        channel.send(**(await asyncio.to_thread(report, agent, problem)).to_json())

        def tell(failure: protocol.WorkerFailed) -> None:
            channel.send(**failure.to_json())

        work: list[asyncio.Task[None]] = []
        while (order := await channel.receive()) is not None:
            match read(order):
                case protocol.StartWorkers(scheduler, placements):
                    started = start_workers(agent, placements, scheduler, security, tell)
                    work.append(asyncio.create_task(started))
                case protocol.EndRun(code, seconds):
                    await agent.close_workers(seconds)
                    return code
        if agent.rank.index == 1:
            complain(
                f"rank 0 on {found.info.host} is gone: its host failed or it was killed. See what "
                f"it printed. The run ends"
            )
        return 1


def report(agent: HostAgent, problem: HpcdaskError | None = None) -> RankReport:
    """Return the report of a rank to rank 0: what it sees, or why there is nothing."""
    me = partial(RankReport, agent.rank.index, agent.host, own_process())
    try:
        if problem is not None:
            raise problem
        seen, fabric = agent.look()
    except HpcdaskError as error:
        return me(error=str(error))
    return me(inventory=seen, fabric=fabric)


async def start_workers(
    agent: HostAgent,
    placements: list[WorkerPlacement],
    scheduler: str,
    security: Security,
    tell: Callable[[protocol.WorkerFailed], None],
) -> None:
    """Start a rank's workers, and tell rank 0 of those that fail."""

    def failed(name: str | None, text: str) -> None:
        tell(protocol.WorkerFailed(agent.rank.index, name, text))

    try:
        await agent.start_workers(placements, scheduler, security, failed)
    except Exception as error:
        failed(None, f"{type(error).__name__}: {error}")


def unreachable(timeout: float, info: RendezvousInfo, failed: Mapping[str, str]) -> str:
    """Why no line to rank 0 came up, though its note was there."""
    return (
        f"got no answer from rank 0 at {info.address}:{info.port} on {info.host} within "
        f"{timeout:g} s ({failed[info.address]}): the note is stale, or the network between the "
        f"nodes is closed. --interface chooses another network"
    )
