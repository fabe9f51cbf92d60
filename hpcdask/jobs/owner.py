"""Owners of clusters and runs."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

from hpcdask.process import process_start
from hpcdask.spec.records import Record


@dataclass(frozen=True)
class Owner(Record):
    """The process that holds a cluster or run.

    `space` is its process id namespace: a process id means something only within host and
    namespace. `start` is when it started, in the kernel's ticks.
    """

    host: str
    space: str
    pid: int
    start: str

    @classmethod
    def this(cls) -> Owner:
        """Return this process."""
        space = os.readlink("/proc/self/ns/pid")
        return cls(socket.gethostname(), space, os.getpid(), process_start(os.getpid()))

    def lives(self) -> bool | None:
        """Return whether it still runs; None if that cannot be seen from here."""
        here = Owner.this()
        if (self.host, self.space) != (here.host, here.space):
            return None
        return process_start(self.pid) == self.start
