"""Job scripts of systems whose options are comment lines: ``#SBATCH``, ``#PBS``, ``#BSUB``…"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from hpcdask.errors import UsageError
from hpcdask.upstream.parts import prologue


def render(job: Any, header: Sequence[str], preamble: Sequence[str], command: str) -> str:
    """Put a job script together, with a line end.

    `header` is whole lines, such as ``#SBATCH --gres=gpu:1``; `preamble` goes before the user's
    prologue. `job` is as in `Queue.script`.
    """
    lines = [*preamble, *prologue(job), command]
    return "\n".join([job.shebang, *header, "", *lines, ""])


def clean_name(name: str, good: str, start: str, longest: int) -> str:
    """Return a job name with `_` for what a queue does not take.

    `good` are the characters that it takes, as in a regular expression's brackets, and `start` the
    same for the first one, if that is a narrower choice. The name is cut after `longest`.
    """
    clean = re.sub(f"[^{good}]", "_", name)
    if start and not re.match(f"[{start}]", clean):
        clean = f"j{clean}"
    return clean[:longest]


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


def double_quoted(value: str, what: str, escaped: str = '"\\') -> str:
    """Return a value in double quotes, each character of `escaped` behind a backslash."""
    text = "".join(f"\\{c}" if c in escaped else c for c in one_line(value, what))
    return f'"{text}"'


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
