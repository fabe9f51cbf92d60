"""Functions that queueing systems share: lines of scripts, output of commands, times, states."""

from __future__ import annotations

import asyncio
import os
import pwd
import re
import shlex
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from xml.etree import ElementTree

from hpcdask.errors import QueueError, UsageError
from hpcdask.process import signal_name
from hpcdask.upstream.parts import prologue

from .job_state import OVER, JobState, QueueStatus

T = TypeVar("T")
#: Exit code of a job that the queue has started a second time.
AGAIN = 75
#: What a state's word means, and the reason to tell if the queue gives none.
Words = Mapping[str, tuple[JobState, str]]
#: State, reason and exit code of a job that is over.
End = tuple[JobState, str, int | None]


# What a script says


def render(job: Any, header: Sequence[str], preamble: Sequence[str], command: str) -> str:
    """Put a job script together, with a line end.

    `header` is whole lines, such as ``#SBATCH --gres=gpu:1``; `preamble` goes before the user's
    prologue. `job` is as in `Queue.script`.
    """
    lines = [*preamble, *prologue(job), command]
    return "\n".join([job.shebang, *header, "", *lines, ""])


def check_lines(value: Any, what: str) -> None:
    """Raise UsageError for a value with line ends, alone or in a list or mapping."""
    if isinstance(value, str):
        one_line(value, what)
    elif isinstance(value, Mapping):
        check_lines([*value, *value.values()], what)
    elif isinstance(value, list | tuple | set):
        for item in value:
            check_lines(item, what)


def one_line(value: str, what: str) -> str:
    """Return a value that stands in a directive, if it fits in a line.

    Raises UsageError if it holds a control character such as a newline, which no directive can
    express, or what else `str.splitlines` splits at.
    """
    if any(ord(c) < 32 or ord(c) == 127 for c in value) or len(f"{value}.".splitlines()) > 1:
        raise UsageError(
            f"{what} {value!r} has a control character or line end, which no line of a job script "
            f"can hold. Take it out"
        )
    return value


def option_words(line: str, *, comments: bool = False) -> list[str]:
    """Split a line of options as a shell does."""
    try:
        return shlex.split(line, comments=comments)
    except ValueError:  # a quote without its end
        return line.split()


def option_values(directive: str, *options: str) -> Iterator[str]:
    """Yield values of options: ``--name=VALUE``, ``--name VALUE``, ``-l VALUE``, ``-lVALUE``."""
    words = option_words(directive)
    for word, following in zip(words, [*words[1:], ""], strict=False):
        for option in options:
            joined = f"{option}=" if option.startswith("--") else option
            if word == option:
                yield following
            elif word.startswith(joined) and (joined != option or len(option) == 2):
                yield word.removeprefix(joined)


def first_number(pattern: re.Pattern[str], values: Iterable[str]) -> int | None:
    """Return the number in the first value that matches; one where it has none."""
    found = next(filter(None, map(pattern.search, values)), None)
    return int(next(filter(None, found.groups()), 1)) if found else None


def walltime_text(value: Any) -> str:
    """Return a walltime as text.

    Raises UsageError for a number: YAML makes 7200 of 02:00:00, which SLURM takes as minutes.
    """
    if isinstance(value, int | float):
        raise UsageError(
            f"walltime={value} is a number, and queues differ in what that counts: write "
            f'"02:00:00", in quotes in a YAML file too'
        )
    return str(value)


def parse_clock(text: str, units: str, forms: str, shown: str = "") -> timedelta:
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
    raise UsageError(f"walltime={shown or text!r} is not one of {forms}")


async def read(script: str) -> str:
    """Return a script's text; the file system may be slow."""
    return await asyncio.to_thread(Path(script).read_text)


# What commands say


def read_xml(text: str, command: str) -> ElementTree.Element:
    """Read the XML that a command printed. Raises QueueError if it is none."""
    try:
        return ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise QueueError(f"the XML of {command} is broken: {error}") from None


def pick(ids: Collection[str], found: Mapping[str, T]) -> dict[str, T]:
    """Return the jobs with these ids."""
    return {job_id: found[job_id] for job_id in ids if job_id in found}


def fold(
    job_id: str,
    word: str,
    known: Words,
    end: Callable[[], End],
    *,
    waits: str = "",
    again: object = False,
    started: float | None = None,
    walltime: float | None = None,
    nodes: str = "",
) -> QueueStatus:
    """Return a job's status from the queue's word for its state and other facts.

    `waits` is why it waits, if it does, and `again` tells whether it has run before; `end` is asked
    how it ended if it is over.
    """
    state, reason = known.get(word, (JobState.UNKNOWN, word))
    ends = started + walltime if started and walltime else None
    code = None
    if state is JobState.PENDING:
        state = JobState.REQUEUED if again else state
        reason, started, ends = waits or reason, None, None
    elif state in OVER:
        state, reason, code = end()
    return QueueStatus(job_id, state, reason, code, 0, started, ends, nodes)


def elements(text: str) -> list[int]:
    """Return the numbers of an array's elements, listed as in ``1,3-7:2``."""
    ranges = re.findall(r"(\d+)(?:-(\d+))?(?::(\d+))?", text)
    return [
        number
        for first, last, step in ranges
        for number in range(int(first), int(last or first) + 1, int(step or 1))
    ]


def ended(code: int | None, *, failed: bool = False) -> tuple[JobState, str]:
    """Return state and reason of a job that ended with this exit code; 128 + n is signal n.

    Without a code, or with 0, it has completed, unless the queue says that it has `failed`.
    """
    if code is None or code == 0:
        return (JobState.FAILED if failed else JobState.COMPLETED), ""
    if code == AGAIN:
        return JobState.PREEMPTED, "the queue started it a second time"
    if 128 < code < 193:
        return JobState.FAILED, f"ended by {signal_name(code - 128)}"
    return JobState.FAILED, ""


def unix_time(text: str | None, form: str = "%a %b %d %H:%M:%S %Y") -> float | None:
    """Read a local time; None if it has another form."""
    try:
        return time.mktime(time.strptime((text or "").strip(), form))
    except (ValueError, OverflowError):
        return None


def user() -> str:
    """Return the name of this user, as queues show it."""
    return pwd.getpwuid(os.geteuid()).pw_name
