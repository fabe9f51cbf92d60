"""``python -m hpcdask.run``: turn the processes of ``mpirun`` or ``srun`` into a Dask cluster."""

from __future__ import annotations

import sys

from .node.prepare import Prepared, prepare_rank

if __name__ == "__main__":
    _prepared = prepare_rank(sys.argv[1:], in_run=True)

import contextlib
import io

from .bootstrap import ranks
from .errors import UsageError
from .logs import complain
from .runner.launch import launch
from .runner.options import parse
from .runner.program import Program


def main(prepared: Prepared) -> Program:
    """Parse, launch, and return only in the process that becomes the program."""
    rank = ranks.detect()
    silent = rank is not None and rank.index != 0  # --help is for one of them to print
    try:
        with contextlib.redirect_stdout(io.StringIO()) if silent else contextlib.nullcontext():
            asked = parse(sys.argv[1:])
    except UsageError as error:
        if rank is None or rank.index == 0:
            complain(error)
            if rank is not None and rank.launcher == "hydra":
                from .runner.rendezvous import abort_launch

                abort_launch(rank, error.exit_code)  # another may be late, or never come
            sys.exit(error.exit_code)
        sys.exit(0)  # mpirun would kill rank 0 before it has said so
    return launch(asked, prepared)


if __name__ == "__main__":
    main(_prepared).run()
