"""``hpcdask submit`` and ``hpcdask script``."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

import click

from hpcdask.errors import UsageError
from hpcdask.queues.registry import NAMES

SYSTEMS = tuple(name for name in NAMES if name != "local")
#: What follows the program's name belongs to the program.
CONTEXT = {"allow_interspersed_args": False}
PROGRAM = "[PROGRAM [ARGUMENTS]...]"

OPTIONS = (
    click.option(
        "-N",
        "--nodes",
        default=1,
        show_default=True,
        type=click.IntRange(1),
        metavar="N",
        help="Nodes.",
    ),
    click.option(
        "--gpus-per-node",
        default=1,
        show_default=True,
        type=click.IntRange(0),
        metavar="N",
        help="One Dask worker is started per GPU; with 0, one per node, on its CPU.",
    ),
    click.option(
        "-t",
        "--time",
        "walltime",
        metavar="TIME",
        help="Walltime, such as 1:00:00. Default: as configured for dask-jobqueue, 30 min.",
    ),
    click.option(
        "-q", "--queue", "--partition", "queue", metavar="NAME", help="Queue; SLURM's partition."
    ),
    click.option("-A", "--account", metavar="NAME", help="Account or project."),
    click.option(
        "--cpus-per-gpu",
        type=click.IntRange(1),
        metavar="N",
        help="Cores per GPU. Default: what the site gives.",
    ),
    click.option(
        "--mem",
        metavar="SIZE",
        help="Host memory per node, such as 64GiB; 0 for all (SLURM). Default: the site's.",
    ),
    click.option(
        "--prologue",
        multiple=True,
        metavar="LINE",
        help='Shell line before the launch, such as "module load cuda" (may be repeated).',
    ),
    click.option(
        "--directive",
        "directives",
        multiple=True,
        metavar="LINE",
        help="One more option of the queueing system, such as --exclusive (may be repeated).",
    ),
    click.option(
        "--launcher",
        type=click.Choice(["srun", "mpirun"]),
        help="Default: srun with SLURM, else mpirun.",
    ),
    click.option(
        "--container",
        metavar="WORDS",
        help='What goes before python, such as "apptainer exec --nv image.sif".',
    ),
    click.option(
        "--run",
        default="",
        metavar="OPTIONS",
        help='Options of python -m hpcdask.run, such as "--protocol ucx".',
    ),
    click.option("-m", "is_module", is_flag=True, help="The program is a module."),
    click.argument("program", nargs=-1, type=click.UNPROCESSED, metavar=PROGRAM),
)


def _job_options(function: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(OPTIONS):
        function = option(function)
    return function


@click.command(
    context_settings=CONTEXT,
    epilog="Example: hpcdask submit -N 2 --gpus-per-node 4 -t 1:00:00 script.py --epochs 10",
)
@click.option(
    "--system",
    type=click.Choice(SYSTEMS),
    help="Queueing system. Default: the one whose commands are found here.",
)
@click.option("--dry-run", is_flag=True, help="Print the script, and submit nothing.")
@click.option(
    "--wait",
    is_flag=True,
    help="Copy the log to stdout as it grows, and return the program's exit code. Ctrl-C and "
    "SIGTERM cancel the job.",
)
@_job_options
def submit(system: str | None, dry_run: bool, wait: bool, **job: Any) -> None:
    """Submit a Python program as one batch job, with a Dask cluster on all nodes of the job.

    Everything from the program on belongs to the program. The exit code is 2 for bad input, 1
    if the queue does not take the job.
    """
    asked = _read(job)
    if system is None:
        from .batch import find_system

        system = find_system()
    if not dry_run:
        sys.exit(asyncio.run(_submit(system, asked, wait=wait)))
    if system is None:
        system = "slurm"
        _say("no queueing system is found here: this is a script for SLURM; see --system")
    _print_script(system, asked)


@click.group(
    epilog="Example: hpcdask script pbs -N 2 --gpus-per-node 4 script.py > job.sh",
)
def script() -> None:
    """Print the script that `hpcdask submit` would submit; works without the queue's commands.

    It is the same as `hpcdask submit --dry-run --system SYSTEM`.
    """


def _script_of(system: str) -> click.Command:
    @click.command(
        system,
        context_settings=CONTEXT,
        epilog=f"Example: hpcdask script {system} --gpus-per-node 4 script.py",
        help=f"Print a batch script for {system}.",
    )
    @_job_options
    def command(**job: Any) -> None:
        _print_script(system, _read(job))

    return command


for _system in SYSTEMS:
    script.add_command(_script_of(_system))


def _read(job: dict[str, Any]) -> Any:
    from . import request

    read = request.BatchRequest(
        memory=request.read_memory(job.pop("mem")), run=request.read_run(job.pop("run")), **job
    )
    request.check(read)
    return read


def _print_script(system: str, asked: Any) -> None:
    from .batch import prepare

    click.echo(asyncio.run(prepare(system, asked)).text, nl=False)


async def _submit(system: str | None, asked: Any, *, wait: bool) -> int:
    from .batch import SYSTEMS, door, prepare
    from .follow import submit_and_wait, tell

    instead = "hpcdask script SYSTEM shows what would be submitted"
    if system is None:
        from hpcdask.queues.base import where_to_run

        commands = ", ".join(door(name).programs[0] for name in SYSTEMS)
        raise UsageError(
            f"no queueing system is found here: none of {commands} is on PATH with its "
            f"companions. {where_to_run(door('slurm'))}. {instead}"
        )
    door(system).check(instead.replace("SYSTEM", system))
    batch = await prepare(system, asked)
    if wait:
        return await submit_and_wait(batch, _say)
    tell(batch, await batch.submit(), click.echo)
    return 0


def _say(text: str) -> None:
    """What is not the program's output goes to stderr."""
    click.echo(f"hpcdask: {text}", err=True)
