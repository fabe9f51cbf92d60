"""From options to a running cluster: forks the rank's processes, then leads or follows.

A rank consists of

- the rank process itself, which the launcher started: it holds the nannies of its workers and the
  line to rank 0;
- the janitor, which outlives it by a moment and cleans up;
- the template, from which workers are forked, and forked again after a restart;
- on rank 0 the scheduler and (rank 1 with ``--layout dedicated``) the user's program.
"""

from __future__ import annotations

import dataclasses
import re
import socket
import traceback
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from . import process
from .bootstrap import ranks, reexec
from .bootstrap.janitor import Janitor
from .errors import HpcdaskError, UsageError
from .program import Program
from .scout import Scout
from .spec.specs import RunSpec

if TYPE_CHECKING:
    from .member import Member


@dataclass
class Launch:
    """What this rank was asked to do.

    Attributes
    ----------
    spec
        The options.
    program
        The user's program, or None.
    attached
        File descriptor of a socket to the program that started this rank itself
        (`hpcdask.Runner`), or None.
    """

    spec: RunSpec
    program: Program | None = None
    attached: int | None = None


def launch(launch: Launch, janitor: Janitor, scout: Scout | None) -> Program:
    """Bring up this rank's part, and end this process when the run is over.

    Returns
    -------
    Program
        Only in the process that is to become the user's program.
    """
    rank = ranks.detect()
    try:
        return _launch(launch, janitor, scout, rank)
    except Exception as error:
        _fail(error, rank)


def _fail(error: Exception, rank: ranks.Rank | None) -> NoReturn:
    from .logs import complain
    from .process import leave

    if not isinstance(error, HpcdaskError):
        try:
            traceback.print_exception(error)
        finally:
            leave(1)
    if rank is None or rank.index == 0:
        complain(error)
        leave(error.exit_code)
    leave(0)  # mpirun would kill rank 0 before it has said so


async def end_with(work: Awaitable[int], member: Member) -> NoReturn:
    """End this rank with the exit code of its work, whatever its threads still wait for.

    A loop that ends by itself waits for them, such as for that of a program which hangs in a file
    system and cannot be killed.
    """
    try:
        code = await work
    except Exception as error:
        _fail(error, member.rank)
    member.leave(code)


def _check_layout(launch: Launch, rank: ranks.Rank) -> None:
    if launch.spec.layout == "dedicated" and rank.size < 3:
        raise UsageError(
            f"--layout dedicated needs at least 3 ranks (scheduler, program, one worker), "
            f"there {'is' if rank.size == 1 else 'are'} {rank.size}: start more with -n, or use "
            f"--layout shared"
        )


def _early_error(launch: Launch, rank: ranks.Rank) -> HpcdaskError | None:
    """Bad input that only rank 0 can see."""
    from .client import scheduler_file

    try:
        _check_layout(launch, rank)
        if launch.program is not None:
            launch.program.check()
        if launch.spec.scheduler_file is not None:
            scheduler_file.check_writable(launch.spec.scheduler_file)
        if launch.spec.dashboard_address:
            _check_port(launch.spec.dashboard_address)
    except HpcdaskError as error:
        return error
    return None


def _check_port(address: str) -> None:
    """Refuse a port that was asked for by number and is taken."""
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


def _check_configuration(rank: ranks.Rank | None) -> None:
    """End this rank if Dask's configuration may be a stranger's: nobody reads it from here on."""
    from .security.credentials import check_configuration

    try:
        check_configuration()
    except UsageError as error:
        from .logs import complain
        from .process import leave
        from .rendezvous import abort_launch

        if rank is None or rank.local_index == 0:
            complain(f"{error} (on {socket.gethostname()})")
        if rank is not None:
            abort_launch(rank, error.exit_code)
        leave(error.exit_code)


def _launch(
    launch: Launch, janitor: Janitor, scout: Scout | None, rank: ranks.Rank | None
) -> Program:
    process.mark("options read")
    _check_configuration(rank)
    import distributed  # noqa: F401  (once per rank: all that follows is forked)
    from distributed.compatibility import asyncio_run
    from distributed.config import get_loop_factory

    from . import children, rendezvous, scheduler, template
    from .follower import follow
    from .leader import Leader
    from .logs import complain, quiet
    from .member import Member, new_scratch, start_template
    from .nanny import check_preloads
    from .process import leave

    process.mark("distributed imported")
    reexec.adopt_configured_pre_spawn(janitor, **ranks.given())
    spec = launch.spec
    problem = None
    try:
        scratch = new_scratch(spec, janitor)
    except HpcdaskError as error:
        problem = error  # rank 0 says it, whichever rank has it
        try:
            scratch = new_scratch(dataclasses.replace(spec, local_directory=None), janitor)
        except HpcdaskError:
            complain(f"{error} (on {socket.gethostname()})")  # it cannot even get that far
            if rank is not None:
                rendezvous.abort_launch(rank, error.exit_code)
            leave(error.exit_code)
    template.prepare_forks()
    if launch.program is not None:
        launch.program.set_path()  # before the forks: tasks may need modules beside the script
    else:
        reexec.add_working_folder()
    try:
        check_preloads(spec)
    except UsageError as error:
        problem = problem or error

    nursery = children.Nursery(janitor, scout)
    maybe = rank is None  # MPI must be asked, after all forks: prepare for any answer
    program = None
    if launch.program and (maybe or (rank is not None and rank.index == _program_rank(spec))):
        forked = nursery.fork_into()
        if isinstance(forked, socket.socket):
            children.await_start(forked)
            return launch.program
        program = forked
    quiet()  # not in the program, whose logging is the user's
    scheduler_child = nursery.fork(scheduler.main) if maybe or (rank and rank.index == 0) else None
    start_template(spec, scratch, nursery)

    process.mark("processes forked")
    meeting = None
    if rank is None or rank.size > 1:
        rank, meeting = rendezvous.meet(rank, spec.timeout)
    if program is not None and rank.index != _program_rank(spec):
        program.sock.close()
        program = None
    member = Member(spec, rank, janitor, scratch, program, scout)
    member.problem = problem
    if rank.index == 0:
        assert scheduler_child is not None
        attached = None
        if launch.attached is not None:
            attached = children.Child(0, socket.socket(fileno=launch.attached))
        leader = Leader(
            member,
            meeting,
            scheduler_child,
            attached=attached,
            has_program=launch.program is not None or attached is not None,
            early_error=_early_error(launch, rank),
        )
        if isinstance(meeting, rendezvous.FileRendezvous):
            for folder in meeting.folders:
                janitor.remove_at_end(folder)
        work = leader.lead()
    else:
        if scheduler_child is not None:
            scheduler_child.sock.close()
        assert meeting is not None
        work = follow(member, meeting)
    return asyncio_run(end_with(work, member), loop_factory=get_loop_factory())


def _program_rank(spec: RunSpec) -> int:
    return 1 if spec.layout == "dedicated" else 0
