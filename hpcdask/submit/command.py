"""``hpcdask submit``."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import click
from click.core import ParameterSource

from hpcdask.errors import UsageError
from hpcdask.logs import say
from hpcdask.queues.base import WHERE_TO_RUN
from hpcdask.queues.registry import batch_systems, queue_class


class Submit(click.Command):
    """The command, which says where an option of the runner belongs."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Raise UsageError for options of ``hpcdask run`` outside of ``--run``."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            from hpcdask.runner.options import command

            name = error.option_name
            if not any(name in (*param.opts, *param.secondary_opts) for param in command().params):
                raise
            raise UsageError(
                f'{name} is an option of hpcdask run: hpcdask submit --run "{name} …"'
            ) from None


@click.command(
    cls=Submit,
    # What follows the program's name belongs to the program
    context_settings={"allow_interspersed_args": False},
    epilog="Example: hpcdask submit -N 2 --gpus-per-node 4 -t 1:00:00 script.py",
)
@click.option(
    "--system",
    type=click.Choice(batch_systems()),
    help="Queueing system. Default: the one whose commands are found here.",
)
@click.option("--dry-run", is_flag=True, help="Print the script and submit nothing.")
@click.option(
    "--wait",
    is_flag=True,
    help="Show the log while the job runs, and return the program's exit code. Ctrl-C and SIGTERM "
    "cancel the job.",
)
@click.option(
    "-N",
    "--nodes",
    default=1,
    show_default=True,
    type=click.IntRange(1),
    metavar="N",
    help="Number of nodes.",
)
@click.option(
    "--gpus-per-node",
    default=1,
    show_default=True,
    type=click.IntRange(0),
    metavar="N",
    help="GPUs per node; each gets a Dask worker. 0: one worker per node, on its CPU.",
)
@click.option(
    "--device",
    type=click.Choice(["cpu"]),
    help="cpu: no GPU is requested, as with --gpus-per-node 0.",
)
@click.option(
    "-t",
    "--time",
    "walltime",
    metavar="TIME",
    help="Walltime, such as 1:00:00. Default: as configured for dask-jobqueue, 30 min.",
)
@click.option(
    *("-p", "-q", "--partition", "--queue", "queue"),
    metavar="NAME",
    help="Queue; SLURM's partition.",
)
@click.option("-J", "--job-name", metavar="NAME", help="Name of the job. Default: the program's.")
@click.option("-A", "--account", metavar="NAME", help="Account or project to charge.")
@click.option(
    *("-c", "--cpus-per-gpu"),
    type=click.IntRange(1),
    metavar="N",
    help="Cores per GPU, as --cpus-per-task of sbatch: each GPU has a rank. Default: the site's.",
)
@click.option(
    "--mem",
    metavar="SIZE",
    help="Host memory per node, as by sbatch: 64G is 64 GiB, 64000 is in MB, 0 is all (SLURM). "
    "Default: the site's.",
)
@click.option(
    "--prologue",
    multiple=True,
    metavar="LINE",
    help='Shell line before the launch, such as "module load cuda". May be repeated.',
)
@click.option(
    "--directive",
    "directives",
    multiple=True,
    metavar="LINE",
    help="Extra option of the queueing system, such as --exclusive. May be repeated.",
)
@click.option(
    "--launcher",
    type=click.Choice(["srun", "mpirun"]),
    help="What starts the ranks. Default: srun with SLURM, else mpirun.",
)
@click.option(
    "--container",
    metavar="WORDS",
    help='Command before python, such as "apptainer exec --nv image.sif".',
)
@click.option(
    "--run",
    default="",
    metavar="OPTIONS",
    help='Options of hpcdask run, all in quotes, such as "--protocol ucx".',
)
@click.option("-m", "is_module", is_flag=True, help="The program is a module.")
@click.argument("program", nargs=-1, type=click.UNPROCESSED, metavar="[PROGRAM [ARGUMENTS]...]")
def submit(system: str | None, dry_run: bool, wait: bool, **job: Any) -> None:
    """Submit a Python program as one batch job with a Dask cluster.

    The cluster uses all nodes of the job. Words after the program are its arguments. The exit code
    is 2 for bad input, 1 if the queue refuses the job.
    """
    from .batch import find_system, prepare

    asked = _read(job)
    system = system or find_system()
    if not dry_run:
        sys.exit(asyncio.run(_submit(system, asked, wait=wait)))
    if system is None:
        system = batch_systems()[0]
        title = queue_class(system).title
        say(f"no queueing system is found here: this is a script for {title}; see --system")
    click.echo(asyncio.run(prepare(system, asked)).text, nl=False)


def _read(job: dict[str, Any]) -> Any:
    from . import request

    run = request.read_words(job.pop("run"), "--run")
    source = click.get_current_context().get_parameter_source("gpus_per_node")
    default = source is ParameterSource.DEFAULT
    cpu = job.pop("device") == "cpu"
    if cpu and not default and job["gpus_per_node"]:
        raise UsageError("--device cpu and --gpus-per-node: choose one of them")
    if cpu or (default and request.wants_cpu(run)):
        job["gpus_per_node"] = 0
    asked = request.BatchRequest(memory=request.read_memory(job.pop("mem")), run=run, **job)
    request.check(asked)
    return asked


async def _submit(system: str | None, asked: Any, *, wait: bool) -> int:
    from .batch import prepare
    from .follow import submit_and_wait, tell

    instead = "hpcdask submit --dry-run --system SYSTEM shows what would be submitted"
    if system is None:
        commands = ", ".join(queue_class(name).programs[0] for name in batch_systems())
        raise UsageError(
            f"no queueing system is found here: none of {commands} is on PATH with its "
            f"companions. {WHERE_TO_RUN}. {instead}"
        )
    queue_class(system)().check(instead.replace("SYSTEM", system))
    batch = await prepare(system, asked)
    if wait:
        return await submit_and_wait(batch, say)
    tell(batch, await batch.submit(), click.echo)
    return 0
