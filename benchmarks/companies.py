"""The processes of stand-ins, as `scale.py` and `scale_jobs.py` hold them."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

#: Stand-ins in one process.
COMPANY = 250
#: Seconds for any step.
PATIENCE_S = 900.0


class Companies:
    """Processes of stand-ins, told together what to do."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._environment = environment
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lines: list[Any] = []

    def start(self) -> None:
        """One more process."""
        here, there = socket.socketpair()
        here.settimeout(PATIENCE_S)
        with here, there:
            command = [
                sys.executable,
                str(Path(__file__).parent / "stand_ins.py"),
                str(there.fileno()),
            ]
            self._processes.append(
                subprocess.Popen(command, env=self._environment, pass_fds=[there.fileno()])
            )
            self._lines.append(here.makefile("rw"))

    def tell(self, orders: Sequence[dict[str, Any]]) -> None:
        """Give each process its order."""
        for line, order in zip(self._lines, orders, strict=True):
            line.write(json.dumps(order) + "\n")
            line.flush()

    def answers(self) -> list[Any]:
        """What each says when all of its stand-ins have done it."""
        told = [
            json.loads(line.readline() or '{"error": "a process ended"}') for line in self._lines
        ]
        if errors := [one["error"] for one in told if "error" in one]:
            raise RuntimeError(f"stand-ins: {errors[0]}")
        return [one["done"] for one in told]

    def do(self, what: str, **words: Any) -> list[Any]:
        """Give all the same order and wait."""
        self.tell([{"do": what, **words}] * len(self._lines))
        return self.answers()

    def close(self) -> None:
        """End them."""
        for line in self._lines:
            with contextlib.suppress(OSError):
                line.close()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()


def shares(first: int, count: int) -> list[tuple[int, int]]:
    """Numbers from `first` on for each process: its first, and the one after its last."""
    end = first + count
    return [(at, min(at + COMPANY, end)) for at in range(first, end, COMPANY)]
