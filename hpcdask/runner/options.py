"""Command line of python -m hpcdask.run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import click

from hpcdask.errors import UsageError
from hpcdask.spec.argv import make_command, options, read
from hpcdask.spec.help import Option
from hpcdask.spec.parsing import UNREAD
from hpcdask.spec.specs import RunSpec

from .program import Program

HELP = """Run a Python program with a Dask cluster around it.

Start it under mpirun or srun, one rank per GPU, or by hand for all GPUs of this machine:

\b
    mpirun -n 8 python -m hpcdask.run script.py [args]
    srun python -m hpcdask.run -m package.module [args]
    srun python -m hpcdask.run --scheduler-file cluster.json

In the program, distributed.Client() with no argument connects to the cluster. Without a program the
cluster stays up until it gets SIGTERM or Ctrl-C, or a client shuts it down.
"""


#: What other tools call the number of workers.
COUNTS = {"-n", "-np", "--np", "--n-workers", "--nworkers", "--num-workers", "--nprocs"}


def command() -> click.Command:
    """The command line, made from the fields of `RunSpec`."""
    params = [
        *options(RunSpec),
        Option(
            ["-m", "module"],
            is_flag=True,
            help="The program is a module: -m package.module [args].",
            group="Start",
        ),
        click.Option(["--attached"], type=int, hidden=True),
        click.Argument(["program"], nargs=-1, type=click.UNPROCESSED),
    ]
    # what follows the program's name belongs to the program
    example = "Example: srun python -m hpcdask.run script.py"
    settings = {"allow_interspersed_args": False}
    return make_command("python -m hpcdask.run", HELP, params, epilog=example, **settings)


def _advise(error: click.UsageError) -> str:
    if not isinstance(error, click.NoSuchOption) or error.option_name not in COUNTS:
        return ""
    return (
        f"{error.option_name}: the launcher says how many workers there are, one for each of its "
        f"ranks: mpirun -n 4 python -m hpcdask.run … (without one, there is a worker for each GPU, "
        f"or as LocalCluster has them on a CPU)"
    )


def parse(argv: Sequence[str]) -> RunRequest:
    """Read the command line.

    Raises UsageError if an option or its value is not understood, and SystemExit after ``--help``.
    """
    values = read(command(), argv, _advise)
    target, module, attached = values.pop("program"), values.pop("module"), values.pop("attached")
    if module and not target:
        raise UsageError("-m needs the name of a module, such as -m hpcdask.bench")
    program = Program(target[0], list(target[1:]), module) if target else None
    values["port_range"] = values["port_range"] or UNREAD  # a rank's own process imports no dask
    return RunRequest(RunSpec(**values), program, attached)


@dataclass
class RunRequest:
    """Request of the command line to this rank.

    `attached` is the file descriptor of a socket to the program that started this rank itself
    (`hpcdask.Runner`), or None.
    """

    spec: RunSpec
    program: Program | None = None
    attached: int | None = None
