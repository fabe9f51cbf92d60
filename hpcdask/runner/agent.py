"""Agents of a run: rank 0 leads, the others follow it."""

from __future__ import annotations

import asyncio
import signal
import socket

from hpcdask.bootstrap.orders import AbortLaunch, Message, Signal
from hpcdask.bootstrap.stream import MessageStream
from hpcdask.client import scheduler_file
from hpcdask.errors import HpcdaskError, LaunchError, UsageError
from hpcdask.logs import complain
from hpcdask.node.host_agent import HostAgent
from hpcdask.process import TERM_DEADLINE_S
from hpcdask.security.credentials import to_security

from . import link
from .link import find_leader
from .options import RunRequest


async def take_part(agent: HostAgent, request: RunRequest, attached: socket.socket | None) -> int:
    """Lead the run in rank 0, follow it in the others; return this rank's exit code."""
    request.spec = request.spec.configured()
    problem: HpcdaskError | None = None
    try:
        agent.prepare()
        if agent.rank.index == 0:
            check_request(request)
    except HpcdaskError as error:
        problem = error
    if agent.rank.index == 0:
        from .leader import Leader  # other ranks do without its imports

        return await Leader(agent, request, attached).lead(problem)
    return await _follow(agent, request.spec.timeout, problem)


async def _follow(agent: HostAgent, timeout: float, problem: HpcdaskError | None) -> int:
    """Do what rank 0 says until the run is over, and end with it."""
    leader: MessageStream | None = None

    def hear(message: Message) -> None:
        """Pass signals on to rank 0; without it, end this rank."""
        if not isinstance(message, Signal):
            return
        if leader is None:
            agent.leave(128 + message.number)
        leader.send(message)
        if message.number != signal.SIGINT:  # a program may take its time after Ctrl-C
            loop = asyncio.get_running_loop()
            loop.call_later(TERM_DEADLINE_S, agent.leave, 128 + message.number)

    agent.listen(hear)
    try:
        info, leader, _, _ = await find_leader(agent.rank, timeout)
    except LaunchError:
        agent.tell(AbortLaunch())
        raise
    security = to_security(info.credentials)
    leader.send(await asyncio.to_thread(link.RankReport.of, agent, problem))

    def lose(name: str, text: str) -> None:
        leader.send(link.Loss.of_worker(agent.rank, name, text))

    work: list[asyncio.Task[None]] = []
    async for order in leader:
        match order:
            case link.StartWorkers(scheduler, placements):
                started = agent.start_workers(placements, scheduler, security, lose, lose)
                work.append(asyncio.create_task(started))
            case link.EndRun(seconds):
                await agent.close_workers(seconds)
                return 0
    if agent.rank.index == 1:
        complain(
            f"rank 0 on {info.host} is gone: its host failed or it was killed. See what it "
            f"printed. The run ends"
        )
    return 1


def check_request(request: RunRequest) -> None:
    """Raise UsageError, or another error of hpcdask, for bad input that only rank 0 can see."""
    spec = request.spec
    if spec.groups and spec.device != "auto":
        raise UsageError(
            f"--groups {' '.join(spec.groups)} says what each rank computes on, and "
            f"--device {spec.device} that all compute on the same: leave one out"
        )
    if request.program is not None:
        request.program.check()
    if spec.scheduler_file is not None:
        scheduler_file.check_writable(spec.scheduler_file)
