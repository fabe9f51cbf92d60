"""``python -m hpcdask.run``: turn the processes of ``mpirun`` or ``srun`` into a Dask cluster."""

from __future__ import annotations

from .bootstrap import reexec
from .bootstrap.janitor import Janitor

if __name__ == "__main__":
    reexec.end_on_interrupt()
    reexec.reexecute()
    _janitor = Janitor.start()
    from .bootstrap import ranks, resources

    ranks.note_launcher()
    resources.widen(resources.launcher_cores())  # the imports and the probe need more than one
    ranks.leave_mpi_alone()
    from .node.gpu_probe import GpuProbe
    from .node.prestart import prestart

    _probe = GpuProbe.start(_janitor.release_in_child, prestart)

import contextlib
import io
import sys

from .errors import UsageError
from .node.gpu_probe import GpuProbe
from .runner.launch import launch
from .runner.options import parse
from .runner.program import Program


def main(janitor: Janitor, probe: GpuProbe | None) -> Program:
    """Parse, launch, and return only in the process that becomes the program."""
    from .bootstrap import ranks

    rank = ranks.detect()
    silent = rank is not None and rank.index != 0  # --help is for one of them to print
    try:
        with contextlib.redirect_stdout(io.StringIO()) if silent else contextlib.nullcontext():
            asked = parse(sys.argv[1:])
    except UsageError as error:
        if rank is None or rank.index == 0:
            print(f"hpcdask: error: {error}", file=sys.stderr, flush=True)
            if rank is not None and rank.launcher == "hydra":
                from .runner.rendezvous import abort_launch

                abort_launch(rank, error.exit_code)  # another may be late, or never come
            sys.exit(error.exit_code)
        sys.exit(0)  # mpirun would kill rank 0 before it has said so
    return launch(asked, janitor, probe)


if __name__ == "__main__":
    main(_janitor, _probe).run()
