"""What this process tells the user: one line each, on stderr."""

from __future__ import annotations

import contextlib
import logging
import sys


def say(text: str) -> None:
    """One line for the user; where that cannot be written, the run goes on."""
    with contextlib.suppress(OSError, ValueError):
        print(f"hpcdask: {text}", file=sys.stderr, flush=True)


def complain(error: BaseException | str) -> None:
    """One line that says what went wrong."""
    say(f"error: {error}")


def plural(number: int, noun: str) -> str:
    """``1 worker``, ``2 workers``."""
    return f"{number} {noun}{'s' * (number != 1)}"


def set_log_level(level: str = "WARNING") -> None:
    """Have distributed log from this level on, unless the user configured logging."""
    import dask.config

    if dask.config.get("logging", None) is None:
        for name in (
            "distributed",
            "distributed.scheduler",
            "distributed.worker",
            "distributed.nanny",
            "distributed.core",
            "tornado.application",
            "asyncio",
        ):
            logging.getLogger(name).setLevel(level)
        for name in ("distributed.comm.tcp", "distributed.nanny", "distributed.worker"):
            logging.getLogger(name).addFilter(_not_of_the_departed)


def _not_of_the_departed(record: logging.LogRecord) -> bool:
    """Leave out that a process, of this cluster say, ended in the middle of a conversation.

    Where it was the scheduler, its stream's end is noticed, and told in one line, by itself.
    """
    from distributed.comm import CommClosedError

    text, error = record.getMessage(), record.exc_info and record.exc_info[1]
    if "during heartbeat" in text:
        return not isinstance(error, CommClosedError)
    if text == "Worker failed to connect":  # the nanny says why
        return False
    told = ("Worker stream died", "failed during get data")
    if text.startswith(told) and isinstance(error, CommClosedError):
        record.exc_info = record.exc_text = None  # it is fetched elsewhere, or computed again
    return not ("TLS handshake failed" in text and "EOF" in text)
