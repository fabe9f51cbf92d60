"""hpcdask list, down, up, scale, attach."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import json
import os
import sys
import time
from collections.abc import Awaitable, Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, get_args, get_origin

import click

from hpcdask.errors import HpcdaskError, QueueError, UsageError
from hpcdask.jobs import detached, runs
from hpcdask.jobs.cancel import end_jobs
from hpcdask.jobs.detached import CONTROL, ENDED, ENDING, NOTEBOOK, ControlRecord, holder
from hpcdask.jobs.discovery import ClusterRecord, survey
from hpcdask.jobs.folder import BATCH, ClusterFolder, list_clusters, prune
from hpcdask.jobs.state import JobReport
from hpcdask.logs import complain, plural, say, text_table
from hpcdask.queues.job_state import WAITING
from hpcdask.queues.registry import queue_class, systems
from hpcdask.spec.argv import folder_option, make_command, option_name, read

#: Seconds for which `list` shows a detached cluster that is over.
OVER_S = 86400.0
#: Owner of the job in which a detached cluster's scheduler runs.
SCHEDULER = "the cluster's scheduler"
Row = dict[str, Any]

# Showing them


@click.command(name="list", epilog="Example: hpcdask list --jobs")
@folder_option
@click.option("--jobs", "of_jobs", is_flag=True, help="Show the jobs, those of submit too.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
def list_(base: str | None, of_jobs: bool, as_json: bool) -> None:
    """Show your clusters and runs, or their jobs.

    Clusters are detached, or of a notebook. Runs are shown if they have a scheduler file. Detached
    clusters that ended in the last day are shown with the reason.

    The exit code is 1 if the queueing system of a cluster does not answer.
    """
    asyncio.run(_list(base, of_jobs, as_json))


async def _list(base: str | None, of_jobs: bool, as_json: bool) -> None:
    clusters, problems = await survey(base)
    rows = _job_rows(clusters) if of_jobs else await _cluster_rows(clusters, base)
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    elif rows and of_jobs:
        columns = ["cluster", "group", "job", "state", "queue", "since", "owner"]
        if not any(row["group"] for row in rows):
            columns.remove("group")
        click.echo(_table(columns, _merge_arrays(rows)))
    elif rows:
        columns = ["name", "id", "kind", "state", "queue", "jobs", "since", "note"]
        click.echo(_table(columns, ({**row, "note": row["why"]} for row in rows)))
    elif not problems:
        click.echo("No cluster of yours has jobs." if of_jobs else "You have no cluster.")
    for cluster in clusters if of_jobs else ():
        if cluster.elsewhere:
            click.echo(f"{cluster.name}: {_ask_there(cluster, 'list --jobs')}", err=True)
        if problem := cluster.problem():
            click.echo(f"{cluster.name}: {problem.splitlines()[0]}", err=True)
    _exit(problems.values())


def _exit(errors: Collection[HpcdaskError]) -> None:
    """Say what went wrong, and exit if something did."""
    for error in errors:
        complain(error)
    if errors:
        sys.exit(max(error.exit_code for error in errors))


def _table(columns: list[str], rows: Iterable[Row]) -> str:
    def cell(value: Any, name: str) -> str:
        if value and name == "since":
            value = datetime.fromtimestamp(int(value))
        return "" if value is None else str(value)

    return text_table([columns, *([cell(row[name], name) for name in columns] for row in rows)])


async def _cluster_rows(clusters: Sequence[ClusterRecord], base: str | None) -> list[Row]:
    ended = [folder for folder in list_clusters(base) if time.time() - (folder.ended or 0) < OVER_S]
    over = [ClusterRecord(one.name, one.queue, one) for one in ended if holder(one) == CONTROL]
    found = [await _cluster_row(one, one.folder) for one in [*clusters, *over] if one.folder]
    return found + list(await asyncio.gather(*(run.row() for run in runs.listed())))


async def _cluster_row(cluster: ClusterRecord, folder: ClusterFolder) -> Row:
    row: Row = {"name": folder.name, "id": folder.name, "kind": "detached", "state": "unknown"}
    row |= {"queue": folder.queue, "jobs": len(cluster.jobs)}
    row |= {"since": folder.created, "address": None}
    try:
        record = ControlRecord.read(folder)
        gone = (await detached.look(folder)).why if record and folder.ended is None else None
        problem = cluster.problem().partition("\n")[0]  # it may end with a log's lines
    except HpcdaskError as error:
        return {**row, "why": str(error)}
    if record is None:
        state = {True: "running", False: "dead", None: "cannot be seen from here"}[cluster.lives]
        return {**row, "kind": "notebook", "state": state, "why": problem or _owner(cluster)}
    state, why = record.state, gone or record.why or problem
    if gone and state not in (ENDING, ENDED):
        state = "dead"
    if not why and (seen := cluster.scheduler) is not None and seen.state in WAITING:
        why = f"its scheduler's job {seen.id} is {seen.words}"
    return {**row, "name": record.name, "state": state, "address": record.address, "why": why}


def _job_rows(clusters: Sequence[ClusterRecord]) -> list[Row]:
    """Return a row for each job, those of schedulers first."""
    rows = []
    for cluster in clusters:
        reports = [(job, _owner(cluster)) for job in cluster.reports()]
        if cluster.scheduler is not None:
            made = cluster.folder.created if cluster.folder else None
            reports.insert(0, (JobReport.of_queue(cluster.scheduler, made, ""), SCHEDULER))
        known = {"cluster": cluster.name, "queue": cluster.queue, "lives": cluster.lives}
        for job, owner in reports:
            own = {"job": job.id, "owner": owner, "scheduler": owner == SCHEDULER}
            rows.append({**known, **own, **job.to_json()})
    return rows


def _merge_arrays(rows: Iterable[Row]) -> Iterable[Row]:
    """Yield rows of a table; jobs of an array that wait for the same reason are one."""

    def alike(row: Row) -> tuple[str, ...]:
        array, _, element = row["job"].rpartition("_")
        one = "" if array and row["state"] in WAITING else element
        return row["cluster"], array, one, row["state"], row["reason"]

    for _, (row, *others) in itertools.groupby(rows, alike):
        job = f"{row['job']} and {len(others)} more" if others else row["job"]
        state = f"{row['state']} ({row['reason']})" if row["reason"] else row["state"]
        yield {**row, "job": job, "state": state}


def _owner(cluster: ClusterRecord) -> str:
    # a cluster's name has no second dash
    if cluster.name.startswith(BATCH) and "-" in cluster.name.removeprefix(BATCH):
        return "hpcdask submit"
    if cluster.folder is None:
        return "its folder is not here"
    how = {True: "", False: " is gone", None: " cannot be seen from here"}[cluster.lives]
    what, owner = holder(cluster.folder), cluster.folder.owner
    what = "notebook, process" if what == NOTEBOOK else what
    return f"{what} {owner.pid} on {owner.host}{how}"


def _ask_there(cluster: ClusterRecord, command: str) -> str:
    return f"its jobs are processes of {cluster.elsewhere}. There: hpcdask {command}"


# Ending them


@click.command(epilog="Example: hpcdask down mine")
@folder_option
@click.argument("names", nargs=-1, metavar="NAME …")
@click.option("--dead", is_flag=True, help="What clusters and runs left whose process is gone.")
@click.option(
    "--all", "every", is_flag=True, help="With --dead: also those that cannot be seen from here."
)
@click.option("--yes", is_flag=True, help="With --dead: do not ask.")
def down(base: str | None, names: tuple[str, ...], dead: bool, every: bool, yes: bool) -> None:
    """End clusters: their schedulers, their jobs and their keys.

    NAME is a cluster's name or id, or the start of its id. A notebook that still runs keeps its
    cluster, and may submit other jobs. With --dead, jobs and keys go that were left behind by
    notebooks, detached clusters and runs that were killed; a process on another host, or in a
    container, cannot be seen from here.

    The exit code is 1 if jobs are left or a queueing system does not answer.
    """
    if bool(names) == (dead or every):
        raise UsageError("hpcdask down: name clusters, or give --dead for what was left behind")
    _exit(asyncio.run(_end_named(base, names) if names else _end_dead(base, every, yes)))


async def _end_named(base: str | None, names: Sequence[str]) -> list[HpcdaskError]:
    """End each of these clusters, and return what went wrong."""
    clusters, problems = await survey(base)
    errors: list[HpcdaskError] = []
    records = detached.records(one.folder for one in clusters if one.folder)
    called = {folder.name: record.name for folder, record in records.items()}
    for name in names:
        found = [one for one in clusters if name in (one.name, called.get(one.name))]
        found = found or [one for one in clusters if one.name.startswith(name)]
        if len(found) == 1:
            await _collect(_end(found[0], problems), errors)
            continue
        there = ", ".join(one.name for one in found or clusters)
        text = f"several clusters are called {name}: say which by id: {there}"
        if not found:
            which = f"are: {there}" if there else "is none"
            text = f"no cluster of yours that is not over is called {name}. There {which}"
        errors.append(UsageError(text))
    return errors


async def _end_dead(base: str | None, every: bool, yes: bool) -> list[HpcdaskError]:
    """End what was left behind, and return what went wrong."""
    found, problems = await survey(base)
    gone = (False, None) if every else (False,)
    # what has no folder here may live in another base
    chosen = [cluster for cluster in found if cluster.folder and cluster.lives in gone]
    kept = [cluster for cluster in found if cluster not in chosen and cluster.jobs]
    for cluster in kept:
        count, name = plural(len(cluster.jobs), "job"), cluster.name
        click.echo(f"{name}: kept {count}: {_owner(cluster)}. To cancel: hpcdask down {name}")
    if not yes and (names := [cluster.name for cluster in chosen if cluster.jobs]):
        total = sum(len(cluster.jobs) for cluster in chosen)
        question = f"Cancel {plural(total, 'job')} of {', '.join(names)}?"
        if not sys.stdin.isatty():
            raise UsageError(f"{question} Nobody is there to ask: --yes is needed")
        click.confirm(question, abort=True)
    errors: list[HpcdaskError] = [*problems.values()]
    await asyncio.gather(*(_collect(_end(one, problems), errors) for one in chosen))
    cleared = False
    for run in runs.listed():
        if why := await run.clear():
            cleared = True
            click.echo(f"{run.file}: removed, with its keys; {why}")
    if not (chosen or cleared or any(cluster.lives is None for cluster in kept)):
        click.echo("Nothing was left over.")
    if old := prune(base):
        click.echo(f"removed the folders of clusters that ended long ago: {', '.join(old)}")
    return list(dict.fromkeys(errors))


async def _collect(ending: Awaitable[None], errors: list[HpcdaskError]) -> None:
    """Wait for the end of a cluster, and note what goes wrong: others are to end all the same."""
    try:
        await ending
    except HpcdaskError as error:
        errors.append(error)


async def _end(cluster: ClusterRecord, problems: Mapping[str, QueueError]) -> None:
    """End a detached cluster, or another one by the tags of its jobs."""
    name, folder = cluster.name, cluster.folder
    record = None
    with contextlib.suppress(UsageError):  # of another release
        record = ControlRecord.read(folder) if folder and folder.ended is None else None
    if folder is not None and record is not None:
        from .detached.process import end  # imports distributed

        await end(folder, "hpcdask down")
        click.echo(f"{name} has ended; no jobs and no keys are left")
        return
    if cluster.elsewhere:
        raise QueueError(f"{name}: {_ask_there(cluster, f'down {name}')}")
    if cluster.queue in problems:
        raise problems[cluster.queue]
    lives = bool(cluster.lives) and cluster.scheduler is None

    def tell(text: str) -> None:
        click.echo(f"{name}: {text}")

    try:
        if folder is not None and cluster.scheduler is not None:  # whose record cannot be read
            await detached.cancel_scheduler(folder)
        queue, only = queue_class(cluster.queue)(), cluster.jobs if lives else None
        # a notebook that lives may submit others for ever
        await end_jobs(queue, name, tell, folder=None if lives else folder, only=only)
    except HpcdaskError as error:
        error.args = (f"{name}: {error}",)
        raise
    if lives:
        tell(f"its jobs are gone, but {_owner(cluster)} still runs and may submit others")
        return
    if folder:
        detached.mark_ended(folder, "hpcdask down --dead")
    count = len(cluster.jobs)
    jobs = f"{plural(count, 'job')} cancelled and gone;" if count else "no jobs and"
    tell(f"{jobs} no keys are left")


# Detached clusters


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
    from .classes import class_of  # imports distributed

    cls = class_of(system)
    cluster = cls(**{**_keywords(cls, keywords), "name": name, "detached": True})
    click.echo(f"{name} runs: {cluster.id}, {cluster.scheduler_address}")
    click.echo(
        f"Next: hpcdask scale {name} N for N workers, hpcdask attach {name} -- program.py, "
        f"hpcdask list, and at the end hpcdask down {name}"
    )
    cluster.close()


def _keywords(cls: type, words: tuple[str, ...]) -> dict[str, Any]:
    """Return options as the keywords of a class, with values of its types."""
    known = {name: one.annotation for name, one in inspect.signature(cls).parameters.items()}
    options = [click.Option([option_name(name)], multiple=True) for name in known if name != "name"]
    given = read(make_command("hpcdask up", "", options), words)
    return {name: _value(known[name], list(some)) for name, some in given.items() if some}


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
    from .detached.attached import attach
    from .display import JobTable

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
        counts = JobTable(job for job in jobs if not (job.cancelled or job.leaving)).counts()
        count = plural(len(cluster.plan), "worker")
        click.echo(f"{name}: {count} wanted; jobs: {counts or 'none'}")
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
    from .detached.attached import attach

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
