"""hpcdask stacks and logs. What they need is imported when one runs: every command imports this."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import sys
import time

import click

from hpcdask.spec.argv import folder_option

#: Seconds between two looks.
LOOK_S = 1.0


@click.command(epilog="Example: hpcdask stacks cluster.json")
@folder_option
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object.")
@click.argument("name", required=False, metavar="[NAME|FILE]")
def stacks(base: str | None, as_json: bool, name: str | None) -> None:
    """Show what a run that hangs does, and why.

    That is: what program, scheduler and workers of a run or cluster do now, and what is most likely
    wrong.

    NAME is a cluster's (hpcdask list), or the process id of a run's rank 0 on this node. FILE is
    the run's scheduler file. Without either it is the only one that is there.

    It also works while the scheduler does not answer. The exit code is 1 if nothing of it could be
    reached.
    """
    from hpcdask.logs import set_log_level

    from .diagnose import diagnose
    from .look import find, look
    from .show import lines

    set_log_level("CRITICAL")
    report = asyncio.run(look(find(name, base)))
    if as_json:
        content = {**dataclasses.asdict(report), "likely": diagnose(report)}
        click.echo(json.dumps(content, indent=2, default=str))
    else:
        click.echo("\n".join(lines(report)))
    if not report.workers and not report.work:
        sys.exit(1)


@click.command(epilog="Example: hpcdask logs -f mine")
@folder_option
@click.option("-f", "--follow", is_flag=True, help="Go on until the cluster ends, or Ctrl-C.")
@click.option("-n", "--lines", type=click.IntRange(min=0), help="Only the last lines, at first.")
@click.argument("name", required=False)
def logs(base: str | None, follow: bool, lines: int | None, name: str | None) -> None:
    """Show the logs of all workers of a cluster as one.

    Lines are in order, with time, node, worker, level and text.

    NAME is a cluster's, also of one that has ended. Without it, it is the only one that is there.
    """
    from hpcdask.errors import UsageError
    from hpcdask.jobs.detached import named
    from hpcdask.jobs.folder import ClusterFolder, list_clusters
    from hpcdask.jobs.logs import ClusterLogs
    from hpcdask.jobs.state import counts
    from hpcdask.logs import say
    from hpcdask.queues.job_state import WAITING

    from .look import find

    folder = (named(name, list_clusters(base)) if name else None) or find(name, base).folder
    if folder is None:
        raise UsageError(
            "hpcdask logs shows clusters of jobs. The log of a run is the output of its launcher; "
            "what Dask keeps of it: hpcdask.connect(FILE).get_worker_logs()"
        )
    if name is None:
        say(f"the logs of {folder.name}")
    reader = ClusterLogs(folder)
    found = reader.read()
    if not found and (waiting := [job for job in folder.report().jobs if job.state in WAITING]):
        say(f"there is no line yet; jobs: {counts(waiting)}")
    elif not found:
        say("nothing was logged" + " yet" * (folder.lives() is not False))
    found = found[max(0, len(found) - lines) :] if lines is not None else found
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            click.echo("".join(f"{line}\n" for line in found), nl=False)
            if not follow:
                return
            # before it is read: what ended meanwhile is read once more
            follow = ClusterFolder.open(folder.path).lives() is not False
            time.sleep(LOOK_S * follow)
            found = reader.read()
