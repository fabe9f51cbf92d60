"""From options to a running cluster: a rank starts its agent, which leads or follows."""

from __future__ import annotations

import dataclasses
import socket
import traceback
from functools import partial
from typing import NoReturn

from hpcdask.bootstrap import environment, ranks, resources
from hpcdask.bootstrap.channel import MessageStream
from hpcdask.bootstrap.orders import Clean
from hpcdask.bootstrap.supervisor import Supervisor
from hpcdask.errors import HpcdaskError
from hpcdask.logs import complain
from hpcdask.node.preload import variables
from hpcdask.process import leave

from . import mpi
from .options import RunRequest


def launch(request: RunRequest, rank: ranks.Rank | None) -> NoReturn:
    """Be a rank of the run from here to its end."""
    resources.widen(resources.launcher_cores())  # a launcher may pin each rank to one
    program = request.program
    if program is not None:
        program.set_path()  # Dask tasks may need modules beside the script
    else:
        environment.add_working_folder()
    alone = rank is not None and rank.size == 1
    supervisor = Supervisor(
        variables(request.spec, peers=not alone, silent=rank is not None and rank.index > 0),
        program.command() if program is not None else (),
        interrupts=request.attached is not None,
    )
    try:
        if rank is None or rank.size > 1:
            rank = mpi.find_rank(rank, request.spec.timeout)
    except HpcdaskError as error:
        if rank is None or rank.local_index == 0:  # it is the same for all ranks of a node
            complain(f"{error} (on {socket.gethostname()})")
        if rank is not None:
            mpi.abort_launch(rank, error.exit_code)
        leave(error.exit_code)
    attached = None if request.attached is None else socket.socket(fileno=request.attached)
    abort = partial(mpi.abort_launch, rank)
    supervisor.run(run_agent, request, rank, attached, abort=abort)


def run_agent(
    line: socket.socket,
    request: RunRequest,
    rank: ranks.Rank,
    attached: socket.socket | None,
) -> NoReturn:
    """Be the agent of a rank."""
    from hpcdask.upstream.distributed import run_in_loop

    try:
        run_in_loop(_take_part(line, request, rank, attached))
    except HpcdaskError as error:
        complain(error)
        leave(error.exit_code)
    except Exception as error:
        traceback.print_exception(error)
    leave(1)


async def _take_part(
    line: socket.socket, request: RunRequest, rank: ranks.Rank, attached: socket.socket | None
) -> NoReturn:
    import asyncio

    from hpcdask.node.host_agent import HostAgent

    from .follower import Follower
    from .leader import Leader
    from .preflight import check_request
    from .rendezvous import Rendezvous

    request = dataclasses.replace(request, spec=request.spec.configured())
    line.setblocking(False)
    agent = HostAgent(await MessageStream.over(line), request.spec, rank)
    meeting = None
    if rank.size > 1:
        meeting = Rendezvous.of(rank)
        if rank.index == 0:
            agent.tell(Clean(meeting.folder, "later"))
    problem: HpcdaskError | None = None
    try:
        agent.prepare()
        if rank.index == 0:
            check_request(request)
    except HpcdaskError as error:
        problem = error
    if rank.index:
        assert meeting is not None
        follower = Follower(agent, request.spec, meeting)
        listening = asyncio.create_task(agent.listen(follower.hear))
        code = await follower.follow(problem)
    else:
        leader = Leader(agent, request, meeting, attached)
        listening = asyncio.create_task(agent.listen(leader.hear))
        code = await leader.lead(problem)
    listening.cancel()
    agent.leave(code)
