"""Request of a batch job, checked before anything is written or submitted."""

from __future__ import annotations

import itertools
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field

from hpcdask.errors import UsageError
from hpcdask.queues.base import Allocation
from hpcdask.queues.registry import requested_gpus
from hpcdask.queues.script import one_line
from hpcdask.security.ports import PER_SCHEDULER, check_size
from hpcdask.spec.kinds import kinds
from hpcdask.spec.parsing import parse_memory, parse_port_range

#: Name of a job that runs no program.
NO_PROGRAM = "dask-cluster"


@dataclass(frozen=True, kw_only=True)
class BatchRequest(Allocation):
    """A batch job, in the words of the command line.

    `program` is followed by its arguments; if empty, the cluster stays up. `run` has options of
    ``python -m hpcdask.run``. `prologue` is shell lines before the launch, `container` is shell
    words that go before ``python``. The job runs and writes its log in `folder`.
    """

    program: tuple[str, ...]
    is_module: bool = False
    run: tuple[str, ...] = ()
    prologue: tuple[str, ...] = ()
    launcher: str | None = None
    container: str | None = None
    folder: str = field(default_factory=lambda: working_folder())

    @property
    def options(self) -> tuple[str, ...]:
        """Options of the runner, which in a job expects GPUs if it is not told that none are.

        The range of ports is that of the configuration here, which the nodes may not have.
        """
        given = {word.partition("=")[0] for word in self.run}
        ports = None if "--port-range" in given else parse_port_range(None, "--port-range")
        run = (*self.run, "--port-range", ports) if ports else self.run
        bare = (re.sub(r"^\s*#\S+", "", line) for line in self.directives)
        theirs = any(requested_gpus(line) is not None for line in bare)
        on_gpus = self.gpus_per_node or "--device" in given or theirs
        return run if on_gpus else (*run, "--device", "cpu")

    @property
    def name(self) -> str:
        """The job's name: the program's."""
        if not self.program:
            return NO_PROGRAM
        return self.program[0] if self.is_module else os.path.basename(self.program[0].rstrip("/"))

    @property
    def words(self) -> list[str]:
        """Return the words after ``python -m hpcdask.run``."""
        return [*self.options, *(["-m"] if self.is_module else []), *self.program]

    def label(self) -> str:
        """A name for files and tags, which no other job has."""
        plain = re.sub(r"\W+", "_", self.name, flags=re.ASCII).strip("_")[:40] or "job"
        return f"{plain}-{os.urandom(3).hex()}"


def wants_cpu(run: Sequence[str]) -> bool:
    """Return whether options of the runner have all workers compute on CPUs."""
    return "--device=cpu" in run or ("--device", "cpu") in itertools.pairwise(run)


def working_folder() -> str:
    """The current folder, by the name that the user knows, which nodes may know too."""
    known = os.environ.get("PWD", "")
    if os.path.isabs(known) and os.path.isdir(known) and os.path.samefile(known, "."):
        return known
    return os.getcwd()


def read_memory(text: str | None) -> int | None:
    """Bytes of ``--mem``."""
    try:
        return None if text is None else parse_memory("" if text == "auto" else text, "--mem")
    except UsageError as error:
        raise UsageError(
            f"--mem: {text!r} is not{str(error).partition(' is not')[2]}".replace(
                "0 (no limit), auto", "0 for all of the node's (SLURM)"
            )
        ) from None


def read_run(text: str) -> tuple[str, ...]:
    """Words of ``--run``."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(f"--run: {text!r}: {str(error).lower()}. Check its quotes") from None


def check(asked: BatchRequest) -> None:
    """Refuse what could not run.

    Raises UsageError if the program is not there, an option of the runner is unknown, or a line
    cannot stand in a script.
    """
    from hpcdask.runner.options import parse

    for what in ("prologue", "directive"):
        for line in asked.prologue if what == "prologue" else asked.directives:
            if not one_line(line, f"--{what}").strip():
                raise UsageError(f"--{what} is empty: leave it out")
    if asked.container is not None:
        try:
            empty = not shlex.split(one_line(asked.container, "--container"))
        except ValueError as error:
            raise UsageError(f"--container: {str(error).lower()}. Check its quotes") from None
        if empty:
            raise UsageError("--container is empty: leave it out")
    for word in asked.words:
        one_line(word, "the program's argument")
    one_line(asked.folder, "the current folder")
    alone = parse(asked.run).program
    launch = parse(asked.words)
    _check_groups(launch.spec.groups, asked)
    ucx, where = launch.spec.protocol == "ucx", "on the first node"
    check_size(
        launch.spec.configured().port_range, asked.ranks, ucx=ucx, more=PER_SCHEDULER, where=where
    )
    found = launch.program
    if alone or (found.target if found else None) != (asked.program[0] if asked.program else None):
        raise UsageError(
            f"--run {shlex.join(asked.run)!r} has more than options of python -m hpcdask.run: "
            f"the program stands behind the options of hpcdask submit"
        )
    if found is None:
        if not launch.spec.scheduler_file:
            raise UsageError(
                "which program? Name a script or -m MODULE. For a cluster that stays up: "
                '--run "--scheduler-file cluster.json"'
            )
    elif not found.is_module and asked.container is None:
        found.check()  # one in a container's image cannot be seen from here


def _check_groups(groups: tuple[str, ...], asked: BatchRequest) -> None:
    """Refuse numbers for other ranks than the job starts."""
    wanted = len(kinds(groups))
    if wanted not in (0, asked.ranks):
        raise UsageError(
            f"--groups {' '.join(groups)} is for {wanted} ranks per node, and hpcdask submit "
            f"starts {asked.ranks}, one per GPU. Save the script that --dry-run prints without "
            f"--groups, add --groups to its last line, and start {wanted} ranks per node there, "
            f"with SLURM by --ntasks-per-node={wanted}"
        )
