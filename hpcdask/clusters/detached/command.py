"""hpcdask up, list, scale, attach, down."""

from __future__ import annotations

import asyncio
import datetime
import inspect
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, get_args, get_origin

import click

from hpcdask.errors import ClusterError, HpcdaskError, UsageError
from hpcdask.jobs import detached, runs
from hpcdask.jobs.command import WIDE, folder_option
from hpcdask.jobs.detached import ENDED, ControlRecord
from hpcdask.jobs.discovery import ClusterRecord, survey
from hpcdask.jobs.folder import ClusterFolder, list_clusters
from hpcdask.logs import say
from hpcdask.queues.job_state import WAITING
from hpcdask.queues.registry import systems

#: Seconds for which `list` shows a detached cluster that is over.
OVER_S = 86400.0


@click.command(
    context_settings={"ignore_unknown_options": True},
    epilog="Example: hpcdask up mine --system slurm --cores 8 --memory 64GiB",
)
@click.argument("name")
@click.option("--system", type=click.Choice(list(systems())), required=True, help="Of the jobs.")
@click.argument("keywords", nargs=-1, type=click.UNPROCESSED, metavar="[--KEYWORD VALUE …]")
def up(name: str, system: str, keywords: tuple[str, ...]) -> None:
    """Start a detached cluster of jobs, which goes on by itself.

    The keywords are those of the system's cluster class, such as --gpus-per-job 1. A list is given
    by an option for each item, a mapping as JSON: --scheduler-job '{"cores": 2}', or null for a
    process of this host.
    """
    import hpcdask

    cls = getattr(hpcdask, systems()[system].cluster)
    cluster = cls(name=name, detached=True, **dict(_keywords(cls, keywords)))
    click.echo(f"{name} runs: {cluster.id}, {cluster.scheduler_address}")
    cluster.close()


def _keywords(cls: type, words: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Options as the keywords of a class, with values of the types that these have."""
    known = inspect.signature(cls).parameters
    found: dict[str, list[str]] = {}
    rest = list(words)
    while rest:
        option, joined, value = rest.pop(0).partition("=")
        name = option.removeprefix("--").replace("-", "_")
        if not option.startswith("--") or name not in known or name in ("name", "detached"):
            raise UsageError(f"hpcdask up: {cls.__name__} has no keyword {option}")
        if not joined:
            if not rest:
                raise UsageError(f"hpcdask up: {option} needs a value")
            value = rest.pop(0)
        found.setdefault(name, []).append(value)
    for name, values in found.items():
        yield name, _value(f"--{name.replace('_', '-')}", known[name].annotation, values)


def _value(option: str, annotation: Any, values: list[str]) -> Any:
    kinds = [*get_args(annotation), annotation]
    if any(get_origin(kind) is list for kind in kinds):
        return values
    text = values[-1]
    if str in kinds:
        return text
    if float in kinds or int in kinds or bool in kinds or any(_is_mapping(kind) for kind in kinds):
        try:
            return json.loads(text)
        except ValueError:
            raise UsageError(
                f"hpcdask up: {option} {text!r}: a number, true, false or JSON"
            ) from None
    return text


def _is_mapping(kind: Any) -> bool:
    return kind is dict or get_origin(kind) in (dict, Mapping)


@click.command(name="list", epilog="Example: hpcdask list")
@folder_option
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
def list_(base: str | None, as_json: bool) -> None:
    """Show your clusters: detached ones, those of notebooks, and runs.

    Runs are shown if they have a scheduler file, and once if they were killed. Detached clusters
    that ended in the last day are shown with the reason.
    """
    rows, problems, in_use = asyncio.run(_rows(base))
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    elif rows:
        _print(rows)
    else:
        click.echo("You have no cluster.")
    for queue, problem in problems.items():
        say(f"{'error' if queue in in_use else 'warning'}: {problem}")
    if in_use & problems.keys():
        sys.exit(1)


async def _rows(base: str | None) -> tuple[list[dict[str, Any]], dict[str, str], set[str]]:
    """Rows, what is wrong with queues, and the queues of clusters that may live."""
    clusters, problems = await survey(base)
    in_use = {
        one.queue
        for one in clusters  # of a detached one the queue would tell
        if one.lives is not False or (one.folder and detached.scheduler_job(one.folder))
    }
    found = [await _row(cluster) for cluster in clusters if cluster.folder]
    for folder in list_clusters(base):
        if folder.ended is not None and time.time() - folder.ended < OVER_S:
            record = ControlRecord.read(folder)
            if record is not None:
                found.append(_facts(folder, record, ENDED, record.why, 0))
    found += await asyncio.gather(*(run.row() for run in runs.listed()))
    return found, problems, in_use


async def _row(cluster: ClusterRecord) -> dict[str, Any]:
    folder, count = cluster.folder, len(cluster.jobs)
    assert folder is not None
    record = ControlRecord.read(folder)
    if record is None:
        words = {True: "running", False: "dead", None: "cannot be seen from here"}
        state = words[cluster.lives]
        gone = " is gone" if cluster.lives is False else ""
        why = f"process {folder.owner.pid} on {folder.owner.host}{gone}"
        return _facts(folder, None, state, why, count)
    try:
        why = await detached.why_gone(folder) or ""
    except HpcdaskError as error:
        return _facts(folder, record, "unknown", str(error), count)
    state = "dead" if why and record.state not in (detached.ENDING, ENDED) else record.state
    seen = cluster.scheduler
    if not why and seen is not None and seen.state in WAITING:
        reason = f" ({seen.reason})" if seen.reason else ""
        why = f"its scheduler's job {seen.id} is {seen.state}{reason}"
    return _facts(folder, record, state, why, count)


def _facts(
    folder: ClusterFolder, record: ControlRecord | None, state: str, why: str, jobs: int
) -> dict[str, Any]:
    return {
        "name": record.name if record else folder.name,
        "id": folder.name,
        "kind": "detached" if record else "notebook",
        "state": state,
        "queue": folder.queue,
        "jobs": jobs,
        "since": folder.created,
        "address": record.address if record else None,
        "why": why,
    }


def _print(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("name", "id", "kind", "state", "queue", "jobs", "since", "note"):
        table.add_column(heading, overflow="fold", no_wrap=heading not in ("note", "name"))
    for row in rows:
        since = datetime.datetime.fromtimestamp(row["since"]).strftime("%Y-%m-%d %H:%M:%S")
        cells = [row["name"], row["id"], row["kind"], row["state"], row["queue"], str(row["jobs"])]
        table.add_row(*map(Text, [*cells, since, row["why"]]))
    Console(width=None if sys.stdout.isatty() else WIDE).print(table)


@click.command(epilog="Example: hpcdask scale mine 8")
@folder_option
@click.argument("name")
@click.argument("workers", nargs=-1, required=True, metavar="N | GROUP=N …")
def scale(base: str | None, name: str, workers: tuple[str, ...]) -> None:
    """Set how many workers a detached cluster has.

    Adaptive scaling ends. With groups: hpcdask scale mine gpu=8 cpu=32
    """
    from .attached import attach

    wanted = dict(_wish(one) for one in workers)
    with attach(name, folder=base) as cluster:
        if cluster.sync(cluster._ask, "stop_adapting"):
            click.echo(f"{name}: adaptive scaling is off")
        cluster.scale(wanted.pop("", None), **wanted)
        click.echo(f"{name}: jobs: {cluster.jobs().counts() or 'none'}")


def _wish(text: str) -> tuple[str, int]:
    """Group and number of workers; an empty name where none is given."""
    group, _, number = text.rpartition("=")
    if not number.isdecimal():
        raise UsageError(f"hpcdask scale: {text!r}: a number of workers, or GROUP=NUMBER")
    return group, int(number)


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    epilog="Example: hpcdask attach mine -- script.py",
)
@folder_option
@click.argument("name")
@click.argument(
    "program",
    nargs=-1,
    type=click.UNPROCESSED,
    metavar="[PROGRAM [ARGUMENTS]...]",
)
def attach(base: str | None, name: str, program: tuple[str, ...]) -> None:
    """Run a Python program on a detached cluster.

    Client() without arguments connects to it. Without a program, only see that it can be reached.
    """
    from .attached import attach

    with attach(name, folder=base) as cluster:
        address = cluster.scheduler_address
        has_keys = cluster.security.require_encryption
    if not program:
        click.echo(f"{name} runs: {cluster.id}, {address}")
        return
    os.environ["DASK_SCHEDULER_ADDRESS"] = address
    if has_keys:
        loader = "hpcdask.jobs.access.load_security"
        os.environ["DASK_DISTRIBUTED__CLIENT__SECURITY_LOADER"] = loader
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *program])


@click.command(epilog="Example: hpcdask down mine")
@folder_option
@click.argument("names", nargs=-1, required=True, metavar="NAME [NAME …]")
def down(base: str | None, names: tuple[str, ...]) -> None:
    """End detached clusters, their schedulers and all their jobs.

    The exit code is 1 if one does not end.
    """
    from .process import end

    folders = [detached.find(name, base) for name in names]
    for folder in folders:
        record = ControlRecord.read(folder)
        if folder.ended is not None:
            raise ClusterError(f"{folder.name} has ended before: {record.why if record else ''}")
        asyncio.run(end(folder, "hpcdask down"))
        click.echo(f"{folder.name} has ended; no jobs and no keys are left")
