"""What doors to queueing systems share: names, values in a header, times, exit codes."""

from __future__ import annotations

import asyncio
import os
import pwd
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Collection
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hpcdask.errors import Refused, UsageError
from hpcdask.queues.base import Request
from hpcdask.queues.script import header_lines, one_line

from .job_state import QueueState

#: Exit code of a job that the queue has started a second time.
AGAIN = 75


def one_node(request: Request, title: str) -> None:
    """Raise UsageError for jobs of several nodes: nothing would start workers on the others."""
    if request.nodes > 1:
        raise UsageError(
            f"nodes_per_job={request.nodes}: jobs of several nodes are for SLURM only. With "
            f"{title}, ask for jobs of one node, and more of them"
        )


def first_life(request: Request, job_id: str) -> str:
    """Shell line that ends a job which the queue started before.

    Some queues run a job again under its id and do not tell the job. Its workers would come with
    names that the scheduler may still know, so the job ends, and the cluster replaces it.
    """
    log = f"{shlex.quote(request.folder)}/{job_id}.log"
    return f"[ ! -e {log} ] || exit {AGAIN}  # started before: the cluster replaces this job"


def walltime_text(value: Any) -> str:
    """A walltime as it is written, of which YAML may have made a number.

    Raises UsageError if it is one: 7200 is what YAML makes of 02:00:00, and SLURM takes it as
    minutes.
    """
    if isinstance(value, int | float):
        raise UsageError(
            f"walltime={value} is a number, and queues differ in what that counts: write "
            f'"02:00:00", in quotes in a YAML file too'
        )
    return str(value)


async def read(script: str) -> str:
    """Return a script's text; the file system may be slow."""
    return await asyncio.to_thread(Path(script).read_text)


def clean_name(name: str, good: str, start: str = "", longest: int = 200) -> str:
    """Return a job name with `_` for what a queue does not take.

    `good` are the characters that it takes, as in a regular expression's brackets, and `start` the
    same for the first one, if that is a narrower choice. The name is cut after `longest`.
    """
    clean = re.sub(f"[^{good}]", "_", name)
    if start and not re.match(f"[{start}]", clean):
        clean = f"j{clean}"
    return clean[:longest]


def renamed(name: str, clean: str, title: str) -> list[str]:
    """Return a comment for the script where the name had to change."""
    return [] if clean.startswith(name) else [f"# {title} does not take the job name {name!r}"]


def quoted_header(
    job: Any,
    prefix: str,
    name: str,
    quote: Callable[[str], str],
    flags: Collection[str],
    name_flag: str = "-N",
) -> list[str]:
    """Return dask-jobqueue's header with its values quoted and another job name.

    `prefix` is that of its directives, such as ``#PBS``. `quote` is as the queue's parser wants it,
    and is used for the options in `flags`, where that is necessary. ``job_extra_directives`` stay
    as the user wrote them.
    """
    own = {f"{prefix} {directive}" for directive in job.job_extra_directives}
    lines = []
    for line in header_lines(job):
        start, _, value = line.partition(" ")[2].partition(" ")
        if line not in own and start == name_flag:
            line = f"{prefix} {name_flag} {name}"
        elif line not in own and start in flags and not value.startswith('"'):
            line = f"{prefix} {start} {quote(one_line(value, f'{prefix} {start}'))}"
        lines.append(line)
    return lines


def with_header(job: Any, lines: Collection[str]) -> Any:
    """Return what `render` needs of a job, with another header."""
    return SimpleNamespace(
        shebang=job.shebang,
        job_header="\n".join(lines),
        _job_script_prologue=job._job_script_prologue,
    )


def parse_clock(text: str, units: str, forms: str) -> timedelta:
    """Read numbers between colons, such as ``2:00:00``.

    `units` has the last number's first, such as ``smhd``. Raises UsageError, with `forms`, if the
    text has another form or is nothing.
    """
    seconds = {"s": 1, "m": 60, "h": 3600, "d": 86400}
    if re.fullmatch(r"\d+(:\d+)*", text.strip()):
        numbers = [int(number) for number in text.strip().split(":")][::-1]
        if len(numbers) <= len(units) and any(numbers):
            pairs = zip(numbers, units, strict=False)
            return timedelta(seconds=sum(number * seconds[unit] for number, unit in pairs))
    raise UsageError(f"walltime={text!r} is not one of {forms}")


def ended(code: int | None) -> tuple[QueueState, str]:
    """State and reason of a job that ended by itself with this exit code; 128 + n is signal n."""
    if code is None or code == 0:
        return QueueState.COMPLETED, ""
    if code == AGAIN:
        return QueueState.PREEMPTED, "the queue started it a second time"
    if 128 < code < 193:
        try:
            return QueueState.FAILED, f"ended by {signal.Signals(code - 128).name}"
        except ValueError:
            pass
    return QueueState.FAILED, ""


def unix_time(text: str | None, form: str) -> float | None:
    """Read a local time; None if it has another form."""
    try:
        return time.mktime(time.strptime((text or "").strip(), form))
    except (ValueError, OverflowError):
        return None


def user() -> str:
    """Name of this user, as queues show it."""
    return pwd.getpwuid(os.geteuid()).pw_name


def words(done: subprocess.CompletedProcess[str]) -> str:
    """Return what a command said, in one line, without a full stop."""
    text = " ".join((done.stderr.strip() or done.stdout.strip()).split())
    return text[:500].rstrip(".") or f"exit code {done.returncode}"


def refused(
    done: subprocess.CompletedProcess[str], script: str, advice: str, limits: re.Pattern[str]
) -> Refused:
    """Return the error of a submission: for now if its words match `limits`."""
    text = words(done)
    return Refused(
        f"{done.args[0]} refused the job: {text}. Script kept at {script}. {advice}",
        for_now=bool(limits.search(text)),
    )
