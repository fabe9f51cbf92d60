"""hpcdask list, hpcdask down."""

from __future__ import annotations

import asyncio
import datetime
import itertools
import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import click

from hpcdask.errors import HpcdaskError, QueueError, UsageError
from hpcdask.jobs import detached, runs
from hpcdask.jobs.cancel import end_jobs, may_bring_more
from hpcdask.jobs.detached import ENDED, NOTEBOOK, ControlRecord, holder
from hpcdask.jobs.discovery import ClusterRecord, survey
from hpcdask.jobs.folder import BATCH, ClusterFolder, list_clusters, prune
from hpcdask.jobs.state import JobReport
from hpcdask.logs import complain, plural
from hpcdask.queues.job_state import WAITING
from hpcdask.queues.registry import queue_class
from hpcdask.spec.help import folder_option
from hpcdask.spec.tags import parse_tag

#: Seconds for which `list` shows a detached cluster that is over.
OVER_S = 86400.0
#: Columns of a table that goes to a file or pipe.
WIDE = 200
Row = dict[str, Any]


@click.command(name="list", epilog="Example: hpcdask list --jobs")
@folder_option
@click.option("--jobs", "of_jobs", is_flag=True, help="Show the jobs, those of submit too.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
def list_(base: str | None, of_jobs: bool, as_json: bool) -> None:
    """Show your clusters and runs, or their jobs.

    Clusters are detached, or of a notebook. Runs are shown if they have a scheduler file, and once
    if they were killed. Detached clusters that ended in the last day are shown with the reason.

    The exit code is 1 if the queueing system of a cluster does not answer.
    """
    asyncio.run(_list(base, of_jobs, as_json))


async def _list(base: str | None, of_jobs: bool, as_json: bool) -> None:
    clusters, problems = await survey(base)
    rows = _job_rows(clusters) if of_jobs else await _cluster_rows(clusters, base)
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    elif rows and of_jobs:
        _print_jobs(rows)
    elif rows:
        heads = ("name", "id", "kind", "state", "queue", "jobs", "since", "note")
        cells = [[*(str(row[head]) for head in heads[:6]), _date(row["since"])] for row in rows]
        _print(heads, [[*some, row["why"]] for some, row in zip(cells, rows, strict=True)])
    elif not (of_jobs and problems):
        click.echo("No cluster of yours has jobs." if of_jobs else "You have no cluster.")
    for cluster in clusters:
        if of_jobs and cluster.elsewhere:
            click.echo(f"{cluster.name}: {_ask_there(cluster, 'list --jobs')}", err=True)
        if of_jobs and (problem := cluster.problem()):
            click.echo(f"{cluster.name}: {problem.splitlines()[0]}", err=True)
    for error in problems.values():
        complain(error)
    if problems:
        sys.exit(1)


async def _cluster_rows(clusters: Sequence[ClusterRecord], base: str | None) -> list[Row]:
    found = [await _cluster_row(cluster) for cluster in clusters if cluster.folder]
    ended = [
        folder
        for folder in list_clusters(base)
        if folder.ended is not None and time.time() - folder.ended < OVER_S
    ]
    for folder, record in detached.records(ended).items():
        found.append(_row(folder, record, ENDED, record.why, 0))
    return found + list(await asyncio.gather(*(run.row() for run in runs.listed())))


async def _cluster_row(cluster: ClusterRecord) -> Row:
    folder, count = cluster.folder, len(cluster.jobs)
    assert folder is not None
    try:
        record = ControlRecord.read(folder)
    except UsageError as error:
        return _row(folder, ControlRecord(folder.name), "unknown", str(error), count)
    problem = cluster.problem().partition("\n")[0]  # it may end with a log's lines
    if record is None:
        words = {True: "running", False: "dead", None: "cannot be seen from here"}
        gone = " is gone" if cluster.lives is False else ""
        why = f"process {folder.owner.pid} on {folder.owner.host}{gone}"
        return _row(folder, None, words[cluster.lives], problem or why, count)
    try:
        why = await detached.why_gone(folder) or ""
    except HpcdaskError as error:
        return _row(folder, record, "unknown", str(error), count)
    state = "dead" if why and record.state not in (detached.ENDING, ENDED) else record.state
    seen = cluster.scheduler
    if not (why or problem) and seen is not None and seen.state in WAITING:
        reason = f" ({seen.reason})" if seen.reason else ""
        why = f"its scheduler's job {seen.id} is {seen.state}{reason}"
    return _row(folder, record, state, why or problem, count)


def _row(
    folder: ClusterFolder, record: ControlRecord | None, state: str, why: str, jobs: int
) -> Row:
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


def _job_rows(clusters: Sequence[ClusterRecord]) -> list[Row]:
    """Return a row for each job, those of schedulers first."""
    rows = []
    for cluster in clusters:
        folder = cluster.folder
        owner = folder.owner if folder else None
        reports = [(job, by_cluster, False) for job, by_cluster in cluster.reports()]
        if cluster.scheduler is not None:
            made = folder.created if folder else None
            reports.insert(0, (JobReport.of_queue(cluster.scheduler, made, ""), False, True))
        rows += [
            {
                "cluster": cluster.name,
                "group": job.group or None,
                "job": job.id,
                "state": str(job.state),
                "reason": job.reason,
                "told_by": "cluster" if by_cluster else "queue",
                "workers": job.workers,
                "scheduler": is_scheduler,
                "queue": cluster.queue,
                "since": job.since,
                "nodes": job.nodes,
                "held_by": holder(folder) if folder else None,
                "notebook": {
                    "lives": cluster.lives,
                    "host": owner and owner.host,
                    "pid": owner and owner.pid,
                },
            }
            for job, by_cluster, is_scheduler in reports
        ]
    return rows


def _print_jobs(rows: Sequence[Row]) -> None:
    grouped = any(row["group"] for row in rows)
    table = []
    for _, alike in itertools.groupby(rows, _array):
        row, *others = alike
        if others:
            row = {**row, "job": f"{row['job']} and {len(others)} more"}
        batch = _is_batch(row["cluster"])
        says = "" if batch or row["told_by"] == "cluster" else "says the queue"
        more = ", ".join(filter(None, [row["reason"], says]))
        state = f"{row['state']} ({more})" if more else row["state"]
        group = [row["group"] or ""] * grouped
        cells = [row["cluster"], *group, row["job"], state, row["queue"], _date(row["since"])]
        table.append([*cells, "hpcdask submit" if batch else _owner(row)])
    _print(("cluster", *["group"] * grouped, "job", "state", "queue", "since", "owner"), table)


def _array(row: Row) -> tuple[str, ...]:
    """Return what jobs of an array have in common that wait for the same reason."""
    array, _, element = row["job"].rpartition("_")
    one = "" if array and row["state"] in WAITING else element
    return row["cluster"], array, one, row["state"], row["reason"], row["told_by"]


def _owner(row: Row) -> str:
    if row["scheduler"]:
        return "the cluster's scheduler"
    if row["held_by"] is None:
        return "its folder is not here"
    known = row["notebook"]
    how = {True: "", False: " is gone", None: " cannot be seen from here"}[known["lives"]]
    what = "notebook, process" if row["held_by"] == NOTEBOOK else row["held_by"]
    return f"{what} {known['pid']} on {known['host']}{how}"


def _date(since: float | None) -> str:
    if since is None:
        return ""
    return datetime.datetime.fromtimestamp(since).strftime("%Y-%m-%d %H:%M:%S")


def _print(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", pad_edge=False)
    for head in heads:
        wraps = head in ("note", "name", "cluster", "group", "state", "owner")
        table.add_column(head, overflow="fold", no_wrap=not wraps or head == "state" == heads[3])
    for row in rows:
        table.add_row(*map(Text, row))
    Console(width=None if sys.stdout.isatty() else WIDE).print(table)


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
    work = _end_dead(base, every, yes) if dead or every else _end_named(base, names)
    errors = asyncio.run(work)
    for error in errors:
        complain(error)
    if errors:
        sys.exit(max(error.exit_code for error in errors))


async def _end_named(base: str | None, names: Sequence[str]) -> list[HpcdaskError]:
    """End each of these clusters, and return what went wrong."""
    from .detached.process import end  # imports distributed

    folders = list_clusters(base)
    known = detached.records(folders)
    errors: list[HpcdaskError] = []
    others = []
    for name in names:
        found = detached.resolve(name, folders, known)
        if len(found) != 1 or found[0] not in known:
            others.append(name)
        elif found[0].ended is not None:
            click.echo(f"{found[0].name} has ended before: {known[found[0]].why}")
        else:
            try:
                await end(found[0], "hpcdask down")
                click.echo(f"{found[0].name} has ended; no jobs and no keys are left")
            except HpcdaskError as error:
                errors.append(error)
    clusters, problems = await survey(base) if others else ([], {})
    there = {cluster.name: cluster for cluster in clusters}  # some have no folder here
    live = [folder for folder in folders if folder.ended is None]
    unknown = []
    for name in others:
        ids = [folder.name for folder in detached.resolve(name, live, known)]
        ids = ids or [one for one in there if one == name or one.startswith(name)]
        if name in there or len(ids) == 1:
            errors += await _end(there[name if name in there else ids[0]], problems)
        elif ids:
            text = f"several clusters are called {name}: say which by id: {', '.join(ids)}"
            errors.append(UsageError(text))
        else:
            unknown.append(name)
    if unknown:
        errors.append(
            UsageError(
                f"no cluster of yours that is not over is called {', '.join(unknown)}. There "
                f"{'are: ' + ', '.join(there) if there else 'is none'}"
            )
        )
    return errors


async def _end_dead(base: str | None, every: bool, yes: bool) -> list[HpcdaskError]:
    """End what was left behind, and return what went wrong."""
    found, problems = await survey(base)
    # what has no folder here may live in another base
    chosen = [
        one for one in found if one.folder and (one.lives is False or (every and one.lives is None))
    ]
    for cluster in found:
        if cluster not in chosen and cluster.jobs:
            click.echo(f"{cluster.name}: {_why_not(cluster)}")
    total = sum(len(cluster.jobs) for cluster in chosen)
    if total and not yes:
        names = ", ".join(cluster.name for cluster in chosen if cluster.jobs)
        question = f"Cancel {plural(total, 'job')} of {names}?"
        if not sys.stdin.isatty():
            raise UsageError(f"{question} Nobody is there to ask: --yes is needed")
        click.confirm(question, abort=True)
    errors: list[HpcdaskError] = list(problems.values())
    answered = [cluster for cluster in chosen if cluster.queue not in problems]
    for some in await asyncio.gather(*(_end(cluster, problems) for cluster in answered)):
        errors += some
    listed = runs.listed()
    whys = await asyncio.gather(*(run.clear() for run in listed))
    killed = {run.file: why for run, why in zip(listed, whys, strict=True) if why}
    for name, why in killed.items():
        click.echo(f"{name}: removed, with its keys; {why}")
    unseen = any(cluster.jobs and cluster.lives is None for cluster in found)
    if not chosen and not killed and not unseen:
        click.echo("Nothing was left over.")
    if old := prune(base):
        click.echo(f"removed the folders of clusters that ended long ago: {', '.join(old)}")
    return errors


async def _end(cluster: ClusterRecord, problems: Mapping[str, QueueError]) -> list[HpcdaskError]:
    """End a cluster by the tags of its jobs, and return what went wrong."""
    if cluster.elsewhere:
        return [QueueError(f"{cluster.name}: {_ask_there(cluster, f'down {cluster.name}')}")]
    if cluster.queue in problems:
        return [problems[cluster.queue]]

    def tell(text: str) -> None:
        click.echo(f"{cluster.name}: {text}")

    folder, lives = cluster.folder, bool(cluster.lives) and cluster.scheduler is None
    queue = queue_class(cluster.queue)()

    async def find() -> list[str]:
        tags = await queue.tagged()
        mine = [job_id for job_id, tag in tags.items() if parse_tag(tag)[0] == cluster.name]
        # a notebook that lives may submit others for ever
        return [job_id for job_id in mine if job_id in cluster.jobs] if lives else mine

    def awaited() -> bool:
        return folder is not None and not lives and may_bring_more(folder)

    try:
        if folder is not None and cluster.scheduler is not None:  # whose record cannot be read
            await detached.cancel_scheduler(folder)
        if left := await end_jobs(queue, find, tell, awaited):
            raise QueueError(f"these jobs do not end: {' '.join(left)}")
    except HpcdaskError as error:
        error.args = (f"{cluster.name}: {error}",)
        return [error]
    if lives:
        tell(f"its jobs are gone, but {_where(cluster)} still runs and may submit others")
        return []
    if folder:
        detached.mark_ended(folder, "hpcdask down --dead")
    count = len(cluster.jobs)
    tell(
        f"{plural(count, 'job')} cancelled and gone; no keys are left"
        if count
        else "no jobs and no keys are left"
    )
    return []


def _where(cluster: ClusterRecord) -> str:
    """Return what holds the cluster, in words."""
    if cluster.folder is None:
        return "a notebook whose folder is not here"
    owner = cluster.folder.owner
    return f"its {holder(cluster.folder)} (process {owner.pid} on {owner.host})"


def _is_batch(name: str) -> bool:
    """Return whether this is a job of hpcdask submit: a cluster's name has no second dash."""
    return name.startswith(BATCH) and "-" in name.removeprefix(BATCH)


def _why_not(cluster: ClusterRecord) -> str:
    count, down = plural(len(cluster.jobs), "job"), f"To cancel: hpcdask down {cluster.name}"
    if _is_batch(cluster.name):
        return f"kept {count} of hpcdask submit. {down}"
    if cluster.lives:
        return f"kept {count}, since {_where(cluster)} still runs. {down}"
    return (
        f"kept {count}, since {_where(cluster)} cannot be seen from here. "
        f"{down}{', or --dead --all' * (cluster.folder is not None)}"
    )


def _ask_there(cluster: ClusterRecord, command: str) -> str:
    return f"its jobs are processes of {cluster.elsewhere}. There: hpcdask {command}"
