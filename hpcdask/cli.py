"""``hpcdask``: submit a program, see and end the jobs of one's clusters, check and measure."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from hpcdask import __version__
from hpcdask.bootstrap.environment import interpreter
from hpcdask.clusters.command import attach, down, list_, scale, up
from hpcdask.errors import HpcdaskError
from hpcdask.logs import complain
from hpcdask.stacks.command import logs, stacks
from hpcdask.submit.command import submit
from hpcdask.upstream.configuration import reading

SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}

#: The commands, in the order in which they are met.
SECTIONS = {
    "Run a program": ("run", "submit"),
    "Clusters that outlive a program": ("up", "scale", "attach", "down"),
    "See what runs": ("list", "stacks", "logs"),
    "Check and measure": ("doctor", "bench"),
}


class Commands(click.Group):
    """Commands in sections, whose errors are one line and an exit code."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, names in SECTIONS.items():
            with formatter.section(title):
                found = ((name, self.commands[name]) for name in names if name in self.commands)
                formatter.write_dl([(name, one.get_short_help_str(70)) for name, one in found], 8)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with reading():
                return super().invoke(ctx)
        except HpcdaskError as error:
            complain(error)
            ctx.exit(error.exit_code)


class PassedOn(click.Command):
    """A command that hands its arguments on as they are: options, ``--`` and ``--help``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.params["arguments"] = tuple(args)
        return []


@click.group(
    cls=Commands,
    context_settings=SETTINGS,
    epilog="Example: hpcdask run script.py. Each command's --help has one.",
)
@click.version_option(__version__, "-V", "--version", message="hpcdask %(version)s")
def main() -> None:
    """Run Dask on the GPUs of a cluster, and measure what it delivers."""


for command in (submit, list_, down, stacks, logs, up, scale, attach):
    main.add_command(command)


@main.command(epilog="Example: srun hpcdask doctor")
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object.")
@click.option(
    "--timeout",
    default=60.0,
    type=click.FloatRange(1, 86400),
    metavar="SECONDS",
    help="Wait this long for all ranks of a launch. Default: 60 s.",
)
@click.option(
    "--port-range",
    metavar="FIRST-LAST",
    help="Check these ports, such as 20000-20999. Default: hpcdask.port-range of Dask's "
    "configuration.",
)
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu"]),
    default="auto",
    help="What workers will compute on. cpu: GPUs are not looked at. Default: auto.",
)
@click.option(
    "--nccl",
    is_flag=True,
    help="Also sum arrays over NCCL between all GPUs, and measure the bandwidth.",
)
def doctor(as_json: bool, timeout: float, port_range: str | None, device: str, nccl: bool) -> None:
    """Check that Dask will run at full speed here.

    Under srun or mpirun it checks all nodes. The exit code is 0 if all is well, 1 with warnings,
    2 with errors.
    """
    from hpcdask.doctor.command import run

    gpus = device != "cpu"
    run(as_json=as_json, timeout=timeout, port_range=port_range, with_nccl=nccl, gpus=gpus)


@main.command(cls=PassedOn, add_help_option=False, options_metavar="")
@click.argument(
    "arguments", nargs=-1, type=click.Path(), metavar="[OPTIONS] [PROGRAM [ARGUMENTS]...]"
)
def run(arguments: tuple[str, ...]) -> None:
    """Run a Python program with a Dask cluster around it.

    The same as python -m hpcdask.run, with the same options.
    """
    command = [*interpreter(), "-m", "hpcdask.run", *arguments]
    os.execv(command[0], command)  # a rank has to fork before it imports


@main.command(cls=PassedOn, add_help_option=False, options_metavar="")
@click.argument("arguments", nargs=-1, metavar="WORKLOAD [OPTIONS]")
def bench(arguments: tuple[str, ...]) -> None:
    """Measure a cluster, and compare it with its hardware's limits."""
    from hpcdask.bench.command import main

    sys.exit(main(arguments))
