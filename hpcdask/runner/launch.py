"""From options to a running cluster: a rank starts its agent, which leads or follows."""

from __future__ import annotations

import dataclasses
import re
import socket
import traceback
from functools import partial
from typing import NoReturn

from hpcdask.bootstrap import environment, ranks, resources
from hpcdask.bootstrap.orders import Clean, MessageStream
from hpcdask.bootstrap.supervisor import Supervisor
from hpcdask.errors import HpcdaskError, UsageError
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


def check_request(request: RunRequest) -> None:
    """Raise UsageError, or another error of hpcdask, for bad input that only rank 0 can see."""
    from hpcdask.client import scheduler_file

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
    if spec.dashboard_address:
        _check_port(spec.dashboard_address)


def _check_port(address: str) -> None:
    """Raise UsageError for a port that was asked for by number and is taken."""
    host, _, number = address.rpartition(":")
    if not re.fullmatch(r"[0-9]{1,5}", number) or int(number) > 65535:
        raise UsageError(
            f"--dashboard-address: {address!r} is not an address. Accepted: :8787, 8787, "
            f"0.0.0.0:8787, :0 (any free port)"
        )
    if int(number) == 0:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(number)))
        except OSError as error:
            raise UsageError(
                f"--dashboard-address: port {number} of {host or 'all addresses'} cannot be used "
                f"on {socket.gethostname()}: {error.strerror}. Name another, or leave the option "
                f"out to take any"
            ) from None
