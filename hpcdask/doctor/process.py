"""Limits of one process: cores, memory, open files, and the variables it was started with.

Each rank gathers this for itself, because a launcher may treat each in another way.
"""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator, Mapping

from hpcdask.bootstrap import resources
from hpcdask.logs import plural, spans

from .findings import GIB, Facts, Finding, Reporter, amount, known_gpus

say = Reporter("process")
LIMITS = {
    "nofile": resource.RLIMIT_NOFILE,
    "memlock": resource.RLIMIT_MEMLOCK,
    "nproc": resource.RLIMIT_NPROC,
}
#: Variables that change how fast Dask's workers exchange data and compute.
VARIABLES = re.compile(
    r"UCX_|DASK_(DISTRIBUTED__COMM|UCX|RMM|TEMPORARY)|CUDA_|CUPY_|NVIDIA_VISIBLE|RAPIDS_LIBUCX"
)
#: Open files of a process that talks to nobody, and more for each worker: two connections to each
#: (data and control), as many from it, and spilled chunks.
FILES, FILES_PER_WORKER = 256, 8
#: Parts of Dask's configuration that do so.
CONFIGURED = (
    "distributed-ucxx.nvlink",
    "distributed-ucxx.infiniband",
    "distributed-ucxx.cuda-copy",
    "distributed.comm.compression",
)
LEAST_PROCESSES = 2048
LEAST_MEMLOCK = GIB
LEAST_WORKER_MEMORY = 8 * GIB


def read(environ: Mapping[str, str] | None = None) -> Facts:
    """Return the limits of this process."""
    import dask.config
    import psutil

    environ = os.environ if environ is None else environ
    limits = {name: list(resource.getrlimit(which)) for name, which in LIMITS.items()}
    return {
        "pinned": sorted(os.sched_getaffinity(0)),
        "cores": sorted(resources.launcher_cores()),
        "quota": resources.cpu_quota(),
        "memory": resources.job_memory(),
        "host_memory": int(psutil.virtual_memory().total),
        "env": {name: value for name, value in environ.items() if VARIABLES.match(name)},
        "config": {
            name: value for name in CONFIGURED if (value := dask.config.get(name, None)) is not None
        },
        **limits,
    }


def check(process: Facts, facts: Facts, workers: int) -> Iterator[Finding]:
    """Yield findings on one rank's limits; `facts` are its node's, `workers` all of the cluster."""
    gpus = bool(known_gpus(facts))
    yield _cores(process, facts, gpus)
    yield _memory(process, local_workers(facts), gpus)
    yield _files(process, workers)
    if facts.get("fabric", {}).get("infiniband"):
        yield _memlock(process)
    if 0 <= (soft := process["nproc"][0]) < LEAST_PROCESSES:
        yield say.warning(
            "processes",
            f"at most {soft}, threads included",
            f"A worker has dozens of threads: put ulimit -u {LEAST_PROCESSES} or more into the job "
            f"script",
        )


def local_workers(facts: Facts) -> int:
    """Return the number of this node's workers: one per rank, or per GPU if started by hand."""
    ranks = len(facts["process"])
    return ranks if ranks > 1 else max(1, len(known_gpus(facts)))


def _cores(process: Facts, facts: Facts, gpus: bool) -> Finding:
    owned = {core for one in facts["process"] for core in one["cores"]}
    pinned, workers, hint = process["pinned"], local_workers(facts), ""
    value = f"{len(owned)} ({spans(owned)})"
    if len(pinned) < len(process["cores"]):
        value += f", this process pinned to {spans(pinned)} by its launcher"
        hint = "hpcdask.run lifts this pinning"
    if (quota := process.get("quota")) and quota < len(owned):
        value += f", of which a cgroup allows the time of {quota}"
    if not gpus or len(owned) >= 2 * workers:
        return say.ok("cores", value, hint)
    return say.warning(
        "cores",
        f"{value} for {plural(workers, 'worker')}",
        "A worker computes and communicates in threads, and the scheduler needs a core: request at "
        "least 2 for each GPU (srun --cpus-per-task=4)",
    )


def _memory(process: Facts, workers: int, gpus: bool) -> Finding:
    memory, host = process["memory"], process["host_memory"]
    value = f"{amount(memory)} of the host's {amount(host)}" if memory < host else amount(memory)
    if not gpus or memory / workers >= LEAST_WORKER_MEMORY:
        return say.ok("host memory", value)
    return say.warning(
        "host memory",
        f"{value}, {amount(memory / workers)} for each worker",
        "Workers load libraries of several GB and spill to host memory: request more, for example "
        "--mem-per-gpu=64G",
    )


def _files(process: Facts, workers: int) -> Finding:
    soft, hard = process["nofile"]
    needed = FILES + FILES_PER_WORKER * workers
    value = f"{_limit(soft)} (at most {_limit(hard)})"
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return say.ok("open files", value)
    remedy = f"put ulimit -n {needed} into the job script"
    if 0 <= hard < needed:
        remedy = "ask the site's staff for a higher hard limit"
    return say.error("open files", value, f"{workers} workers need about {needed}: {remedy}")


def _memlock(process: Facts) -> Finding:
    soft, hard = process["memlock"]
    if soft == resource.RLIM_INFINITY:
        return say.ok("locked memory", "unlimited")
    remedy = "the site's staff must raise it (in slurmd's unit: LimitMEMLOCK=infinity)"
    if hard == resource.RLIM_INFINITY:
        remedy = "put ulimit -l unlimited into the job script"
    make = say.error if soft < LEAST_MEMLOCK else say.warning
    advice = f"InfiniBand registers the memory that it sends: {remedy}"
    return make("locked memory", amount(soft), advice)


def _limit(number: int) -> str:
    return "unlimited" if number == resource.RLIM_INFINITY else str(number)
