"""``python -m hpcdask.run``: turn the processes of ``mpirun`` or ``srun`` into a Dask cluster."""

from __future__ import annotations

if __name__ == "__main__":  # before there is anything to import from the current folder
    from hpcdask.bootstrap.environment import start_process

    start_process()

import contextlib
import io
import sys
from typing import NoReturn

from hpcdask.bootstrap import ranks
from hpcdask.errors import UsageError
from hpcdask.logs import complain
from hpcdask.runner.launch import launch
from hpcdask.runner.options import parse


def main() -> NoReturn:
    """Parse the options and be a rank."""
    rank = ranks.detect()
    silent = rank is not None and rank.index != 0  # --help is for one of them to print
    try:
        with contextlib.redirect_stdout(io.StringIO()) if silent else contextlib.nullcontext():
            request = parse(sys.argv[1:])
    except UsageError as error:
        if rank is None or rank.index == 0:
            complain(error)
            if rank is not None and rank.launcher == "hydra":
                from .runner.mpi import abort_launch

                abort_launch(rank, error.exit_code)  # another may be late, or never come
            sys.exit(error.exit_code)
        sys.exit(0)  # mpirun would kill rank 0 before it has said so
    launch(request, rank)


if __name__ == "__main__":
    main()
