"""``python -m hpcdask.worker``: what one job of a queue runs on each of its nodes."""

from __future__ import annotations

from . import process
from .bootstrap import janitor, reexec, resources
from .queues import environment
from .queues.environment import _listed_nodes, is_the_queues
from .security.credentials import check_configuration, load_credentials

if __name__ == "__main__":
    reexec.end_on_interrupt()
    reexec.reexecute()
    _janitor = janitor.Janitor.start()

    resources.widen(resources.launcher_cores())  # the imports and the scout need more than one
    from hpcdask.prestart import prestart
    from hpcdask.scout import Scout

    _scout = Scout.start(_janitor.release_in_child, prestart)

import os
import re
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import click

from hpcdask.errors import HpcdaskError, UsageError
from hpcdask.scout import Scout

from .spec.argv import options
from .spec.specs import WorkerSpec

if TYPE_CHECKING:
    from .joblife import JobPart
    from .spec.job import Asked

HELP = """Run the workers of one job on this node, or on each node of a SLURM job.

Each worker has a device of its own. They end when the scheduler says so, when it is gone, or on
SIGTERM, after handing over what they hold.
"""


def command() -> click.Command:
    """The command line, made from the fields of `WorkerSpec`; the names are made here."""
    return click.Command(
        "python -m hpcdask.worker",
        params=[
            click.Option(
                ["--scheduler"], required=True, help="Its address, such as tls://10.0.0.1:8786."
            ),
            click.Option(["--keys"], help="Folder of the cluster's TLS credentials."),
            click.Option(["--cluster"], required=True, help="Begins the workers' names."),
            click.Option(
                ["--workers"],
                type=click.IntRange(min=1),
                default=1,
                show_default=True,
                help="Number of workers on each node.",
            ),
            *(option for option in options(WorkerSpec) if option.name != "name"),
        ],
        help=HELP,
        context_settings={"max_content_width": 100, "help_option_names": ["-h", "--help"]},
    )


def parse(argv: Sequence[str]) -> Asked:
    """Read the command line and the environment.

    Raises
    ------
    UsageError
        An option is unknown or its value is not understood, or the key folder is of no use.
    SystemExit
        After ``--help``.
    """
    try:
        with command().make_context("python -m hpcdask.worker", list(argv)) as context:
            values = dict(context.params)
    except click.exceptions.Exit as stop:
        raise SystemExit(stop.exit_code) from None
    except click.UsageError as error:
        raise UsageError(
            f"{error.format_message()} (python -m hpcdask.worker --help lists the options)"
        ) from None
    own = {name: values.pop(name) for name in ("scheduler", "keys", "cluster", "workers")}
    _check_access(own["scheduler"], own["keys"])
    job, restarts = identity()
    spec = WorkerSpec(**values)
    from .spec.job import Asked  # distributed comes with it: bad options do not wait for that

    return Asked(spec, job=job, restarts=restarts, **own)


def _check_access(scheduler: str, keys: str | None) -> None:
    match = re.fullmatch(r"(tls|tcp)://(\[[^\[\]]+\]|[^\s/:\[\]]+):(\d+)", scheduler)
    if match is None or not 0 < int(match[3]) < 65536:
        raise UsageError(
            f"--scheduler: {scheduler!r} is not an address of a scheduler. "
            f"Accepted: tls://HOST:PORT, tcp://HOST:PORT"
        )
    if match[1] == "tls" and not keys:
        raise UsageError(f"--scheduler: {scheduler} needs the cluster's keys: add --keys FOLDER")
    if match[1] == "tcp" and keys:
        raise UsageError(f"--keys: {scheduler} does not use keys: leave them out, or name tls://")
    if keys and "tls_worker_key" not in load_credentials(keys):
        raise UsageError(f"--keys: {keys} holds no key for workers")


def identity() -> tuple[str, int]:
    """Id and restart count of this job."""
    restarts = os.environ.get("HPCDASK_RESTARTS") or "0"
    if not re.fullmatch(r"\d+", restarts):
        raise UsageError(f"HPCDASK_RESTARTS: {restarts!r} is not a number")
    if job := os.environ.get("HPCDASK_JOB_ID"):
        return job, int(restarts)
    if queued := environment.job_id():
        job, _, lives = queued.rpartition(".r")
        return (job, int(lives)) if job else (queued, 0)
    return f"{os.uname().nodename}-{os.getpid()}", 0


def spread(asked: Asked, janitor: janitor.Janitor) -> None:
    """In a job of several nodes, become an srun that starts this command on each of them.

    Raises
    ------
    UsageError
        Another queueing system gave several nodes, or srun does not start.
    """
    if not is_the_queues(asked.job) or "SLURM_STEP_ID" in os.environ:
        return
    if "SLURM_JOB_ID" not in os.environ:
        if (nodes := _listed_nodes()) > 1:
            raise UsageError(
                f"job {asked.job} has {nodes} nodes, and only under SLURM can its workers be "
                f"started on all of them: request one node per job"
            )
        return
    if (nodes := int(os.environ.get("SLURM_JOB_NUM_NODES") or 1)) == 1:
        return
    srun = [
        "srun",
        f"-n{nodes}",
        "--ntasks-per-node=1",
        "-K",
        "--cpu-bind=none",  # by default a task gets one core
        "--mpi=none",
        "--export=ALL",
        "--input=none",
    ]
    janitor.dismiss()
    try:
        os.execvp(srun[0], [*srun, sys.executable, *sys.orig_argv[1:]])
    except OSError as error:
        raise UsageError(
            f"job {asked.job} has {nodes} nodes, and srun does not start: {error.strerror}"
        ) from None


def main(janitor: janitor.Janitor, scout: Scout | None) -> NoReturn:
    """From the command line to the exit code."""
    try:
        asked = parse(sys.argv[1:])
        spread(asked, janitor)
    except UsageError as error:
        print(f"hpcdask: error: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
    from hpcdask.logs import complain

    from .process import leave

    try:
        part = start(asked, janitor, scout)
    except HpcdaskError as error:
        complain(f"job {asked.job} on {os.uname().nodename}: {error}")
        leave(error.exit_code)
    except Exception:
        traceback.print_exc()
        leave(1)
    from distributed.compatibility import asyncio_run
    from distributed.config import get_loop_factory

    asyncio_run(part.run(), loop_factory=get_loop_factory())
    raise AssertionError("run() does not return")


def start(asked: Asked, janitor: janitor.Janitor, scout: Scout | None) -> JobPart:
    """Fork what the workers are forked from, before the first thread."""
    process.mark("options read")
    check_configuration()
    import distributed  # noqa: F401  (once: all that follows is forked)

    from hpcdask import children, template
    from hpcdask.joblife import JobPart
    from hpcdask.member import new_scratch, start_template

    from .logs import quiet
    from .nanny import check_preloads

    process.mark("distributed imported")
    reexec.adopt_configured_pre_spawn(janitor)
    reexec.add_working_folder()
    check_preloads(asked.spec)
    scratch = new_scratch(asked.spec, janitor)
    template.prepare_forks()
    quiet()
    start_template(asked.spec, scratch, children.Nursery(janitor, scout))
    process.mark("processes forked")
    return JobPart(asked, janitor, scratch, scout)


if __name__ == "__main__":
    main(_janitor, _scout)
