"""Jobs as a table, in a terminal and in a notebook."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Collection, Iterable
from html import escape

from hpcdask.errors import HpcdaskError, UsageError
from hpcdask.gpu.table import GpuTable
from hpcdask.jobs.state import OVER, JobState, counts
from hpcdask.logs import html_table, text_table

from .job import Job

COLUMNS = ("group", "job", "state", "reason", "exit code", "workers", "nodes", "age")
#: Rows that a table shows; the others are counted.
ROWS = 50


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

    def _columns(self) -> tuple[str, ...]:
        return COLUMNS if any(job.group for job in self) else COLUMNS[1:]

    def _rows(self) -> list[tuple[str, ...]]:
        live = [job for job in self if job.state not in OVER]
        over = [job for job in self if job.state in OVER]
        shown = set(map(id, [*live[:ROWS], *over[-max(0, ROWS - len(live)) :]][:ROWS]))
        now = time.time()
        count = len(self._columns())
        return [_row(job, now)[-count:] for job in self if id(job) in shown]

    def __repr__(self) -> str:
        rows = self._rows()
        more = len(self) - len(rows)
        lines = [f"… {more} more"] if more else []
        return "\n".join(
            [text_table([self._columns(), *rows]), *lines, *filter(None, [self.problem])]
        )

    def _repr_html_(self) -> str:
        rows = self._rows()
        more = len(self) - len(rows)
        return html_table([self._columns(), *rows]) + (f"<p>… {more} more</p>" if more else "")


def _row(job: Job, now: float) -> tuple[str, ...]:
    return (
        job.group,
        job.id,
        str(job.state),
        job.reason,
        "" if job.exit_code is None else str(job.exit_code),
        f"{len(job.workers)}/{job.size}",
        job.nodes,
        "" if job.state in OVER else age(now - (job.started or job.submitted)),
    )


def age(seconds: float) -> str:
    """Return hours, minutes and seconds, such as ``1:00:00``."""
    minutes, rest = divmod(max(0, int(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


def text(jobs: JobTable, failure: HpcdaskError | None, link: str, tunnel: str) -> list[str]:
    """Return the lines that a terminal shows beside distributed's own summary of a cluster."""
    failed = textwrap.shorten(str(failure), 100, placeholder=" …") if failure else ""
    parts = [
        jobs.counts(),
        jobs.problem,
        f"dashboard {link}{tunnel and f' ({tunnel})'}" if link else "",
        f"failed: {failed}" if failed else "",
    ]
    return [part for part in parts if part]


def html(
    jobs: JobTable,
    gpus: GpuTable,
    failure: HpcdaskError | None,
    tunnel: str = "",
    transport: str = "",
) -> str:
    """Return the HTML that a notebook shows beside distributed's own summary of a cluster."""
    parts = []
    if failure is not None:
        # It may end with lines of a log
        text = f"<strong>Failed:</strong> {escape(str(failure))}"
        parts.append(f"<div style='color: #b00020; white-space: pre-wrap'>{text}</div>")
    if jobs.problem:
        parts.append(f"<strong>{escape(jobs.problem)}</strong>")
    if tunnel:
        text = "The dashboard listens on this machine only. For a browser on yours:"
        parts.append(f"{text} <code>{escape(tunnel)}</code>")
    if transport:
        parts.append(f"<strong>Transport:</strong> {escape(transport)}")
    if jobs:
        counts = escape(jobs.counts()) or "all over"
        summary = f"<summary><strong>Jobs:</strong> {counts}</summary>"
        parts.append(f"<details>{summary}{jobs._repr_html_()}</details>")
    if gpus:
        summary = f"<summary><strong>GPUs:</strong> {escape(gpus.summary())}</summary>"
        parts.append(f"<details>{summary}{gpus._repr_html_()}</details>")
    # Notebooks put what is in a table to the right
    return "".join(
        f"<tr><td colspan='2' style='text-align: left'>{part}</td></tr>" for part in parts
    )


def chosen_jobs(
    ids: Iterable[str | int | Iterable[str | int]], known: Collection[str]
) -> list[str]:
    """Return ids of jobs from ids and lists of them; raise UsageError for unknown ones."""
    asked: list[str] = []
    for some in ids:
        asked += [str(some)] if isinstance(some, str | int) else map(str, some)
    if unknown := set(asked) - set(known):
        raise UsageError(
            f"job_logs: no job {', '.join(sorted(unknown))}. There are: {', '.join(known)}"
        )
    return asked
