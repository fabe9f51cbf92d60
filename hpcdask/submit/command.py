"""``hpcdask submit``."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

import click

from hpcdask.errors import UsageError
from hpcdask.logs import say
from hpcdask.queues.registry import batch_systems, queue_class


class Submit(click.Command):
    """The command, which says where an option of the runner belongs."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Raise UsageError for options of ``hpcdask run`` outside of ``--run``."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            raise UsageError(
                f"{error.format_message()} An option of hpcdask run goes into --run: "
                f'hpcdask submit --run "{error.option_name} …"'
            ) from None


def option(words: str, text: str, **settings: Any) -> Callable[[Any], Any]:
    """Make an option of its names and the word for its value, as its help text shows them."""
    names = words.split()
    metavar = names.pop() if names[-1].isupper() else None
    return click.option(*names, metavar=metavar, help=text, **settings)


@click.command(
    cls=Submit,
    # What follows the program's name belongs to the program
    context_settings={"allow_interspersed_args": False},
    epilog="Example: hpcdask submit -N 2 --gpus-per-node 4 -t 1:00:00 script.py",
)
@option(
    "--system",
    "Queueing system. Default: the one whose commands are found here.",
    type=click.Choice(batch_systems()),
)
@option("--dry-run", "Print the script and submit nothing.", is_flag=True)
@option(
    "--wait",
    "Show the log while the job runs, and return the program's exit code. Ctrl-C and SIGTERM "
    "cancel the job.",
    is_flag=True,
)
@option("-N --nodes N", "Number of nodes.", default=1, show_default=True, type=click.IntRange(1))
@option(
    "--gpus-per-node N",
    "GPUs per node; each gets a Dask worker. 0: one worker per node, on its CPU. Default: 1.",
    type=click.IntRange(0),
)
@option(
    "--device",
    "cpu: no GPU is requested, as with --gpus-per-node 0.",
    type=click.Choice(["cpu"]),
)
@option(
    "-t --time walltime TIME",
    "Walltime, such as 1:00:00. Default: as configured for dask-jobqueue, 30 min.",
)
@option("-p -q --partition --queue queue NAME", "Queue; SLURM's partition.")
@option("-J --job-name NAME", "Name of the job. Default: the program's.")
@option("-A --account NAME", "Account or project to charge.")
@option(
    "-c --cpus-per-gpu N",
    "Cores per GPU, as --cpus-per-task of sbatch: each GPU has a rank. Default: the site's.",
    type=click.IntRange(1),
)
@option(
    "--mem SIZE",
    "Host memory per node, as by sbatch: 64G is 64 GiB, 64000 is in MB, 0 is all (SLURM). "
    "Default: the site's.",
)
@option(
    "--prologue LINE",
    'Shell line before the launch, such as "module load cuda". May be repeated.',
    multiple=True,
)
@option(
    "--directive directives LINE",
    "Extra option of the queueing system, such as --exclusive. May be repeated.",
    multiple=True,
)
@option("--launcher NAME", "What starts the ranks. Default: srun with SLURM, else mpirun.")
@option("--container WORDS", 'Command before python, such as "apptainer exec --nv image.sif".')
@option("--run OPTIONS", 'Options of hpcdask run, all in quotes, such as "--protocol ucx".')
@option("-m is_module", "The program is a module.", is_flag=True)
@click.argument("program", nargs=-1, type=click.UNPROCESSED, metavar="[PROGRAM [ARGUMENTS]...]")
def submit(system: str | None, dry_run: bool, wait: bool, **job: Any) -> None:
    """Submit a Python program as one batch job with a Dask cluster.

    The cluster uses all nodes of the job. Words after the program are its arguments. The exit code
    is 2 for bad input, 1 if the queue refuses the job.
    """
    from .batch import find_system, prepare, read_request
    from .follow import submit_and_wait, tell

    instead = "hpcdask submit --dry-run --system SYSTEM shows what would be submitted"
    if system is None and (system := find_system()) is None:
        system, instead = batch_systems()[0], f"No other system is found either. {instead}"
        if dry_run:
            title = queue_class(system).title
            say(f"no queueing system is found here: this is a script for {title}; see --system")
    queue = queue_class(system)()
    if not dry_run:
        queue.check(instead)
    batch = asyncio.run(prepare(queue, read_request(queue, **job)))
    if dry_run:
        click.echo(batch.text, nl=False)
    elif wait:
        sys.exit(asyncio.run(submit_and_wait(batch, say)))
    else:
        tell(batch, asyncio.run(batch.submit()), click.echo)
