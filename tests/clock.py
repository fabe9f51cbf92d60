"""Time on a busy machine: deadlines, and a clock for what must be over soon."""

from __future__ import annotations

import math
import os
import time

#: A deadline ends what hangs. It is so many times what a machine without other work needs.
PATIENCE = 6


def clock() -> float:
    """Return seconds, which last `PATIENCE` times as long while a process waits for a CPU.

    What must be over within seconds is measured by it, on a busy machine too. All processes of a
    machine have the same one. Without the kernel's figure (PSI) the machine counts as busy.
    """
    now = time.time()
    try:
        with open("/proc/pressure/cpu") as file:
            waited = int(file.readline().rpartition("total=")[2]) / 1e6
    except (OSError, ValueError):
        waited = now
    return now - waited * (1 - 1 / PATIENCE)


def stretched(seconds: float) -> int:
    """Return a deadline of the program under test that others of it keep, on a busy machine too."""
    return math.ceil(seconds * max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0))))
