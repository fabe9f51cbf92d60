"""What a whole allocation asks for, in each queueing system's words.

dask-jobqueue's Job classes write the header of one node's job, the doors of `hpcdask.queues` add
GPUs to it; here nodes and ranks take the place of the one worker.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from datetime import timedelta
from typing import Any

import dask.config

from hpcdask.clusters.configuration import import_job_class
from hpcdask.clusters.options import JobOptions, read_job_options
from hpcdask.errors import UsageError
from hpcdask.queues.base import Queue
from hpcdask.queues.gpu_directives import requested_gpus
from hpcdask.queues.helpers import walltime_text
from hpcdask.queues.script import header_lines

from .request import BatchRequest

#: Systems whose word for an account is a project.
PROJECTS = ("lsf", "sge", "oar")
PREFIXES = {"slurm": "#SBATCH", "lsf": "#BSUB", "sge": "#$", "oar": "#OAR", "htcondor": "#CONDOR"}
#: Directives of users that take the place of the resources written here.
RESOURCES = {"pbs": r"(select|nodes)=", "moab": r"(select|nodes)=", "oar": r"^-l\b"}
#: dask-jobqueue's classes want to know it; the lines that it makes are taken out again.
NO_MEMORY = "1GiB"


def prefix(system: str) -> str:
    """How a directive begins."""
    return PREFIXES.get(system, "#PBS")


def read(system: str, queue: Queue, asked: BatchRequest, *, torque: bool) -> JobOptions:
    """Return the job with dask-jobqueue's header, made one of a whole allocation.

    `torque` is whether the commands of PBS are Torque's. Raises UsageError if the system, a name in
    `hpcdask.queues.registry`, cannot express it.
    """
    from hpcdask.clusters import classes

    jobqueue = next(
        cluster.jobqueue
        for cluster in vars(classes).values()
        if getattr(cluster, "queue_name", None) == system
    )
    _refuse(system, asked)
    own = [_bare(line, prefix(system)) for line in asked.directives]
    directives = [*_configured_directives(system, queue), *own]
    own_gpus = any(requested_gpus(queue, line) is not None for line in own)
    options = read_job_options(
        import_job_class(jobqueue),
        queue,
        system,
        gpus_per_job=None if own_gpus else asked.gpus_per_node,
        gpu_type=None,
        nodes_per_job=1,
        protocol=None,
        given={**_keywords(system, queue, asked, directives, torque=torque), "device": "auto"},
    )
    if system == "htcondor":
        _edit_description(options.job, asked)
    else:
        lines = header_lines(options.job)
        count = len(options.job.job_extra_directives)
        ours, users = lines[: len(lines) - count], lines[len(lines) - count :]
        options.job.job_header = "\n".join([*_edited(system, ours, asked, own), *users])
    return options


def _refuse(system: str, asked: BatchRequest) -> None:
    """What a system does not have."""
    directives = " ".join(asked.directives)
    if system == "htcondor":
        if asked.nodes > 1:
            raise UsageError(
                f"-N {asked.nodes}: HTCondor's jobs are of one node. Leave -N out, or ask for one "
                f"GPU per job with hpcdask.HTCondorCUDACluster"
            )
        if asked.queue:
            raise UsageError("--queue: HTCondor has none. Leave it out")
    if system == "sge" and not re.search(r"(^|\s)-pe\s", directives):
        how = "name the site's: --directive '-pe NAME SLOTS' (qconf -spl lists them)"
        if asked.nodes > 1:
            raise UsageError(
                f"-N {asked.nodes}: Grid Engine gives several nodes through a parallel "
                f"environment: {how}"
            )
        if asked.cpus_per_gpu:
            raise UsageError(
                f"--cpus-per-gpu: Grid Engine gives cores through a parallel environment: {how}"
            )
    if system == "sge" and asked.memory is not None:
        raise UsageError(
            "--mem: in Grid Engine each site has its own name for memory. Give it as "
            "--directive '-l h_vmem=8G' (qconf -sc lists the names)"
        )
    if system == "oar" and asked.cpus_per_gpu and asked.gpus_per_node:
        raise UsageError("--cpus-per-gpu: OAR's GPUs bring their cores. Leave it out")
    memory_property = "jobqueue.oar.memory-per-core-property-name"
    if system == "oar" and asked.memory and not dask.config.get(memory_property, None):
        raise UsageError(
            f"--mem: in OAR memory is a property of the site. Set {memory_property} in Dask's "
            f"configuration (oarnodes lists the properties), or leave --mem out"
        )
    if asked.memory == 0 and system != "slurm":
        raise UsageError("--mem 0, all of the node's memory, is SLURM's. Leave it out")


def _bare(line: str, start: str) -> str:
    """A directive that may have been pasted with its prefix."""
    return line.strip().removeprefix(start).strip()


def _configured_directives(system: str, queue: Queue) -> list[str]:
    """Those of dask-jobqueue's configuration; its GPUs are those of a worker's job."""
    found = dask.config.get(f"jobqueue.{system}.job-extra-directives", None) or []
    if isinstance(found, dict):
        found = [f"{key} = {value}" for key, value in found.items()]
    return [str(line) for line in found if requested_gpus(queue, str(line)) is None]


def _keywords(
    system: str, queue: Queue, asked: BatchRequest, directives: list[str], *, torque: bool
) -> dict[str, Any]:
    """Keywords of dask-jobqueue's Job class."""
    keywords: dict[str, Any] = {
        "cores": asked.cores,
        "memory": asked.memory or NO_MEMORY,
        "job_name": asked.name,
        "walltime": asked.walltime,
        "job_extra_directives": directives,
    }
    if asked.prologue:
        keywords["job_script_prologue"] = [*_configured_prologue(system), *asked.prologue]
    if asked.queue:
        keywords["queue"] = asked.queue
    if system == "htcondor":
        keywords |= _condor_keywords(queue, asked, directives)
    else:
        if asked.account:
            keywords["project" if system in PROJECTS else "account"] = asked.account
        keywords |= _resource_keywords(system, asked, torque=torque)
    if not keywords["walltime"]:
        del keywords["walltime"]
        configured = dask.config.get(f"jobqueue.{system}.walltime", None)
        if configured is not None:
            walltime_text(configured)
    return keywords


def _resource_keywords(system: str, asked: BatchRequest, *, torque: bool) -> dict[str, Any]:
    """Nodes, cores and memory, where a keyword of the system's own asks for them."""
    if system == "slurm":
        megabytes = math.ceil((asked.memory or 0) / 2**20)
        return {
            "job_cpu": asked.cpus_per_gpu or 1,
            "job_mem": f"{megabytes}M" if megabytes else "0",
        }
    if system == "pbs" and not torque:
        return {"resource_spec": _select(asked)}
    if system in ("pbs", "moab"):
        return {"resource_spec": _torque_nodes(asked)}
    if system == "lsf":
        return {"ncpus": asked.nodes * asked.cores, "walltime": _without_seconds(asked.walltime)}
    if system == "oar":
        cores = "" if asked.gpus_per_node else f"/core={asked.cores}"
        unused = {"memory_per_core_property_name": "not_applicable"}
        return {
            "resource_spec": f"/nodes={asked.nodes}{cores}",
            **(unused if asked.memory is None else {}),
        }
    return {}


def _condor_keywords(queue: Queue, asked: BatchRequest, directives: list[str]) -> dict[str, Any]:
    """HTCondor's, whose account and walltime are directives."""
    extra = _description(directives)
    if asked.account:
        extra.setdefault("accounting_group", asked.account)
    if asked.walltime:
        seconds = queue.parse_walltime(asked.walltime) / timedelta(seconds=1)
        extra.setdefault("allowed_job_duration", f"{seconds:.0f}")
    disk = dask.config.get("jobqueue.htcondor.disk", None) or "1GB"
    return {"disk": disk, "job_extra_directives": extra, "walltime": None}


def _without_seconds(walltime: str | None) -> str | None:
    """LSF's form, hours and minutes; a minute that has begun counts."""
    found = re.fullmatch(r"(\d+):(\d\d):(\d\d)", (walltime or "").strip())
    if found is None:
        return walltime
    minutes = 60 * int(found[1]) + int(found[2]) + bool(int(found[3]))
    return f"{minutes // 60}:{minutes % 60:02}"


def _configured_prologue(system: str) -> list[str]:
    return list(dask.config.get(f"jobqueue.{system}.job-script-prologue", None) or [])


def _select(asked: BatchRequest) -> str:
    """PBS Professional's form; mpiprocs is how often an MPI finds a node in its list."""
    memory = f":mem={_megabytes(asked.memory)}" if asked.memory else ""
    return f"select={asked.nodes}:ncpus={asked.cores}:mpiprocs={asked.ranks}{memory}"


def _torque_nodes(asked: BatchRequest) -> str:
    """Torque's form, where memory is that of all nodes together."""
    memory = f",mem={_megabytes(asked.nodes * asked.memory)}" if asked.memory else ""
    return f"nodes={asked.nodes}:ppn={asked.cores}{memory}"


def _megabytes(nbytes: int) -> str:
    return f"{math.ceil(nbytes / 2**20)}MB"


def _description(directives: Collection[str]) -> dict[str, str]:
    """HTCondor's directives, which are pairs."""
    pairs = {}
    for line in directives:
        key, equals, value = line.partition("=")
        if not equals or not key.strip():
            raise UsageError(f"--directive {line!r} is not NAME = VALUE, as HTCondor's are")
        pairs[key.strip()] = value.strip()
    return pairs


def _edited(
    system: str, lines: Collection[str], asked: BatchRequest, directives: Collection[str]
) -> list[str]:
    """dask-jobqueue's lines, with nodes and ranks, and without what the user leaves to the site."""
    start = prefix(system)
    out = []
    replaced = RESOURCES.get(system)
    theirs = replaced and any(re.search(replaced, line) for line in directives)
    for line in lines:
        words = line.removeprefix(f"{start} ")
        if system == "slurm":
            unwanted = words == "-n 1"
            unwanted |= words.startswith("--cpus-per-task=") and not asked.cpus_per_gpu
            unwanted |= words.startswith("--mem=") and asked.memory is None
        elif system == "lsf":
            unwanted = words.startswith("-M ") and not asked.memory
            unwanted |= words.startswith("-R ")
        else:
            unwanted = bool(theirs) and words.startswith("-l ") and "walltime=" not in words[:12]
        if not unwanted:
            out.append(line)
    if system == "slurm":
        out += [f"{start} --nodes={asked.nodes}", f"{start} --ntasks-per-node={asked.ranks}"]
        out.append(f"{start} --open-mode=append")  # a requeued job goes on in the same log
    elif system == "lsf" and asked.nodes > 1:
        out.append(f'{start} -R "span[ptile={asked.cores}]"')
    elif system == "lsf" and asked.cores > 1:
        out.append(f'{start} -R "span[hosts=1]"')
    return out


def _edit_description(job: Any, asked: BatchRequest) -> None:
    """HTCondor's form of the same."""
    description = job.job_header_dict
    if not asked.memory:
        for name in ("RequestMemory", "MY.DaskWorkerMemory"):
            description.pop(name, None)
    if not dask.config.get("jobqueue.htcondor.disk", None):
        for name in ("RequestDisk", "MY.DaskWorkerDisk"):
            description.pop(name, None)
