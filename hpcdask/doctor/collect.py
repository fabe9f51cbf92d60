"""Gathers groups of facts, each in a process of its own that is given up after a deadline.

A driver or a network file system that hangs cannot be interrupted, not even by SIGKILL, but its
process can be left behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
from collections.abc import Callable, Mapping

from hpcdask.errors import HpcdaskError
from hpcdask.process import detach_standard_streams

from .findings import Facts

#: Seconds for a group of facts. An NVML without a persistence daemon takes some for each GPU.
DEADLINE_S = 20.0


class Gathering:
    """Groups of facts that are being gathered; after `deadline_s` seconds a group is given up.

    Must be made while the process has one thread: each group is a fork.
    """

    def __init__(
        self, readers: Mapping[str, Callable[[], Facts]], deadline_s: float = DEADLINE_S
    ) -> None:
        self._limit = deadline_s
        self._deadline = time.monotonic() + deadline_s
        self._running = {group: _fork(reader) for group, reader in readers.items()}

    def results(self) -> Facts:
        """The facts by group. A group that failed has one entry, ``problem``. Call it once."""
        facts: Facts = {}
        texts = {pipe: b"" for _, pipe in self._running.values()}
        waiting = set(texts)
        while waiting and (left := self._deadline - time.monotonic()) > 0:
            for pipe in select.select(list(waiting), [], [], left)[0]:
                chunk = os.read(pipe, 65536)
                texts[pipe] += chunk
                if not chunk:
                    waiting.discard(pipe)
        for group, (pid, pipe) in self._running.items():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, os.WNOHANG)  # even a killed one may hang in the kernel
            os.close(pipe)
            if pipe in waiting:
                facts[group] = {"problem": f"did not answer within {self._limit:g} s"}
            else:
                facts[group] = {"problem": "its process has died"}
                with contextlib.suppress(ValueError):  # it may have told a part
                    facts[group] = json.loads(texts[pipe])
        return facts


def _fork(reader: Callable[[], Facts]) -> tuple[int, int]:
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write_end)
        return pid, read_end
    try:
        _detach(keep=write_end)
        try:
            text = json.dumps(reader()).encode()
        except BaseException as error:
            kind = "" if isinstance(error, HpcdaskError) else f"{type(error).__name__}: "
            problem = kind + " ".join(str(error).split())
            text = json.dumps({"problem": problem}).encode()
        while text:
            text = text[os.write(write_end, text) :]
    finally:
        os._exit(0)


def _detach(keep: int) -> None:
    """Close all that a launcher might wait for, or that belongs to the parent."""
    detach_standard_streams(output=True)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in (0, 1, 2, keep):
            with contextlib.suppress(OSError):  # the listing's own
                os.close(int(name))
