"""Phases of the time from launch to workers, as the workers of this cluster remember them."""

from __future__ import annotations

import math
import os
import statistics
import time

import psutil

from hpcdask.bench.cluster import Cluster
from hpcdask.bench.measurement import Measurement
from hpcdask.process import STARTED, marks, process_start
from hpcdask.workloads import WorkloadError

#: Processes whose start is that of the launch, or of the job's script.
LAUNCHERS = {
    *("mpirun", "prterun", "orterun", "prted", "orted", "mpiexec", "mpiexec.hydra"),
    *("hydra_pmi_proxy", "srun", "slurmstepd", "palsd"),
}
LAUNCHER_DONE = "launcher done"
#: Seconds that this process took before it became the runner: the bench's own imports.
AHEAD = "HPCDASK_BENCH_AHEAD"
#: Phases, by the event that ends each; those before the first fork are paid once per rank.
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
#: Events without which a worker was not started by hpcdask.
NEEDED = {"worker forked", "registered", "warm"}


def run_startup(cluster: Cluster) -> Measurement:
    """Measure the start of a cluster, after the fact, of workers that hpcdask started.

    The seconds are from the start of the launcher's process, or else of the rank, to the
    registration of the slowest worker; the phases are medians over the workers.
    """
    found = cluster.client.run(_marks)
    if strange := [worker for worker, times in found.items() if not times.keys() >= NEEDED]:
        raise WorkloadError(
            f"{len(strange)} workers do not know when they were launched, {strange[0]} among them: "
            f"start-up is measured of workers that hpcdask started"
        )
    parts: dict[str, list[float]] = {phase: [] for phase in PHASES.values()}
    for times in found.values():
        before = 0.0
        for event in sorted(times.keys() & PHASES.keys(), key=times.__getitem__):
            parts[PHASES[event]].append(times[event] - before)
            before = times[event]
    ready = [times["registered"] for times in found.values()]
    return Measurement(
        workload="startup",
        seconds=(max(ready),),
        phases={phase: statistics.median(each) for phase, each in parts.items() if each},
        **cluster.facts,
    )


def _marks() -> dict[str, float]:
    """Return the last of this worker's events, in seconds since its launcher started."""
    started = float(os.environ.get(STARTED, "nan"))
    above = psutil.Process().parents()
    launched = min((_began(p.pid) for p in above if p.name() in LAUNCHERS), default=started)
    before = max(0.0, started - launched - float(os.environ.get(AHEAD, "0")))
    first = {LAUNCHER_DONE: before} if before else {}
    return first | {event: before + seconds for seconds, event in marks}


def age() -> float:
    """Return the seconds since this process began."""
    return time.time() - _began(os.getpid())


def _began(pid: int) -> float:
    """Return when a process began, as `time.time` counts; infinity if it is gone.

    psutil's `create_time` counts from a boot that Linux tells in whole seconds only.
    """
    if not (ticks := process_start(pid)):
        return math.inf
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK")
    return time.time() - age
