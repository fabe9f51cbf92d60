"""hpcdask up, scale, attach."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import json
import os
import sys
from typing import Any, get_args, get_origin

import click

from hpcdask.errors import UsageError
from hpcdask.logs import plural, say
from hpcdask.queues.registry import systems
from hpcdask.spec.help import folder_option


@click.command(
    context_settings={"ignore_unknown_options": True},
    epilog="Example: hpcdask up mine --system slurm --cores 8 --memory 64GiB",
)
@click.argument("name")
@click.option("--system", type=click.Choice(list(systems())), required=True, help="Of the jobs.")
@click.argument("keywords", nargs=-1, type=click.UNPROCESSED, metavar="[--KEYWORD VALUE …]")
def up(name: str, system: str, keywords: tuple[str, ...]) -> None:
    """Start a detached cluster of jobs, which runs on after this command.

    The keywords are those of the system's cluster class, such as --gpus-per-job 1. A list is given
    by an option for each item, a mapping as JSON: --scheduler-job '{"cores": 2}', or null for a
    process of this host.
    """
    import hpcdask

    cls = getattr(hpcdask, systems()[system].cluster)
    cluster = cls(name=name, detached=True, **_keywords(cls, keywords))
    click.echo(f"{name} runs: {cluster.id}, {cluster.scheduler_address}")
    click.echo(
        f"Next: hpcdask scale {name} N for N workers, hpcdask attach {name} -- program.py, "
        f"hpcdask list, and at the end hpcdask down {name}"
    )
    cluster.close()


def _keywords(cls: type, words: tuple[str, ...]) -> dict[str, Any]:
    """Return options as the keywords of a class, with values of its types."""
    known = inspect.signature(cls).parameters
    found: dict[str, list[str]] = {}
    rest = list(words)
    while rest:
        option, joined, value = rest.pop(0).partition("=")
        name = option.removeprefix("--").replace("-", "_")
        if not option.startswith("--") or name not in known or name in ("name", "detached"):
            near = difflib.get_close_matches(name, known, 1)
            hint = f". Did you mean --{near[0].replace('_', '-')}?" if near else ""
            raise UsageError(f"hpcdask up: {cls.__name__} has no keyword {option}{hint}")
        if not (joined or rest):
            raise UsageError(f"hpcdask up: {option} needs a value")
        found.setdefault(name, []).append(value if joined else rest.pop(0))
    return {name: _value(known[name].annotation, values) for name, values in found.items()}


def _value(annotation: Any, values: list[str]) -> Any:
    """Return the value of an option; the class itself raises an error for a wrong one."""
    kinds = [*get_args(annotation), annotation]
    if any(get_origin(kind) is list for kind in kinds):
        return values
    if str not in kinds:
        with contextlib.suppress(ValueError):
            return json.loads(values[-1])
    return values[-1]


@click.command(epilog="Example: hpcdask scale mine 8")
@folder_option
@click.argument("name")
@click.argument("workers", nargs=-1, required=True, metavar="N | GROUP=N …")
def scale(base: str | None, name: str, workers: tuple[str, ...]) -> None:
    """Set how many workers a detached cluster has.

    Adaptive scaling ends. With groups: hpcdask scale mine gpu=8 cpu=32
    """
    from hpcdask.clusters.display import JobTable

    from .attached import attach

    pairs = [text.rpartition("=") for text in workers]
    wanted = {group: int(number) for group, _, number in pairs if number.isdecimal()}
    if len(wanted) < len(workers) or ("" in wanted and len(wanted) > 1):
        raise UsageError(
            f"hpcdask scale: {' '.join(workers)}: give one number of workers, or GROUP=NUMBER for "
            f"each group"
        )
    with attach(name, folder=base) as cluster:
        if cluster.adapts:
            cluster.stop_adapting()
            click.echo(f"{name}: adaptive scaling is off")
        cluster.scale(wanted.pop("", None), **wanted)
        jobs = cluster.jobs()
        staying = JobTable(job for job in jobs if not (job.cancelled or job.leaving))
        click.echo(
            f"{name}: {plural(len(cluster.plan), 'worker')} wanted; jobs: "
            f"{staying.counts() or 'none'}"
        )
        if jobs.problem:
            say(f"warning: {jobs.problem}")


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    epilog="Example: hpcdask attach mine -- script.py",
)
@folder_option
@click.argument("name")
@click.argument("program", nargs=-1, type=click.UNPROCESSED, metavar="[PROGRAM [ARGUMENTS]...]")
def attach(base: str | None, name: str, program: tuple[str, ...]) -> None:
    """Run a Python program on a detached cluster.

    Client() without arguments connects to it. Without a program, only see that it can be reached.
    """
    from .attached import attach

    with attach(name, folder=base) as cluster:
        address = cluster.scheduler_address
        has_keys = cluster.security.require_encryption
        if program and not cluster.plan and not cluster.adapts:
            say(
                f"warning: {name} has no workers and wants none, so that Dask tasks wait: "
                f"hpcdask scale {name} N"
            )
        if problem := cluster.jobs().problem:
            say(f"warning: {problem}")
    if not program:
        click.echo(f"{name} runs: {cluster.id}, {address}")
        return
    os.environ["DASK_SCHEDULER_ADDRESS"] = address
    if has_keys:
        loader = "hpcdask.jobs.access.load_security"
        os.environ["DASK_DISTRIBUTED__CLIENT__SECURITY_LOADER"] = loader
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *program])
