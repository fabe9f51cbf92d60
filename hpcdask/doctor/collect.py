"""Gathers groups of facts, each in a process of its own that is given up after a deadline.

A driver or a network file system that hangs cannot be interrupted, not even by SIGKILL, but its
process can be left behind.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

from hpcdask.errors import HpcdaskError
from hpcdask.process import detach_standard_streams
from hpcdask.spec.records import Record

#: Seconds for a group of facts, unless it has a deadline of its own.
DEADLINE_S = 20.0
#: A fork, so that nothing is imported again: this process has one thread.
CONTEXT = multiprocessing.get_context("fork")
Reader = Callable[[], Record | None]


class Gathering:
    """Groups of facts that are being gathered; `deadlines` has more seconds for some."""

    def __init__(
        self, readers: Mapping[str, Reader], deadlines: Mapping[str, float] | None = None
    ) -> None:
        self._began = time.monotonic()
        self._deadlines = {name: (deadlines or {}).get(name, DEADLINE_S) for name in readers}
        self._running = {name: _start(reader) for name, reader in readers.items()}

    def results(self) -> dict[str, Any]:
        """Return the facts by group, as JSON, with ``problems`` that say why some are missing."""
        found: dict[str, Any] = {"problems": {}}
        for name, (process, pipe) in self._running.items():
            deadline_s = self._deadlines[name]
            try:
                if pipe.poll(max(0.0, self._began + deadline_s - time.monotonic())):
                    facts, problem = json.loads(pipe.recv_bytes())
                else:
                    facts, problem = None, f"did not answer within {deadline_s:g} s"
            except (EOFError, OSError):
                facts, problem = None, "its process has died"
            if problem:
                found["problems"][name] = problem
            elif facts is not None:
                found[name] = facts
            process.kill()
        return found

    @property
    def hangs(self) -> bool:
        """Return whether a process is left behind, for which Python's end would wait."""
        for process, _ in self._running.values():
            process.join(0.1)
        return any(process.is_alive() for process, _ in self._running.values())


def _start(reader: Reader) -> tuple[multiprocessing.process.BaseProcess, Connection]:
    ours, theirs = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=_tell, args=(reader, theirs), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _tell(reader: Reader, pipe: Connection) -> None:
    # A launcher waits for the end of what it gave the rank
    detach_standard_streams(output=True)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in (0, 1, 2, pipe.fileno()):
            with contextlib.suppress(OSError):  # the listing's own
                os.close(int(name))
    facts, problem = None, ""
    try:
        told = reader()
        facts = None if told is None else told.to_json()
    except BaseException as error:
        kind = "" if isinstance(error, HpcdaskError) else f"{type(error).__name__}: "
        problem = kind + " ".join(str(error).split()) or type(error).__name__
    pipe.send_bytes(json.dumps([facts, problem]).encode())
