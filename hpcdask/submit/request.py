"""Request of a batch job, checked before anything is written or submitted."""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass, field
from typing import Any

from hpcdask.errors import UsageError
from hpcdask.queues.base import Allocation, Queue
from hpcdask.queues.helpers import one_line
from hpcdask.runner.options import parse
from hpcdask.security.ports import PER_SCHEDULER, check_size
from hpcdask.spec.parsing import configured_port_range


def working_folder() -> str:
    """Return the current folder, by the name that the user knows, which nodes may know too."""
    known = os.environ.get("PWD", "")
    if os.path.isabs(known) and os.path.isdir(known) and os.path.samefile(known, "."):
        return known
    return os.getcwd()


@dataclass(frozen=True, kw_only=True)
class BatchRequest(Allocation):
    """A batch job, in the words of the command line.

    `program` is followed by its arguments; if empty, the cluster stays up. `run` has options of
    ``python -m hpcdask.run``. `prologue` is shell lines before the launch, `container` is shell
    words that go before ``python``. The job runs and writes its log in `folder`. If `own_gpus`, the
    directives request GPUs.
    """

    program: tuple[str, ...]
    is_module: bool = False
    run: tuple[str, ...] = ()
    prologue: tuple[str, ...] = ()
    launcher: str | None = None
    container: str | None = None
    job_name: str | None = None
    own_gpus: bool = False
    folder: str = field(default_factory=working_folder)

    @property
    def words(self) -> list[str]:
        """Return the words after ``python -m hpcdask.run``."""
        return [*self.run, *(["-m"] if self.is_module else []), *self.program]

    @property
    def name(self) -> str:
        """Return the job's name: the program's, unless the user gave one."""
        if self.job_name or not self.program:
            return self.job_name or "dask-cluster"
        return self.program[0] if self.is_module else os.path.basename(self.program[0].rstrip("/"))


def read(
    system: Queue,
    *,
    run: str | None,
    mem: str | None,
    device: str | None,
    gpus_per_node: int | None,
    directives: tuple[str, ...],
    **job: Any,
) -> BatchRequest:
    """Read the options of the command line. Raises UsageError for a job that could not run."""
    options = list(read_words(run or "", "--run"))
    launch = parse(options)
    if launch.program:
        raise UsageError(
            f"--run {run!r} has more than options of python -m hpcdask.run: the program stands "
            f"behind the options of hpcdask submit"
        )
    if device and gpus_per_node:
        raise UsageError("--device cpu and --gpus-per-node: choose one of them")
    if gpus_per_node is None:
        gpus_per_node = 0 if "cpu" in (device, launch.spec.device) else 1
    # a directive may have been pasted with its prefix
    bare = tuple(line.strip().removeprefix(system.prefix).strip() for line in directives)
    own_gpus = any(system.requested_gpus(line) is not None for line in bare)
    # the nodes may not have the configuration of this machine
    if launch.spec.port_range is None and (ports := configured_port_range()):
        options += ["--port-range", ports]
    # in a job, the runner expects GPUs
    if not (gpus_per_node or own_gpus) and launch.spec.device == "auto":
        options += ["--device", "cpu"]
    asked = BatchRequest(
        memory=read_memory(mem),
        run=tuple(options),
        gpus_per_node=gpus_per_node,
        directives=bare,
        own_gpus=own_gpus,
        **job,
    )
    check(asked)
    return asked


def read_memory(text: str | None) -> int | None:
    """Return the bytes of ``--mem``, which has sbatch's units: MB without one, and 1 G = 1024 M."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(?:\s*([KMGT])(?:i?B)?)?", text.strip(), re.I)
    if match is None:
        raise UsageError(
            f"--mem: {text!r} is not an amount of memory. Accepted, as by sbatch: 64G, 64GiB, "
            f"64000 (MB), 0 for all of the node's (SLURM)"
        )
    return int(float(match[1]) * 1024 ** (1 + "KMGT".index((match[2] or "M").upper())))


def read_words(text: str, option: str) -> list[str]:
    """Split the value of an option into shell words. Raises UsageError for unbalanced quotes."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{option}: {text!r}: {str(error).lower()}. Check its quotes") from None


def check(asked: BatchRequest) -> None:
    """Raise UsageError for lines that no script can hold, and for a program that cannot run."""
    written = {
        "--prologue": asked.prologue,
        "--container": [asked.container or ""],
        "the program's argument": asked.words,
        "the current folder": [asked.folder],
    }
    for what, lines in written.items():
        for line in lines:
            one_line(line, what)
    read_words(asked.container or "", "--container")
    launch = parse(asked.words)
    wanted = len(launch.spec.kinds())
    if wanted not in (0, asked.ranks):
        raise UsageError(
            f"--groups {' '.join(launch.spec.groups)} is for {wanted} ranks per node, and hpcdask "
            f"submit starts {asked.ranks}, one per GPU. Save the script that --dry-run prints "
            f"without --groups, add --groups to its last line, and start {wanted} ranks per node "
            f"there, with SLURM by --ntasks-per-node={wanted}"
        )
    ports, ucx = launch.spec.configured().port_range, launch.spec.protocol == "ucx"
    check_size(ports, asked.ranks, ucx=ucx, more=PER_SCHEDULER, where="on the first node")
    program = launch.program
    if program is None and not launch.spec.scheduler_file:
        raise UsageError(
            "which program? Name a script or -m MODULE. For a cluster that stays up: "
            '--run "--scheduler-file cluster.json"'
        )
    if program is not None and not program.is_module and not asked.container:
        program.check()  # one in a container's image cannot be seen from here
