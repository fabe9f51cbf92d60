"""``python -m hpcdask.worker``: what one job of a queue runs on each of its nodes."""

from __future__ import annotations

if __name__ == "__main__":  # before there is anything to import from the current folder
    from hpcdask.bootstrap.environment import start_process

    start_process()

import os
import sys
from typing import NoReturn

from hpcdask.bootstrap import environment, ranks, resources
from hpcdask.bootstrap.supervisor import Supervisor
from hpcdask.errors import UsageError
from hpcdask.logs import complain
from hpcdask.node.job_options import parse
from hpcdask.node.preload import variables
from hpcdask.queues.environment import is_job_of_queue
from hpcdask.queues.registry import queue_class, system_of_job
from hpcdask.spec.job import JobSpec


def spread(asked: JobSpec) -> None:
    """In a job of several nodes, become an srun that starts this command on each of them.

    Raises UsageError if another queueing system gave several nodes, or srun does not start.
    """
    system = system_of_job()
    if system is None or not is_job_of_queue(asked.job):
        return
    try:
        starter = queue_class(system).on_each_node(os.environ)
    except UsageError as error:
        raise UsageError(f"job {asked.job} has {error}") from None
    if not starter:
        return
    try:
        os.execvp(starter[0], [*starter, sys.executable, *sys.orig_argv[1:]])
    except OSError as error:
        raise UsageError(
            f"job {asked.job} has several nodes, and {starter[0]} does not start: {error.strerror}"
        ) from None


def main() -> NoReturn:
    """From the command line to the exit code."""
    try:
        asked = parse(sys.argv[1:])
        spread(asked)
    except UsageError as error:
        complain(error)
        sys.exit(error.exit_code)
    step = ranks.detect()
    node, nodes = (step.index, step.size) if step and step.launcher == "srun" else (0, 1)
    rank = ranks.Rank(node, nodes, 0, 1, os.uname().nodename, "job", asked.job)
    resources.widen(resources.launcher_cores())
    environment.add_working_folder()
    from hpcdask.node.job_agent import run_agent

    Supervisor(variables(asked.spec, peers=True)).run(run_agent, asked, rank)


if __name__ == "__main__":
    main()
