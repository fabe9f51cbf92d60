"""The first moments of a rank, or of a job on a node: it forks before it imports anything."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from hpcdask.bootstrap import reexec
from hpcdask.bootstrap.janitor import Janitor
from hpcdask.errors import UsageError
from hpcdask.logs import complain
from hpcdask.upstream.configuration import reading

if TYPE_CHECKING:
    from .gpu_probe import GpuProbe


class Prepared(NamedTuple):
    """The processes that a rank or job has before its imports."""

    janitor: Janitor
    probe: GpuProbe | None


def prepare_rank(arguments: Sequence[str], *, in_run: bool) -> Prepared:
    """Execute the command again, then fork the janitor and the probe.

    ``arguments`` are those of the command line, which nobody has read yet. With ``in_run`` it is a
    rank of a run, which a launcher may have started.
    """
    reexec.end_on_interrupt()
    reexec.reexecute()
    from hpcdask.bootstrap import ranks, resources

    if in_run:
        ranks.note_launcher()
    janitor = Janitor.start()
    resources.widen(resources.launcher_cores())  # the imports and the probe need more than one
    if in_run:
        ranks.leave_mpi_alone()
    from .gpu_probe import EarlyOptions, GpuProbe
    from .prestart import prestart

    early = EarlyOptions.read(arguments, in_run=in_run)
    prepared = Prepared(janitor, GpuProbe.start(janitor.release_in_child, early, prestart))
    _read_configuration()
    return prepared


def _read_configuration() -> None:
    """The first import that reads Dask's files; without them the process ends."""
    try:
        with reading():
            import dask.config  # noqa: F401
    except UsageError as error:
        complain(error)
        sys.exit(error.exit_code)
