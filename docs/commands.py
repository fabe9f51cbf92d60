"""The commands that the reference is made from."""

import click

from hpcdask import cli
from hpcdask.bench.command import bench
from hpcdask.runner.options import command

runner = command()
for param in runner.params:  # the reference has those that --help leaves out
    param.hidden = param.name == "attached"
# `hpcdask bench` hands its arguments on to a group of its own, which is listed with its workloads
hpcdask = click.Group(
    "hpcdask",
    commands={name: one for name, one in cli.main.commands.items() if name != "bench"},
    help=cli.main.help,
)

__all__ = ["bench", "hpcdask", "runner"]
