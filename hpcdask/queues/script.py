"""Job scripts of systems whose options are comment lines: ``#SBATCH``, ``#PBS``, ``#BSUB``…"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hpcdask.errors import UsageError


def render(job: Any, directives: Sequence[str], preamble: Sequence[str], command: str) -> str:
    """Put a job script together, with a line end.

    `directives` are whole lines that go after the header, such as ``#SBATCH --gres=gpu:1``;
    `preamble` goes before the user's prologue. `job` is as in `Queue.script`.
    """
    lines = [
        job.shebang,
        *header_lines(job),
        *directives,
        "",
        *preamble,
        *(job._job_script_prologue or ()),
        command,
    ]
    return "\n".join(lines) + "\n"


def header_lines(job: Any) -> list[str]:
    """Return the header's lines; an empty header has none."""
    return [line for line in (job.job_header or "").split("\n") if line.strip()]


def check_lines(value: Any, what: str) -> None:
    """Refuse a value with line ends, alone or in a list or mapping; see `one_line`."""
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


def double_quoted(value: str, what: str, escaped: str = '"\\') -> str:
    """Return a value in double quotes, each character of `escaped` behind a backslash."""
    text = "".join(f"\\{c}" if c in escaped else c for c in one_line(value, what))
    return f'"{text}"'
