"""``hpcdask``: submit a program, see and end the jobs of one's clusters, check and measure."""

from __future__ import annotations

import sys
from typing import Any

import click

from hpcdask import __version__
from hpcdask.errors import HpcdaskError
from hpcdask.jobs.command import cleanup, jobs
from hpcdask.submit.command import script, submit

SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


class Commands(click.Group):
    """Commands whose errors are one line and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except HpcdaskError as error:
            click.echo(f"hpcdask: error: {error}", err=True)
            ctx.exit(error.exit_code)


@click.group(
    cls=Commands,
    context_settings=SETTINGS,
    epilog="Example: hpcdask submit --gpus-per-node 4 script.py. Each command's --help has one.",
)
@click.version_option(__version__, "-V", "--version", message="hpcdask %(version)s")
def main() -> None:
    """Dask clusters on the GPUs of a queueing system."""


for command in (submit, script, jobs, cleanup):
    main.add_command(command)


@main.command(epilog="Example: srun hpcdask doctor")
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object.")
@click.option(
    "--timeout",
    default=60.0,
    show_default=True,
    type=click.FloatRange(min=1),
    metavar="SECONDS",
    help="How long all ranks of a launch have to arrive.",
)
def doctor(as_json: bool, timeout: float) -> None:
    """Check that Dask will run at full speed here; under srun or mpirun, on all nodes.

    The exit code is 0 if all is well, 1 with warnings, 2 with errors.
    """
    from hpcdask.doctor.command import run

    sys.exit(run(as_json=as_json, timeout=timeout))


@main.command(
    add_help_option=False, context_settings={"ignore_unknown_options": True}, options_metavar=""
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="WORKLOAD [OPTIONS]")
def bench(arguments: tuple[str, ...]) -> None:
    """Measure what a cluster, or this machine, delivers against what its hardware allows."""
    from hpcdask.bench.command import main

    sys.exit(main(arguments))


if __name__ == "__main__":
    main(prog_name="hpcdask")
