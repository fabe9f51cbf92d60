"""``python -m hpcdask.worker``: what one job of a queue runs on each of its nodes."""

from __future__ import annotations

import sys

from .node.prepare import prepare_rank

if __name__ == "__main__":
    _janitor, _probe = prepare_rank(sys.argv[1:], in_run=False)

import os
import traceback
from typing import TYPE_CHECKING, NoReturn

from . import process
from .bootstrap import reexec
from .bootstrap.janitor import Janitor
from .errors import HpcdaskError, UsageError
from .logs import complain, set_log_level
from .node.gpu_probe import GpuProbe
from .node.job_options import parse
from .queues.environment import is_job_of_queue
from .queues.registry import queue_class, system_of_job
from .security.credentials import check_configuration
from .upstream.distributed import run_in_loop

if TYPE_CHECKING:
    from .node.job_agent import JobAgent
    from .spec.job import JobSpec


def spread(asked: JobSpec, janitor: Janitor) -> None:
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
    janitor.dismiss()
    try:
        os.execvp(starter[0], [*starter, sys.executable, *sys.orig_argv[1:]])
    except OSError as error:
        raise UsageError(
            f"job {asked.job} has several nodes, and {starter[0]} does not start: {error.strerror}"
        ) from None


def main(janitor: Janitor, probe: GpuProbe | None) -> NoReturn:
    """From the command line to the exit code."""
    try:
        asked = parse(sys.argv[1:])
        spread(asked, janitor)
    except UsageError as error:
        complain(error)
        sys.exit(error.exit_code)
    try:
        part = start(asked, janitor, probe)
    except HpcdaskError as error:
        complain(f"job {asked.job} on {os.uname().nodename}: {error}")
        process.leave(error.exit_code)
    except Exception:
        traceback.print_exc()
        process.leave(1)
    run_in_loop(part.run())
    raise AssertionError("run() does not return")


def start(asked: JobSpec, janitor: Janitor, probe: GpuProbe | None) -> JobAgent:
    """Fork what the workers are forked from, before the first thread."""
    check_configuration()
    import distributed  # noqa: F401  (once: all that follows is forked)

    from .node import forking, forkserver
    from .node.job_agent import JobAgent
    from .node.preflight import check_parts
    from .node.scratch import new_scratch
    from .security import ports

    process.mark("distributed imported")
    ports.use(asked.spec.port_range)
    reexec.adopt_configured_pre_spawn(janitor)
    reexec.add_working_folder()
    check_parts(asked.spec)
    scratch = new_scratch(asked.spec, janitor)
    forkserver.prepare_forks()
    set_log_level()
    forkserver.start_forkserver(asked.spec, scratch, forking.Forker(janitor, probe), peers=True)
    return JobAgent(asked, scratch, probe)


if __name__ == "__main__":
    main(_janitor, _probe)
