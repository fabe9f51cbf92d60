"""Command line of python -m hpcdask.worker."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from hpcdask.errors import UsageError
from hpcdask.queues import environment
from hpcdask.security.credentials import load_credentials
from hpcdask.spec.argv import options
from hpcdask.spec.specs import WorkerSpec

if TYPE_CHECKING:
    from hpcdask.spec.job import JobSpec


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


def parse(argv: Sequence[str]) -> JobSpec:
    """Read the command line and the environment."""
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
    from hpcdask.spec.job import (
        JobSpec,  # distributed comes with it: bad options do not wait for that
    )

    return JobSpec(spec, job=job, restarts=restarts, **own)


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
