"""hpcdask jobs, hpcdask cleanup."""

from __future__ import annotations

import asyncio
import datetime
import json
import sys
from typing import Any

import click

from hpcdask.errors import HpcdaskError, UsageError
from hpcdask.logs import complain, plural
from hpcdask.queues.registry import queue_class
from hpcdask.spec.tags import parse_tag

from . import runs
from .cancel import end_jobs, may_bring_more
from .detached import NOTEBOOK, holder
from .discovery import ClusterRecord, choose, survey
from .folder import BATCH, prune
from .state import JobReport

#: Columns of a table that goes to a file or pipe.
WIDE = 200


folder_option = click.option(
    "--folder",
    "base",
    metavar="BASE",
    help="Folder with the clusters' folders. Default: HPCDASK_HOME, or ~/.hpcdask.",
)


@click.command(epilog="Example: hpcdask jobs --json")
@folder_option
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list with one entry per job.")
def jobs(base: str | None, as_json: bool) -> None:
    """Show the jobs of your clusters and of hpcdask submit.

    The exit code is 1 if a queueing system does not answer.
    """
    clusters, problems = asyncio.run(survey(base))
    rows = [row for cluster in clusters for row in _rows(cluster)]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    elif rows:
        _print_table(rows)
    elif not problems:
        click.echo("No cluster of yours has jobs.")
    for cluster in clusters:
        if cluster.elsewhere:
            click.echo(f"{cluster.name}: {_ask_there(cluster, 'jobs')}", err=True)
    _end_with(list(problems.values()))


@click.command(epilog="Example: hpcdask cleanup --yes")
@folder_option
@click.argument("clusters", nargs=-1, metavar="[CLUSTER]...")
@click.option(
    "--all", "every", is_flag=True, help="Include clusters whose notebook cannot be seen from here."
)
@click.option("--yes", is_flag=True, help="Do not ask.")
def cleanup(base: str | None, clusters: tuple[str, ...], every: bool, yes: bool) -> None:
    """Cancel jobs and remove keys that were left behind.

    Runs that were killed leave keys, and clusters whose notebook has ended leave jobs, too. A
    cluster whose notebook still runs is only ended if you name it. A notebook on another host, or
    in a container, cannot be seen from here: name its cluster, or use --all.

    The exit code is 1 if jobs are left or a queueing system does not answer.
    """
    found, problems = asyncio.run(survey(base))
    chosen = choose(found, clusters, every)
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
    answered = [cluster for cluster in chosen if cluster.queue not in problems]
    complaints = [*problems.values(), *filter(None, asyncio.run(_end_all(answered)))]
    killed = asyncio.run(_clear_runs())
    for name, why in killed.items():
        click.echo(f"{name}: removed, with its keys; {why}")
    unseen = any(cluster.jobs and cluster.lives is None for cluster in found)
    if not chosen and not killed and not unseen:
        click.echo("Nothing was left over.")
    if old := prune(base):
        click.echo(f"removed the folders of clusters that ended long ago: {', '.join(old)}")
    _end_with(complaints)


async def _clear_runs() -> dict[str, str]:
    """Scheduler files of runs that were killed, and why those ended."""
    found = runs.listed()
    whys = await asyncio.gather(*(run.clear() for run in found))
    return {run.file: why for run, why in zip(found, whys, strict=True) if why}


async def _end_all(clusters: list[ClusterRecord]) -> list[str | None]:
    return await asyncio.gather(*map(_end, clusters))


async def _end(cluster: ClusterRecord) -> str | None:
    """End a cluster; what went wrong."""
    if cluster.elsewhere:
        return f"{cluster.name}: {_ask_there(cluster, f'cleanup {cluster.name}')}"

    def say(text: str) -> None:
        click.echo(f"{cluster.name}: {text}")

    lives = bool(cluster.lives)
    queue = queue_class(cluster.queue)()

    async def find() -> list[str]:
        tags = await queue.tagged()
        mine = [job_id for job_id, tag in tags.items() if parse_tag(tag)[0] == cluster.name]
        # a notebook that lives may submit others for ever
        return [job_id for job_id in mine if job_id in cluster.jobs] if lives else mine

    def awaited() -> bool:
        return cluster.folder is not None and not lives and may_bring_more(cluster.folder)

    try:
        left = await end_jobs(queue, find, say, awaited)
    except HpcdaskError as error:
        return f"{cluster.name}: {error}"
    if left:
        return f"{cluster.name}: these jobs do not end: {' '.join(left)}"
    if lives:
        say(f"its jobs are gone, but {_where(cluster)} still runs and may submit others")
        return None
    if cluster.folder:
        cluster.folder.mark_ended()
    if cluster.jobs:
        say(f"{plural(len(cluster.jobs), 'job')} cancelled and gone; no keys are left")
    else:
        say("no jobs and no keys are left")
    return None


def _end_with(problems: list[str]) -> None:
    for problem in problems:
        complain(problem)
    if problems:
        sys.exit(1)


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
    count = plural(len(cluster.jobs), "job")
    cancel = f"To cancel: hpcdask cleanup {cluster.name}"
    if _is_batch(cluster.name):
        return f"kept {count} of hpcdask submit. {cancel}"
    if cluster.lives:
        return f"kept {count}, since {_where(cluster)} still runs. {cancel}"
    return (
        f"kept {count}, since {_where(cluster)} cannot be seen from here. "
        f"{cancel}{', or --all' * (cluster.folder is not None)}"
    )


def _ask_there(cluster: ClusterRecord, command: str) -> str:
    return f"its jobs are processes of {cluster.elsewhere}. There: hpcdask {command}"


def _rows(cluster: ClusterRecord) -> list[dict[str, Any]]:
    """Return one JSON object per job, the scheduler's first."""
    owner = cluster.folder.owner if cluster.folder else None
    reports = [(job, by_cluster, False) for job, by_cluster in cluster.reports()]
    if cluster.scheduler is not None:
        made = cluster.folder.created if cluster.folder else None
        reports.insert(0, (JobReport.of_queue(cluster.scheduler, made, ""), False, True))
    return [
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
            "held_by": holder(cluster.folder) if cluster.folder else None,
            "notebook": {
                "lives": cluster.lives,
                "host": owner and owner.host,
                "pid": owner and owner.pid,
            },
        }
        for job, by_cluster, is_scheduler in reports
    ]


def _print_table(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", pad_edge=False)
    grouped = any(row["group"] for row in rows)
    for heading in ("cluster", *["group"] * grouped, "job", "state", "queue", "since", "owner"):
        table.add_column(heading, overflow="fold", no_wrap=heading in ("job", "queue", "since"))
    for row in rows:
        batch = _is_batch(row["cluster"])
        says = "" if batch or row["told_by"] == "cluster" else "says the queue"
        more = ", ".join(filter(None, [row["reason"], says]))
        state = f"{row['state']} ({more})" if more else row["state"]
        cells = [row["cluster"], *[row["group"] or ""] * grouped, row["job"], state, row["queue"]]
        since = row["since"] and datetime.datetime.fromtimestamp(row["since"])
        cells.append(since.strftime("%Y-%m-%d %H:%M:%S") if since else "")
        cells.append("hpcdask submit" if batch else _owner(row))
        table.add_row(*map(Text, cells))
    Console(width=None if sys.stdout.isatty() else WIDE).print(table)


def _owner(row: dict[str, Any]) -> str:
    if row["scheduler"]:
        return "the cluster's scheduler"
    if row["held_by"] is None:
        return "its folder is not here"
    known = row["notebook"]
    how = {True: "", False: " is gone", None: " cannot be seen from here"}[known["lives"]]
    what = "notebook, process" if row["held_by"] == NOTEBOOK else row["held_by"]
    return f"{what} {known['pid']} on {known['host']}{how}"
