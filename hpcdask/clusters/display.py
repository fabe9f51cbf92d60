"""Jobs in words: as a table in a terminal and in a notebook, and why some have failed."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta

from hpcdask.errors import JobsFailed
from hpcdask.jobs.folder import ClusterFolder
from hpcdask.jobs.state import counts
from hpcdask.logs import html_table, text_table
from hpcdask.queues.job_state import OVER, JobState

from .job import Job, Policy

COLUMNS = ("group", "job", "state", "reason", "exit code", "workers", "nodes", "age")
#: Rows that a table shows; the others are counted.
ROWS = 50
#: What to do where a detached cluster's scheduler runs on a node that may not submit.
FROM_LOGIN_NODE = (
    "The node of the cluster's scheduler may not submit jobs: make the cluster on a login node, "
    "with scheduler_job=None, which keeps its scheduler there"
)


class JobTable(tuple[Job, ...]):
    """Table of the jobs of a cluster, in the order in which they were submitted.

    A tuple of `hpcdask.clusters.job.Job`, with times as unix times in seconds and memory in bytes.
    It is shown as a table. Its column ``age`` is the time since the job started, or since it was
    submitted if it has not started, in hours, minutes and seconds. Below it stands `problem`: why
    nothing can be submitted, or why jobs may wait for ever.
    """

    problem: str

    def __new__(cls, jobs: Iterable[Job] = (), problem: str = "") -> JobTable:
        """Sort the jobs; those of one submission keep their order."""
        table = super().__new__(cls, sorted(jobs, key=lambda job: job.submitted))
        table.problem = problem
        return table

    def counts(self) -> str:
        """Return how many there are in each state; those that ended as they should are left out."""
        return counts(
            job.report()
            for job in self
            if job.state not in OVER or not (job.cancelled or job.state == JobState.COMPLETED)
        )

    def _rows(self) -> list[tuple[str, ...]]:
        """Return the rows to show, heads first: jobs that are over give way to live ones."""
        first = sorted(self, key=lambda job: (job.state in OVER, -job.submitted))[:ROWS]
        shown = {job.id for job in first}
        rows = [COLUMNS, *(_row(job) for job in self if job.id in shown)]
        if len(self) > ROWS:
            rows.append(("", f"… {len(self) - ROWS} more", *[""] * (len(COLUMNS) - 2)))
        ungrouped = not any(job.group for job in self)
        return [row[ungrouped:] for row in rows]

    def __repr__(self) -> str:
        return "\n".join(filter(None, [text_table(self._rows()), self.problem]))

    def _repr_html_(self) -> str:
        return html_table(self._rows())


def _row(job: Job) -> tuple[str, ...]:
    seconds = max(0, int(time.time() - (job.started or job.submitted)))
    age = "" if job.state in OVER else str(timedelta(seconds=seconds))
    code = "" if job.exit_code is None else str(job.exit_code)
    workers = f"{len(job.workers)}/{job.size}"
    return job.group, job.id, str(job.state), job.reason, code, workers, job.nodes, age


# Failures


def job_ended(job: Job, folder: ClusterFolder) -> str:
    """Return a text on a job that nobody had ended, or that the queue would keep for ever."""
    what = "is given up, since the queue could not start it" if job.stuck else "has ended"
    reason = f" ({job.reason})" if job.reason else ""
    code = "" if job.exit_code is None else f", exit code {job.exit_code}"
    log = f". Log: {folder.log_path(job.id)}" if job.started else ""
    return f"job {job.id} {what}: {job.state}{reason}{code}{log}"


def jobs_failed(
    starts: Sequence[Job], died: Sequence[Job], policy: Policy, folder: ClusterFolder
) -> JobsFailed:
    """Return the error where too many jobs died, or did not start, with the end of the last log."""
    job = sorted((*starts, *died), key=lambda job: job.died or 0)[-1]
    passed_s = (job.died or 0) - (job.started or math.inf)
    late = passed_s >= policy.start_timeout_s and not job.arrived_at and not job.stuck
    what = f"{len(died)} jobs died within an hour"
    if len(starts) >= policy.failures_max:
        did = "brought no workers" if late else "ended before their workers connected"
        what = f"{len(starts)} jobs in a row {did}"
    if late:
        which = f"{job.size - len(job.workers)} of its workers" if job.workers else "its workers"
        how = f"{which} did not connect within {policy.start_timeout_s:g} s (start_timeout)"
    else:
        code = "unknown" if job.exit_code is None else job.exit_code
        how = ", ".join(filter(None, [str(job.state), job.reason, f"exit code {code}"]))
    log = "is empty: it may have ended before Python started. Check job_script_prologue and python"
    if tail := folder.tails([job.id], 10)[job.id]:
        log = "\n".join(["ends:", *tail])
    return JobsFailed(
        f"{what}. The last was job {job.id}: {how}. Script and log are in {folder.path}, the log "
        f"{log}"
    )
