"""Command line of python -m hpcdask.run, and the program that it names."""

from __future__ import annotations

import importlib.util
import os
import pkgutil
import stat
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import click

from hpcdask.bootstrap.environment import wants_folders
from hpcdask.errors import UsageError
from hpcdask.spec.argv import make_command, options, read
from hpcdask.spec.specs import RunSpec

HELP = """Run a Python program with a Dask cluster around it.

Start it under mpirun or srun, one rank per GPU, or by hand for all GPUs of this machine:

\b
    mpirun -n 8 python -m hpcdask.run script.py [args]
    srun python -m hpcdask.run -m package.module [args]
    srun python -m hpcdask.run --scheduler-file cluster.json

In the program, distributed.Client() with no argument connects to the cluster. Without a program the
cluster stays up until it gets SIGTERM or Ctrl-C, or a client shuts it down.
"""


#: Fields whose options the short help text shows.
USUAL = (
    "device",
    "protocol",
    "interface",
    "nthreads",
    "memory_limit",
    "rmm_pool_size",
    "local_directory",
    "scheduler_file",
    "timeout",
    "workers_min",
)


def command() -> click.Command:
    """Return the command line, made from the fields of `RunSpec`."""
    params: list[click.Parameter] = [
        *options(RunSpec, USUAL),
        click.Option(
            ["-m", "module"],
            is_flag=True,
            help="The program is a module: -m package.module [args].",
        ),
        click.Option(["--attached"], type=int, hidden=True),
        click.Argument(["program"], nargs=-1, type=click.UNPROCESSED),
    ]
    # what follows the program's name belongs to the program
    example = "Example: srun python -m hpcdask.run script.py"
    settings = {"allow_interspersed_args": False}
    return make_command("hpcdask run", HELP, params, epilog=example, **settings)


def parse(argv: Sequence[str]) -> RunRequest:
    """Read the command line. Raises UsageError, and SystemExit after ``--help``."""
    values = read(command(), argv)
    words, module = values.pop("program"), values.pop("module")
    attached = values.pop("attached", None)
    if module and not words:
        raise UsageError("-m needs the name of a module, such as -m hpcdask.bench")
    program = Program(words[0], list(words[1:]), module) if words else None
    return RunRequest(RunSpec(**values), program, attached)


@dataclass
class RunRequest:
    """Command line, read; `attached` is the socket to the program that started this rank."""

    spec: RunSpec
    program: Program | None = None
    attached: int | None = None


@dataclass(frozen=True)
class Program:
    """Script, folder or zip with ``__main__.py``, or with `is_module` (``-m``) a module's name."""

    target: str
    arguments: list[str] = field(default_factory=list)
    is_module: bool = False

    @property
    def name(self) -> str:
        """Return the program's name: ``/path/to/script.py``, ``-m package.module``."""
        return f"-m {self.target}" if self.is_module else os.path.abspath(self.target)

    def check(self) -> None:
        """Raise UsageError unless the program exists and can be read."""
        if self.is_module:
            name = self.target.partition(".")[0]  # importing a package is for its own process
            if not name or importlib.util.find_spec(name) is None:
                raise UsageError(
                    f"there is no module {name or self.target} in this environment: check its "
                    f"name, or install it beside hpcdask ({sys.executable})"
                )
            return
        if not os.path.exists(self.target):
            raise UsageError(
                f"the script {self.target} does not exist (looked in {os.getcwd()}). "
                f"Check the path; on several nodes it must be on a shared file system"
            )
        if not os.access(self.target, os.R_OK):
            raise UsageError(f"the script {self.target} cannot be read: check its permissions")

    def set_path(self) -> None:
        """Put first in sys.path what plain Python would: workers need it, too."""
        if self.is_module:
            folder = os.getcwd()
        elif pkgutil.get_importer(self.target):  # a folder or a zip
            folder = os.path.join(os.getcwd(), self.target)
        else:
            folder = os.path.dirname(os.path.realpath(self.target))
        if not wants_folders() or folder in (*sys.path[:1], *sys.path[-1:]):
            return
        if self.is_module and os.stat(folder).st_mode & stat.S_IWOTH:
            sys.path.append(folder)  # where anybody may put a module of any name
        else:
            sys.path.insert(0, folder)

    def command(self) -> list[str]:
        """Return the command that runs the program as plain Python does."""
        flags = sys.orig_argv[1:]
        if "-m" in flags:  # of ``python -u -m hpcdask.run``
            flags = flags[: flags.index("-m")]
        module = ["-m"] * self.is_module
        return [sys.executable, *flags, *module, self.target, *self.arguments]
