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
from hpcdask.process import detach_standard_streams

#: A fork, so that nothing is imported again: this process has one thread.
CONTEXT = multiprocessing.get_context("fork")
#: More descriptors than this process has open.
FILES = 4096
#: Function that returns the facts of a group, or None where there are none.
Reader = Callable[[], Any]


class Gathering:
    """Groups of facts that are being gathered."""

    def __init__(self, readers: Mapping[str, Reader], deadline_s: float) -> None:
        self._deadline_s, self._until = deadline_s, time.monotonic() + deadline_s
        self._running = {name: _start(reader) for name, reader in readers.items()}

    def results(self) -> dict[str, Any]:
        """Return the facts by group, with ``problems`` that say why some are missing."""
        problems: dict[str, str] = {}
        found: dict[str, Any] = {"problems": problems}
        for name, (process, pipe) in self._running.items():
            facts, problem = None, f"did not answer within {self._deadline_s:g} s"
            try:
                if pipe.poll(max(0.0, self._until - time.monotonic())):
                    facts, problem = pipe.recv()
            except (EOFError, OSError):
                problem = "its process has died"
            if problem:
                problems[name] = problem
            else:
                found[name] = facts
            process.kill()
        return found


def _start(reader: Reader) -> tuple[multiprocessing.process.BaseProcess, Connection]:
    ours, theirs = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=_answer, args=(reader, theirs), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _answer(reader: Reader, pipe: Connection) -> None:
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
