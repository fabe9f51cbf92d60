"""What this process tells the user: one line each, on stderr."""

from __future__ import annotations

import contextlib
import sys


def say(text: str) -> None:
    """One line for the user; where that cannot be written, the run goes on."""
    with contextlib.suppress(OSError, ValueError):
        print(f"hpcdask: {text}", file=sys.stderr, flush=True)


def complain(error: BaseException | str) -> None:
    """One line that says what went wrong."""
    say(f"error: {error}")
