"""Variables of a queueing system's job."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from .registry import find_system, queue_class, system_of_job

#: Variables of a job of Flux, which starts ranks though it has no class of queue.
FLUX = ("FLUX_ENCLOSING_ID", "FLUX_JOB_ID")
#: Those that are set where the job, or its step, has GPUs on this node: their numbers, or how many.
GRANTED = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "SGE_HGR_gpu", "_CONDOR_AssignedGPUs")
GRANTED_COUNTS = ("SLURM_GPUS_ON_NODE", "PBS_NGPUS")


def job_id(environ: Mapping[str, str] | None = None, *, installed: bool = True) -> str | None:
    """Return the id of the queueing system's job that this process runs in, or None.

    A requeued SLURM job keeps its id, so the id carries the restart count. See `system_of_job`.
    """
    environ = os.environ if environ is None else environ
    name = system_of_job(environ, installed=installed)
    if name and (system := find_system(name)):
        if system.task:
            return f"{environ.get(system.number)}.{environ.get(system.task)}"
        return f"{environ[system.job]}.r{environ.get(system.restarts, '0')}"
    return next((f"{environ[name]}.r0" for name in FLUX if environ.get(name)), None)


def is_job_of_queue(job: str) -> bool:
    """Return whether the queueing system's variables are this job's, not an outer job's."""
    numbers = [re.split(r"\D", text, maxsplit=1)[0] for text in (job, job_id() or "none")]
    return numbers[0] == numbers[1]


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
