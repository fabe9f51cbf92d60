"""From options to a running cluster: forks the rank's processes, then leads or follows.

A rank consists of

- the rank process itself, which the launcher started: it holds the nannies of its workers and the
  line to rank 0;
- the janitor, which outlives it by a moment and cleans up;
- the template, from which workers are forked, and forked again after a restart;
- on rank 0 the scheduler and the user's program.
"""

from __future__ import annotations

import dataclasses
import socket
import traceback
from collections.abc import Awaitable
from typing import TYPE_CHECKING, NoReturn

from hpcdask import process
from hpcdask.bootstrap import ranks, reexec
from hpcdask.bootstrap.janitor import Janitor
from hpcdask.errors import HpcdaskError, UsageError
from hpcdask.logs import complain, set_log_level
from hpcdask.node.gpu_probe import has_peers
from hpcdask.node.prepare import Prepared
from hpcdask.process import leave
from hpcdask.spec.parsing import has_rank
from hpcdask.upstream.distributed import run_in_loop

from .options import RunRequest
from .preflight import early_error
from .program import Program, await_start

if TYPE_CHECKING:
    from hpcdask.node.forking import ForkedProcess

    from .agent import RankAgent
    from .rendezvous import Rendezvous


def launch(request: RunRequest, prepared: Prepared) -> Program:
    """Bring up this rank's part, and end this process when the run is over.

    It returns only in the process that is to become the user's program.
    """
    rank = ranks.detect()
    try:
        return _launch(request, prepared, rank)
    except Exception as error:
        _fail(error, rank)


def _fail(error: Exception, rank: ranks.Rank | None) -> NoReturn:
    if not isinstance(error, HpcdaskError):
        try:
            traceback.print_exception(error)
        finally:
            leave(1)
    if rank is None or rank.index == 0:
        complain(error)
        leave(error.exit_code)
    leave(0)  # mpirun would kill rank 0 before it has said so


async def end_with(work: Awaitable[int], agent: RankAgent) -> NoReturn:
    """End this rank with the exit code of its work, whatever its threads still wait for.

    A loop that ends by itself waits for them, such as for that of a program which hangs in a file
    system and cannot be killed.
    """
    try:
        code = await work
    except Exception as error:
        _fail(error, agent.rank)
    agent.workers.leave(code)


def _abort(error: HpcdaskError, rank: ranks.Rank | None, *, tells: bool = True) -> NoReturn:
    """End this rank, and the launch with it, before the ranks can meet."""
    from .rendezvous import abort_launch

    if tells:
        complain(f"{error} (on {socket.gethostname()})")
    if rank is not None:
        abort_launch(rank, error.exit_code)
    leave(error.exit_code)


def _check_configuration(rank: ranks.Rank | None) -> None:
    """End this rank if Dask's configuration may be a stranger's: nobody reads it from here on."""
    from hpcdask.security.credentials import check_configuration

    try:
        check_configuration()
    except UsageError as error:
        _abort(error, rank, tells=rank is None or rank.local_index == 0)


def _launch(request: RunRequest, prepared: Prepared, rank: ranks.Rank | None) -> Program:
    janitor, probe = prepared
    _check_configuration(rank)
    import distributed  # noqa: F401  (once per rank: all that follows is forked)

    from hpcdask.node import forking
    from hpcdask.node.forkserver import start_forkserver
    from hpcdask.security import ports

    from . import rendezvous, scheduler
    from .agent import RankAgent

    process.mark("distributed imported")
    reexec.adopt_configured_pre_spawn(janitor, **ranks.given())
    spec = request.spec
    if rank is not None and spec.profile_ranks and not has_rank(spec.profile_ranks, rank.index):
        spec = dataclasses.replace(spec, profile="none")
        request = dataclasses.replace(request, spec=spec)
    scratch, problem = _prepare(request, janitor, rank)
    forker = forking.Forker(janitor, probe)
    program = None  # without a rank MPI must be asked, after all forks: prepare for any answer
    if request.program and (rank is None or rank.index == 0):
        forked = forker.fork_into()
        if isinstance(forked, socket.socket):
            await_start(forked)
            return request.program
        program = forked
    set_log_level()  # not in the program, whose logging is the user's
    ports.use(spec.port_range)
    leads = rank is None or rank.index == 0
    scheduler_child = forker.fork(scheduler.main) if leads else None
    start_forkserver(spec, scratch, forker, peers=has_peers(rank))

    meeting = None
    if rank is None or rank.size > 1:
        rank, meeting = rendezvous.meet(rank, spec.timeout)
    if program is not None and rank.index != 0:
        program.sock.close()
        program = None
    agent = RankAgent(spec, rank, janitor, scratch, program, probe, problem)
    work = _part_of(request, agent, meeting, scheduler_child)
    return run_in_loop(end_with(work, agent))


def _prepare(
    request: RunRequest, janitor: Janitor, rank: ranks.Rank | None
) -> tuple[str, HpcdaskError | None]:
    """Make the scratch folder and look for what cannot work, before the forks; rank 0 tells it."""
    from hpcdask.node import forkserver
    from hpcdask.node.preflight import check_parts
    from hpcdask.node.scratch import new_scratch

    spec = request.spec
    problem: HpcdaskError | None = None
    try:
        scratch = new_scratch(spec, janitor)
    except HpcdaskError as error:
        problem = error  # rank 0 says it, whichever rank has it
        try:
            scratch = new_scratch(dataclasses.replace(spec, local_directory=None), janitor)
        except HpcdaskError:
            _abort(error, rank)  # it cannot even get that far
    forkserver.prepare_forks()
    if request.program is not None:
        request.program.set_path()  # before the forks: tasks may need modules beside the script
    else:
        reexec.add_working_folder()
    try:
        check_parts(spec)
    except UsageError as error:
        problem = problem or error
    return scratch, problem


def _part_of(
    request: RunRequest,
    agent: RankAgent,
    meeting: Rendezvous | None,
    scheduler: ForkedProcess | None,
) -> Awaitable[int]:
    """Return the work of this rank until the run is over: lead or follow."""
    from hpcdask.node.forking import ForkedProcess

    from .follower import follow
    from .leader import Leader
    from .rendezvous import FileRendezvous

    if agent.rank.index != 0:
        if scheduler is not None:
            scheduler.sock.close()
        assert meeting is not None
        return follow(agent, meeting)
    assert scheduler is not None
    attached = None
    if request.attached is not None:
        attached = ForkedProcess(0, socket.socket(fileno=request.attached))
    leader = Leader(
        agent,
        meeting,
        scheduler,
        attached=attached,
        program=request.program.name if request.program else "" if attached else None,
        early_error=early_error(request),
    )
    if isinstance(meeting, FileRendezvous):
        agent.janitor.remove_at_end(meeting.folder)
    return leader.lead()
