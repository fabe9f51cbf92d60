"""The first moments of a rank, or of a job on a node: it forks before it imports anything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hpcdask.bootstrap import reexec
from hpcdask.bootstrap.janitor import Janitor

if TYPE_CHECKING:
    from .gpu_probe import GpuProbe


def prepare_rank(arguments: Sequence[str], *, in_run: bool) -> tuple[Janitor, GpuProbe | None]:
    """Execute the command again, then fork the janitor and the probe.

    ``arguments`` are those of the command line, which nobody has read yet. With ``in_run`` it is a
    rank of a run, which a launcher may have started.
    """
    reexec.end_on_interrupt()
    reexec.reexecute()
    janitor = Janitor.start()
    from hpcdask.bootstrap import ranks, resources

    if in_run:
        ranks.note_launcher()
    resources.widen(resources.launcher_cores())  # the imports and the probe need more than one
    if in_run:
        ranks.leave_mpi_alone()
    from .gpu_probe import EarlyOptions, GpuProbe
    from .prestart import prestart

    early = EarlyOptions.read(arguments, in_run=in_run)
    return janitor, GpuProbe.start(janitor.release_in_child, early, prestart)
