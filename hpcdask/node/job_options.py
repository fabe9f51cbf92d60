"""Command line of python -m hpcdask.worker."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

import click

from hpcdask.errors import UsageError
from hpcdask.queues import environment
from hpcdask.security.credentials import load_credentials
from hpcdask.spec.argv import make_command, options, read
from hpcdask.spec.job import JobSpec
from hpcdask.spec.specs import WorkerSpec

HELP = """Run the workers of one job on this node, or on each node of a SLURM job.

Each worker has a device of its own. They end when the scheduler says so, when it is gone, or on
SIGTERM, after handing over what they hold.
"""


def command() -> click.Command:
    """The command line, made from the fields of `WorkerSpec`; the names are made here."""
    count: dict[str, Any] = {"type": click.IntRange(min=1), "default": 1, "show_default": True}
    params = [
        click.Option(
            ["--scheduler"], required=True, help="Its address, such as tls://10.0.0.1:8786."
        ),
        click.Option(["--keys"], help="Folder of the cluster's TLS credentials."),
        click.Option(["--cluster"], required=True, help="Begins the workers' names."),
        click.Option(["--workers"], help="Number of workers on each node.", **count),
        *(option for option in options(WorkerSpec) if option.name != "name"),
    ]
    return make_command("python -m hpcdask.worker", HELP, params)


def parse(argv: Sequence[str]) -> JobSpec:
    """Read the command line and the environment."""
    values = read(command(), argv)
    own = {name: values.pop(name) for name in ("scheduler", "keys", "cluster", "workers")}
    _check_access(own["scheduler"], own["keys"])
    job, restarts = identity()
    return JobSpec(WorkerSpec(**values), job=job, restarts=restarts, **own)


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
        raise UsageError(f"--keys: {keys} holds no key for workers: name a cluster's key folder")


def identity() -> tuple[str, int]:
    """Id and restart count of this job."""
    restarts = os.environ.get("HPCDASK_RESTARTS") or "0"
    if not re.fullmatch(r"\d+", restarts):
        raise UsageError(f"HPCDASK_RESTARTS: {restarts!r} is not a number. Unset it")
    if job := os.environ.get("HPCDASK_JOB_ID"):
        return job, int(restarts)
    if queued := environment.job_id():
        job, _, lives = queued.rpartition(".r")
        return (job, int(lives)) if job else (queued, 0)
    return f"{os.uname().nodename}-{os.getpid()}", 0
