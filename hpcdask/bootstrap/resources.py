"""Cores and host memory this process may use."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from .ranks import mpi_launcher


def launcher_cores() -> set[int]:
    """Return the cores of this process and of the mpirun that pinned it to one of them."""
    cores = set(os.sched_getaffinity(0))
    if launcher := mpi_launcher():
        with contextlib.suppress(OSError):
            cores |= os.sched_getaffinity(launcher)
    return cores


def widen(cores: Sequence[int] | set[int], pid: int = 0) -> None:
    """Bind a process to these cores, as far as its cgroup allows."""
    with contextlib.suppress(OSError):
        os.sched_setaffinity(pid, cores)


def cpu_quota(root: str = "/") -> int | None:
    """Return the cores whose time a cgroup, such as a container's, allows; None for no limit."""
    found = []
    for folder, unified in _cgroups("cpu", root):
        with contextlib.suppress(OSError, ValueError):
            names = ("cpu.max",) if unified else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            quota, period = _numbers(folder, *names)
            if quota > 0:
                found.append(max(1, quota // period))
    return min(found, default=None)


def _numbers(folder: str, *names: str) -> list[int]:
    """Return the numbers in files; raise ValueError where one says that there is no limit."""
    texts = [Path(folder, name).read_text() for name in names]
    return [int(word) for text in texts for word in text.split()]


def _cgroups(controller: str, root: str) -> Iterator[tuple[str, bool]]:
    """Yield folders of this process's groups, upwards, and whether they are of version 2."""
    try:
        groups = Path(f"{root}proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for _, controllers, path in (line.split(":", 2) for line in groups):
        if controllers and controller not in controllers.split(","):
            continue
        base = f"{root}sys/fs/cgroup/{controller}" if controllers else f"{root}sys/fs/cgroup"
        while True:
            yield f"{base}{path.rstrip('/')}", not controllers
            if path in ("", "/"):
                break
            path = os.path.dirname(path)


def job_memory(environ: Mapping[str, str] | None = None, root: str = "/") -> int:
    """Return the bytes that cgroups, SLURM and the host allow this job here: the least of them."""
    import resource

    import psutil

    environ = os.environ if environ is None else environ
    # SLURM sets this one even where no cgroup confines memory; distributed honours it too
    limits = [int(psutil.virtual_memory().total), resource.getrlimit(resource.RLIMIT_RSS)[1]]
    for folder, unified in _cgroups("memory", root):
        with contextlib.suppress(OSError, ValueError):
            limits += _numbers(folder, "memory.max" if unified else "memory.limit_in_bytes")
    for what, count in (("NODE", ""), ("CPU", "SLURM_CPUS_ON_NODE"), ("GPU", "SLURM_GPUS_ON_NODE")):
        granted = environ.get(f"SLURM_MEM_PER_{what}", "")
        if granted.isdigit():
            limits.append((int(granted) << 20) * int(environ.get(count) or 1))
            break
    return min(limit for limit in limits if limit > 0)
