"""Gathering of facts, each group in a process of its own that is given up after a deadline.

A driver or a network file system that hangs cannot be interrupted, not even by SIGKILL, but its
process can be left behind.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

from hpcdask.errors import HpcdaskError, root_cause
from hpcdask.process import FILES, detach_standard_streams

#: A fork, so that nothing is imported again: this process has one thread.
CONTEXT = multiprocessing.get_context("fork")


class Gathering:
    """Groups of facts that are being gathered, each by a function; None is no facts."""

    def __init__(self, readers: Mapping[str, Callable[[], Any]], deadline_s: float) -> None:
        self._deadline_s, self._until = deadline_s, time.monotonic() + deadline_s
        self._running = {}
        for name, reader in readers.items():
            ours, theirs = CONTEXT.Pipe(duplex=False)
            process = CONTEXT.Process(target=_answer, args=(reader, theirs), daemon=True)
            process.start()
            theirs.close()
            self._running[name] = process, ours

    def results(self) -> dict[str, Any]:
        """Return the facts by group, with ``problems`` that say why some are missing."""
        problems: dict[str, str] = {}
        found: dict[str, Any] = {"problems": problems}
        for name, (process, pipe) in self._running.items():
            problem = f"did not answer within {self._deadline_s:g} s"
            try:
                if pipe.poll(max(0.0, self._until - time.monotonic())):
                    found[name], problem = pipe.recv()
            except (EOFError, OSError):
                problem = "its process has died"
            if problem:
                problems[name] = problem
            process.kill()
        return found


def _answer(reader: Callable[[], Any], pipe: Connection) -> None:
    # a launcher waits for the end of the descriptors that it gave the rank
    detach_standard_streams()
    os.closerange(3, pipe.fileno())
    os.closerange(pipe.fileno() + 1, FILES)
    try:
        pipe.send((reader(), ""))
    except HpcdaskError as error:
        pipe.send((None, str(error)))
    except Exception as error:
        pipe.send((None, root_cause(error)))
