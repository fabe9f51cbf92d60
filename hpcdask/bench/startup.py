"""Phases of the time from launch to workers, as the workers of this cluster remember them."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

from hpcdask.bench.cluster import Cluster
from hpcdask.bench.records import describe
from hpcdask.process import STARTED, marks, process_start
from hpcdask.workloads import Check, WorkloadError

#: Processes whose start is that of the launch, or of the job's script.
LAUNCHERS = {
    *("mpirun", "prterun", "orterun", "prted", "orted", "mpiexec", "mpiexec.hydra"),
    *("hydra_pmi_proxy", "srun", "slurmstepd", "palsd"),
}
LAUNCHER_DONE = "launcher done"
#: Seconds that this process took before it became the runner: the bench's own imports.
AHEAD = "HPCDASK_BENCH_AHEAD"
#: What ends with each event; those before the first fork are paid once per rank.
PHASES = {
    LAUNCHER_DONE: "launcher",
    "distributed imported": "interpreter, imports",
    "worker forked": "ranks meet, scheduler, nanny",
    "CUDA context made": "CUDA context",
    "packages imported": "imports of CUDA packages",
    "device memory set up": "memory pool",
    "registered": "registration",
    "transport started": "UCX, packages to send with",
    "warm": "first transfers",
}

Marks = Sequence[tuple[float, str]]


def run_startup(cluster: Cluster) -> dict[str, Any]:
    """Measure the start of a cluster, after the fact, of workers that hpcdask started.

    ``seconds`` is from the start of the launcher's process, or else of the rank, to the
    registration of the slowest worker; ``phases`` are medians over the workers.
    """
    found = cluster.client.run(_marks)
    if strange := [worker for worker, marks in found.items() if not _has_started(marks)]:
        raise WorkloadError(
            f"{len(strange)} workers do not know when they were launched, {strange[0]} among them: "
            f"start-up is measured of workers that hpcdask started"
        )
    parts = {worker: phases(marks) for worker, marks in found.items()}
    names = [name for name in PHASES.values() if any(name in part for part in parts.values())]
    values = {name: [part[name] for part in parts.values() if name in part] for name in names}
    ready = [_when(marks, "registered") for marks in found.values()]
    check = Check("workers that registered", len(ready), sum(cluster.devices.values()), 0)
    return {
        "workload": "startup",
        "form": "hpcdask",
        "seconds": [max(ready)],
        "seconds_median": max(ready),
        "seconds_min": min(ready),
        "seconds_max": max(ready),
        "phases": [
            {
                "name": name,
                "seconds": statistics.median(seconds),
                "spread": [min(seconds), max(seconds)],
            }
            for name, seconds in values.items()
        ],
        "result": {"warm": max(_when(marks, "warm") for marks in found.values())},
        "checks": [check.as_dict()],
        **describe(cluster),
    }


def phases(marks: Marks) -> dict[str, float]:
    """Seconds of each phase of one worker, in their order; of the later life, if it had several."""
    times = {event: seconds for seconds, event in marks if event in PHASES}
    before, found = 0.0, {}
    for event in sorted(times, key=times.__getitem__):
        found[PHASES[event]], before = times[event] - before, times[event]
    return found


def _marks() -> Marks:
    """Return this worker's marks, in seconds since its launcher started; runs on workers."""
    import psutil

    started = float(os.environ.get(STARTED, "nan"))
    above = psutil.Process().parents()
    launched = min((_began(p.pid) for p in above if p.name() in LAUNCHERS), default=started)
    before = max(0.0, started - launched - float(os.environ.get(AHEAD, "0")))
    first = [(before, LAUNCHER_DONE)] if before else []
    return [*first, *((before + seconds, event) for seconds, event in marks)]


def age() -> float:
    """Seconds since this process began."""
    return time.time() - _began(os.getpid())


def _began(pid: int) -> float:
    """When a process began, as `time.time` counts; infinity if it is gone.

    psutil's `create_time` counts from a boot that Linux tells in whole seconds only.
    """
    if not (ticks := process_start(pid)):
        return math.inf
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK")
    return time.time() - age


def _has_started(marks: Marks) -> bool:
    return {"worker forked", "registered", "warm"} <= {event for _, event in marks}


def _when(marks: Marks, event: str) -> float:
    return {name: seconds for seconds, name in marks}[event]
