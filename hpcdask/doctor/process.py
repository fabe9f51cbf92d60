"""Limits of one process: cores, memory, open files, and the variables it was started with.

Each rank gathers this for itself, because a launcher may treat each in another way.
"""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dask.utils import format_bytes

from hpcdask.bootstrap import resources
from hpcdask.logs import plural, spans
from hpcdask.spec.records import Record

from .findings import GIB, Finding, Reporter

if TYPE_CHECKING:
    from .nodes import Node

say = Reporter("process")
#: Variables, and parts of Dask's configuration, that change how fast workers exchange and compute.
VARIABLES = re.compile(
    r"UCX_|DASK_(DISTRIBUTED__COMM|UCX|RMM|TEMPORARY)|CUDA_|CUPY_|NVIDIA_VISIBLE|RAPIDS_LIBUCX"
)
CONFIGURED = (
    "distributed-ucxx.nvlink",
    "distributed-ucxx.infiniband",
    "distributed-ucxx.cuda-copy",
    "distributed.comm.compression",
)
#: Open files of a process that talks to nobody, and more for each worker: two connections to each
#: (data and control), as many from it, and spilled chunks.
FILES, FILES_PER_WORKER = 256, 8
LEAST_PROCESSES, LEAST_MEMLOCK, LEAST_WORKER_MEMORY = 2048, GIB, 8 * GIB


@dataclass(frozen=True)
class ProcessFacts(Record):
    """Cores, bytes, soft and hard limits of a rank, and its settings."""

    pinned: tuple[int, ...]
    cores: tuple[int, ...]
    memory: int
    host_memory: int
    nofile: tuple[int, int]
    memlock: tuple[int, int]
    nproc: tuple[int, int]
    quota: int | None = None
    env: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> ProcessFacts:
        """Look at this process."""
        import dask.config
        import psutil

        environ = os.environ if environ is None else environ
        config = {name: dask.config.get(name, None) for name in CONFIGURED}
        return cls(
            pinned=tuple(sorted(os.sched_getaffinity(0))),
            cores=tuple(sorted(resources.launcher_cores())),
            memory=resources.job_memory(),
            host_memory=int(psutil.virtual_memory().total),
            nofile=resource.getrlimit(resource.RLIMIT_NOFILE),
            memlock=resource.getrlimit(resource.RLIMIT_MEMLOCK),
            nproc=resource.getrlimit(resource.RLIMIT_NPROC),
            quota=resources.cpu_quota(),
            env={name: value for name, value in environ.items() if VARIABLES.match(name)},
            config={name: value for name, value in config.items() if value is not None},
        )


def check(known: ProcessFacts, node: Node) -> Iterator[Finding]:
    """Yield findings on the limits of one of a node's ranks."""
    yield _cores(known, node)
    yield _memory(known, node)
    yield _files(known, node.all_workers)
    if node.facts.fabric and node.facts.fabric.infiniband:
        yield _memlock(known)
    if 0 <= (soft := known.nproc[0]) < LEAST_PROCESSES:
        yield say.warning(
            "processes",
            f"at most {soft}, threads included",
            f"A worker has dozens of threads: put ulimit -u {LEAST_PROCESSES} or more into the job "
            f"script",
        )


def _cores(known: ProcessFacts, node: Node) -> Finding:
    owned, hint = node.cores, ""
    value = f"{len(owned)} ({spans(owned)})"
    if len(known.pinned) < len(known.cores):
        value += f", this process pinned to {spans(known.pinned)} by its launcher"
        hint = "hpcdask.run lifts this pinning"
    if known.quota and known.quota < len(owned):
        value += f", of which a cgroup allows the time of {known.quota}"
    if not node.gpus or len(owned) >= 2 * node.workers:
        return say.ok("cores", value, hint)
    return say.warning(
        "cores",
        f"{value} for {plural(node.workers, 'worker')}",
        "A worker computes and communicates in threads, and the scheduler needs a core: request at "
        "least 2 for each GPU (srun --cpus-per-task=4)",
    )


def _memory(known: ProcessFacts, node: Node) -> Finding:
    value, each = format_bytes(known.memory), known.memory // node.workers
    if known.memory < known.host_memory:
        value += f" of the host's {format_bytes(known.host_memory)}"
    if not node.gpus or each >= LEAST_WORKER_MEMORY:
        return say.ok("host memory", value)
    return say.warning(
        "host memory",
        f"{value}, {format_bytes(each)} for each worker",
        "Workers load libraries of several GB and spill to host memory: request more, for example "
        "--mem-per-gpu=64G",
    )


def _files(known: ProcessFacts, workers: int) -> Finding:
    (soft, hard), needed = known.nofile, FILES + FILES_PER_WORKER * workers
    value = f"{_limit(soft)} (at most {_limit(hard)})"
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return say.ok("open files", value)
    remedy = f"put ulimit -n {needed} into the job script"
    if 0 <= hard < needed:
        remedy = "ask the site's staff for a higher hard limit"
    return say.error("open files", value, f"{workers} workers need about {needed}: {remedy}")


def _memlock(known: ProcessFacts) -> Finding:
    soft, hard = known.memlock
    if soft == resource.RLIM_INFINITY:
        return say.ok("locked memory", "unlimited")
    remedy = "the site's staff must raise it (in slurmd's unit: LimitMEMLOCK=infinity)"
    if hard == resource.RLIM_INFINITY:
        remedy = "put ulimit -l unlimited into the job script"
    make = say.error if soft < LEAST_MEMLOCK else say.warning
    advice = f"InfiniBand registers the memory that it sends: {remedy}"
    return make("locked memory", format_bytes(soft), advice)


def _limit(number: int) -> str:
    return "unlimited" if number == resource.RLIM_INFINITY else str(number)
