"""Queueing systems by name: those of hpcdask, and those of installed packages.

The first moments of a rank ask for the job's id, and `import hpcdask` for the names of its classes.
What both need stands here, since `hpcdask.queues.base` loads asyncio: nothing else is imported.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from hpcdask.errors import UsageError

if TYPE_CHECKING:
    from .base import Queue


class System(NamedTuple):
    """Names of a system's classes, and the variables by which a job knows its id.

    `queue` is ``module:Class``, imported when it is used; `cluster` is the name under which
    `hpcdask` offers the cluster class. Only the system's jobs have the variable `job`; its value is
    the id if no `parts` name those of the id. `restarts` counts how often a job was started again
    under its id.
    """

    queue: str
    cluster: str
    job: str = ""
    restarts: str = ""
    parts: tuple[str, ...] = ()


#: In the order in which commands are looked for: SLURM, Grid Engine and Moab may have a qsub too.
SYSTEMS = {
    "slurm": System(".slurm:SlurmQueue", "SLURMCUDACluster", "SLURM_JOB_ID", "SLURM_RESTART_COUNT"),
    "lsf": System(".lsf:LsfQueue", "LSFCUDACluster", "LSB_JOBID"),
    "sge": System(  # JOB_ID alone might be anybody's
        ".sge:SgeQueue", "SGECUDACluster", "SGE_JOB_SPOOL_DIR", parts=("JOB_ID", "SGE_TASK_ID")
    ),
    "moab": System(".moab:MoabQueue", "MoabCUDACluster"),  # its jobs are PBS's too
    "pbs": System(".pbs:PbsQueue", "PBSCUDACluster", "PBS_JOBID"),
    "oar": System(".oar:OarQueue", "OARCUDACluster", "OAR_JOB_ID"),
    "htcondor": System(".htcondor:HtcondorQueue", "HTCondorCUDACluster", "_CONDOR_JOB_AD"),
    "local": System(".local:LocalQueue", "LocalCUDAJobCluster"),
}


#: Variables of a job of Flux, which starts ranks though it has no class of queue.
FLUX = ("FLUX_ENCLOSING_ID", "FLUX_JOB_ID")
#: Those that are set where the job, or its step, has GPUs on this node: their numbers, or how many.
GRANTED = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "SGE_HGR_gpu", "_CONDOR_AssignedGPUs")
GRANTED_COUNTS = ("SLURM_GPUS_ON_NODE", "PBS_NGPUS")


@functools.cache
def systems() -> dict[str, System]:
    """Return hpcdask's own systems, then those that entry points of packages name, in 0.05 s."""
    from importlib.metadata import entry_points

    found = entry_points(group="hpcdask.queues")
    return SYSTEMS | {entry.name: entry.load() for entry in found}


def queue_class(name: str) -> type[Queue]:
    """Return the class of a queueing system; its module is imported now.

    Raises UsageError if there is none of this name.
    """
    if (system := SYSTEMS.get(name) or systems().get(name)) is None:
        raise UsageError(f"there is no queue {name!r}. There are: {', '.join(systems())}")
    module, _, queue = system.queue.partition(":")
    found: type[Queue] = getattr(importlib.import_module(module, __package__), queue)
    return found


def batch_systems() -> list[str]:
    """Return the systems for which `hpcdask submit` writes a batch job."""
    return [name for name in systems() if queue_class(name).launchers]


# The job that this process runs in


def system_of_job(
    environ: Mapping[str, str] | None = None, *, installed: bool = True
) -> str | None:
    """Return the system whose job this process runs in, also one that a package has `installed`."""
    environ = os.environ if environ is None else environ

    def find(known: Mapping[str, System]) -> str | None:
        return next((name for name, system in known.items() if environ.get(system.job)), None)

    return find(SYSTEMS) or (find(systems()) if installed else None)


def job_id(environ: Mapping[str, str] | None = None, *, installed: bool = True) -> str | None:
    """Return the id of the queueing system's job that this process runs in, or None.

    A requeued SLURM job keeps its id, so the id carries the restart count. See `system_of_job`.
    """
    environ = os.environ if environ is None else environ
    name = system_of_job(environ, installed=installed)
    if name:
        system = SYSTEMS.get(name) or systems()[name]
        if system.parts:
            return ".".join(environ.get(name, "") for name in system.parts)
        return f"{environ[system.job]}.r{environ.get(system.restarts, '0')}"
    return next((f"{environ[name]}.r0" for name in FLUX if environ.get(name)), None)


def title_and_request() -> tuple[str, str]:
    """Return the name of the job's system and how to ask it for a GPU; empty without a job."""
    if name := system_of_job():
        queue = queue_class(name)
        return queue.title, queue.gpu_example
    if any(map(os.environ.get, FLUX)):
        return "Flux", "flux run --gpus-per-task=1"
    return "", ""


def how_to_request(job: str | None) -> str:
    """Return advice on how to get a GPU, in a queueing system's job or on a workstation."""
    if job is None:
        return "Check nvidia-smi and CUDA_VISIBLE_DEVICES there. "
    (_, way), number = title_and_request(), job.partition(".r")[0]
    given = [name for name in GRANTED if os.environ.get(name)]
    given += [name for name in GRANTED_COUNTS if os.environ.get(name, "0") not in ("", "0")]
    if given:
        return (
            f"This job ({number}) has GPUs ({given[0]}={os.environ[given[0]]}): see nvidia-smi "
            f"there, CUDA_VISIBLE_DEVICES, and whether the step has them: {way}. In a container, "
            f"pass them in: apptainer exec --nv, or docker run --gpus all. "
        )
    return f"This job ({number}) got none: request them, for example {way}. "
