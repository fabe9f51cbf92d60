"""Jobs as a table, in a terminal and in a notebook."""

from __future__ import annotations

import textwrap
import time
from collections import Counter
from collections.abc import Iterable
from html import escape

from hpcdask.errors import HpcdaskError
from hpcdask.jobs.state import OVER, JobState

from .job import Job

COLUMNS = ("job", "state", "reason", "exit code", "workers", "nodes", "age")
#: Rows that a table shows; the others are counted.
ROWS = 50


class JobTable(tuple[Job, ...]):
    """The jobs of a cluster, in the order in which they were submitted.

    A tuple of `hpcdask.clusters.job.Job`, with times as unix times in seconds and memory in bytes.
    It is shown as a table. Its column ``age`` is the time since the job started, or since it was
    submitted if it has not started, in hours, minutes and seconds.
    """

    def __new__(cls, jobs: Iterable[Job] = ()) -> JobTable:
        """Sort the jobs; those of one submission keep their order."""
        return super().__new__(cls, sorted(jobs, key=lambda job: job.submitted))

    def counts(self) -> str:
        """How many there are in each state, such as ``2 pending (Resources), 6 running``."""
        found: Counter[str] = Counter()
        for job in self:
            if job.state in OVER and (job.state == JobState.COMPLETED or job.cancelled):
                continue
            why = job.reason if job.state not in OVER else ""  # it waits, or is suspended
            found[f"{job.state} ({why})" if why else str(job.state)] += 1
        return ", ".join(f"{count} {what}" for what, count in found.items())

    def _rows(self) -> list[tuple[str, ...]]:
        live = [job for job in self if job.state not in OVER]
        over = [job for job in self if job.state in OVER]
        shown = set(map(id, [*live[:ROWS], *over[-max(0, ROWS - len(live)) :]][:ROWS]))
        now = time.time()
        return [_row(job, now) for job in self if id(job) in shown]

    def __repr__(self) -> str:
        rows = [COLUMNS, *self._rows()]
        widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        if len(self) > len(rows) - 1:
            lines.append(f"… {len(self) - len(rows) + 1} more")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        head = "".join(f"<th style='text-align: left'>{name}</th>" for name in COLUMNS)
        body = "".join(
            "<tr>"
            + "".join(f"<td style='text-align: left'>{escape(c)}</td>" for c in row)
            + "</tr>"
            for row in self._rows()
        )
        more = len(self) - len(self._rows())
        rest = f"<p>… {more} more</p>" if more else ""
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{rest}"


def _row(job: Job, now: float) -> tuple[str, ...]:
    return (
        job.id,
        str(job.state),
        job.reason,
        "" if job.exit_code is None else str(job.exit_code),
        f"{len(job.workers)}/{job.size}",
        job.nodes,
        "" if job.state in OVER else _age(now - (job.started or job.submitted)),
    )


def _age(seconds: float) -> str:
    minutes, rest = divmod(max(0, int(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


def text(jobs: JobTable, failure: HpcdaskError | None, link: str, tunnel: str) -> list[str]:
    """What a terminal shows beside distributed's own summary of a cluster."""
    failed = textwrap.shorten(str(failure), 100, placeholder=" …") if failure else ""
    parts = [
        jobs.counts(),
        f"dashboard {link}{tunnel and f' ({tunnel})'}" if link else "",
        f"failed: {failed}" if failed else "",
    ]
    return [part for part in parts if part]


def html(jobs: JobTable, failure: HpcdaskError | None, tunnel: str = "") -> str:
    """What a notebook shows beside distributed's own summary of a cluster."""
    parts = []
    if failure is not None:
        # It may end with lines of a log
        text = f"<strong>Failed:</strong> {escape(str(failure))}"
        parts.append(f"<div style='color: #b00020; white-space: pre-wrap'>{text}</div>")
    if tunnel:
        text = "The dashboard listens on this machine only. For a browser on yours:"
        parts.append(f"{text} <code>{escape(tunnel)}</code>")
    if jobs:
        counts = escape(jobs.counts()) or "all over"
        summary = f"<summary><strong>Jobs:</strong> {counts}</summary>"
        parts.append(f"<details>{summary}{jobs._repr_html_()}</details>")
    # Notebooks put what is in a table to the right
    return "".join(
        f"<tr><td colspan='2' style='text-align: left'>{part}</td></tr>" for part in parts
    )
