"""``python -m hpcdask.worker``: what one job of a queue runs on each of its nodes."""

from __future__ import annotations

if __name__ == "__main__":  # before there is anything to import from the current folder
    from hpcdask.bootstrap.environment import start_process

    start_process()

import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from hpcdask.bootstrap import environment, ranks, resources
from hpcdask.bootstrap.supervisor import Supervisor
from hpcdask.errors import UsageError
from hpcdask.logs import complain
from hpcdask.node.preload import variables
from hpcdask.queues.registry import job_id
from hpcdask.spec.argv import make_command, options, read
from hpcdask.spec.specs import JobSpec, WorkerSpec

HELP = """Run the workers of one job on this node, or on each node of a SLURM job.

Each worker has a device of its own. They end when the scheduler says so, when it is gone, or on
SIGTERM, after handing over what they hold.
"""


def command() -> click.Command:
    """Return the command line, made from the fields of `WorkerSpec`."""
    count: dict[str, Any] = {"type": click.IntRange(min=1), "default": 1, "show_default": True}
    params: list[click.Parameter] = [
        click.Option(
            ["--scheduler"], required=True, help="Its address, such as tls://10.0.0.1:8786."
        ),
        click.Option(["--keys"], help="File of the cluster's TLS credentials."),
        click.Option(["--cluster"], required=True, help="Begins the workers' names."),
        click.Option(["--workers"], help="Number of workers on each node.", **count),
        *(option for option in options(WorkerSpec) if option.name != "name"),
    ]
    return make_command("python -m hpcdask.worker", HELP, params)


def parse(argv: Sequence[str]) -> JobSpec:
    """Read the command line and the environment."""
    values = read(command(), argv)
    own = {name: values.pop(name, None) for name in ("scheduler", "keys", "cluster", "workers")}
    job, restarts = identity()
    return JobSpec(WorkerSpec(**values), job=job, restarts=restarts, **own)


def identity() -> tuple[str, int]:
    """Return id and restart count of this job."""
    if job := os.environ.get("HPCDASK_JOB_ID"):
        return job, int(os.environ.get("HPCDASK_RESTARTS") or 0)
    if queued := job_id():
        job, _, lives = queued.rpartition(".r")
        return (job, int(lives)) if job else (queued, 0)
    return f"{os.uname().nodename}-{os.getpid()}", 0


def main() -> NoReturn:
    try:
        asked = parse(sys.argv[1:])
    except UsageError as error:
        complain(error)
        sys.exit(error.exit_code)
    step = ranks.detect()
    node, nodes = (step.index, step.size) if step and step.launcher == "srun" else (0, 1)
    rank = ranks.Rank(node, nodes, 0, 1, os.uname().nodename, "job", asked.job)
    resources.widen(resources.launcher_cores())
    environment.add_working_folder()
    supervisor = Supervisor(variables(asked.spec, "hpcdask.node.job_agent", peers=True))
    supervisor.run("hpcdask.node.job_agent:work", rank, asked.spec, asked)


if __name__ == "__main__":
    main()
