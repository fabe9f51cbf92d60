"""``python -m hpcdask.run``: turn the processes of ``mpirun`` or ``srun`` into a Dask cluster."""

from __future__ import annotations

if __name__ == "__main__":  # before there is anything to import from the current folder
    from hpcdask.bootstrap.environment import start_process

    start_process()

import contextlib
import io
import socket
import sys
from functools import partial
from typing import NoReturn

from hpcdask.bootstrap import environment, ranks, resources
from hpcdask.bootstrap.supervisor import Supervisor
from hpcdask.errors import HpcdaskError, UsageError
from hpcdask.logs import complain, say
from hpcdask.node.preload import variables
from hpcdask.process import leave
from hpcdask.runner import mpi
from hpcdask.runner.options import parse


def main() -> NoReturn:
    """Be a rank of a run from its start to its end; the agent leads or follows."""
    rank = ranks.detect()
    first = rank is None or rank.index == 0
    try:  # --help is for one of them to print
        with contextlib.nullcontext() if first else contextlib.redirect_stdout(io.StringIO()):
            request = parse(sys.argv[1:])
    except UsageError as error:
        if not first:
            sys.exit(0)  # mpirun would kill rank 0 before it has said so
        complain(error)
        if rank is not None and rank.launcher == "hydra":
            mpi.abort_launch(rank, error.exit_code)  # another may be late, or never come
        sys.exit(error.exit_code)
    resources.widen(resources.launcher_cores())  # a launcher may pin each rank to one
    program = request.program
    if program is not None:
        program.set_path()  # Dask tasks may need modules beside the script
    elif (warning := environment.add_working_folder()) and first:
        say(warning)
    modules = ("hpcdask.runner.agent", "hpcdask.runner.leader")[: 1 + first]
    supervisor = Supervisor(
        variables(request.spec, *modules, peers=rank is None or rank.size > 1, silent=not first),
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
    work = "hpcdask.runner.agent:take_part"
    abort = partial(mpi.abort_launch, rank)
    supervisor.run(work, rank, request.spec, request, attached, abort=abort)


if __name__ == "__main__":
    main()
