"""Lines for the user, one each, on stderr."""

from __future__ import annotations

import contextlib
import logging
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

LOGGERS = (
    "distributed",
    "distributed.scheduler",
    "distributed.worker",
    "distributed.nanny",
    "distributed.core",
    "tornado.application",
    "asyncio",
)
#: Events of workers that died, each a line for the user, by which a notebook hears of them.
DIED = "hpcdask-worker-died"


def say(text: str) -> None:
    """Print one line for the user; go on if it cannot be written."""
    with contextlib.suppress(OSError, ValueError):
        print(f"hpcdask: {text}", file=sys.stderr, flush=True)


def complain(error: BaseException | str) -> None:
    """Print one line that says what went wrong."""
    say(f"error: {error}")


def plural(number: int, noun: str) -> str:
    """Return ``1 worker``, ``2 workers``."""
    return f"{number} {noun}{'s' * (number != 1)}"


def natural(name: str) -> list[int | str]:
    """Return a key that sorts names by the numbers in them: w2 before w10."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def some(names: Iterable[str], most: int = 5, joint: str = ", ") -> str:
    """Return ``a, b and 7 more``: each name once, and at most the first `most`."""
    listed = list(dict.fromkeys(names))
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return joint.join(listed[:most]) + more


def spans(numbers: Iterable[int]) -> str:
    """Return ``0-3,8`` for 0, 1, 2, 3 and 8."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def numbered(noun: str, numbers: Collection[int]) -> str:
    """Return ``rank 3``, ``ranks 0-3,8``."""
    return f"{noun}{'s' * (len(numbers) != 1)} {spans(numbers)}"


def by_host(hosts: Iterable[str]) -> str:
    """Return the number of entries of each host: ``4 on n1, 3 on n2``."""
    return some(f"{count} on {host}" for host, count in Counter(hosts).items())


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Lay rows out in columns for a terminal; the first row has the columns' names."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def html_table(rows: Sequence[Sequence[str]]) -> str:
    """Lay rows out as `text_table` does, for a notebook."""
    from html import escape

    def line(tag: str, row: Sequence[str]) -> str:
        cells = (f"<{tag} style='text-align: left'>{escape(cell)}</{tag}>" for cell in row)
        return f"<tr>{''.join(cells)}</tr>"

    head, *rest = rows
    body = "".join(line("td", row) for row in rest)
    return f"<table><thead>{line('th', head)}</thead><tbody>{body}</tbody></table>"


#: distributed's own format of a line.
USUAL_FORMAT = "%(asctime)s - %(name)s - %(levelname)s - %(message)s"


def sign_lines(node: str, worker: str) -> None:
    """Add the process's name to lines of the log, unless the user configured logging."""
    import dask.config

    usual = dask.config.get("distributed.admin.log-format", USUAL_FORMAT) == USUAL_FORMAT
    if dask.config.get("logging", None) is not None or not usual:
        return
    who = f"{node} - {worker}".replace("%", "%%")
    signed = logging.Formatter(f"%(asctime)s - {who} - %(levelname)s - %(name)s - %(message)s")
    for name in LOGGERS:
        for handler in logging.getLogger(name).handlers:
            if type(handler) is logging.StreamHandler:  # not the one that keeps them in memory
                handler.setFormatter(signed)


def set_log_level(level: str = "WARNING") -> None:
    """Make distributed log from this level on, unless the user configured logging."""
    import dask.config

    if dask.config.get("logging", None) is None:
        for name in LOGGERS:
            logging.getLogger(name).setLevel(level)
        for name in ("distributed.comm.tcp", "distributed.nanny", "distributed.worker"):
            logging.getLogger(name).addFilter(_not_of_the_departed)


def _not_of_the_departed(record: logging.LogRecord) -> bool:
    """Drop or shorten distributed's lines on peers that ended during a conversation."""
    from distributed.comm import CommClosedError

    from hpcdask.upstream import distributed

    text, error = record.getMessage(), record.exc_info and record.exc_info[1]
    if distributed.HEARTBEAT_FAILED in text:
        return not isinstance(error, CommClosedError)
    if text == distributed.NOT_CONNECTED or text.startswith(distributed.RESTARTING):
        return False  # the nanny says why
    if text.startswith(distributed.PEER_LEFT):  # it is fetched elsewhere, or computed again
        unreachable = str(error).startswith(distributed.CONNECT_TIMED_OUT)
        if unreachable:
            record.msg, record.args = f"{text}: {error}", ()
        if unreachable or isinstance(error, CommClosedError):
            record.exc_info = record.exc_text = None
    return not (distributed.HANDSHAKE_FAILED in text and "EOF" in text)
