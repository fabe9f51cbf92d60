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


def title_and_request(environ: Mapping[str, str] | None = None) -> tuple[str, str]:
    """Return the name of the job's system and how to ask it for a GPU; empty without a job."""
    environ = os.environ if environ is None else environ
    if name := system_of_job(environ):
        queue = queue_class(name)
        return queue.title, queue.gpu_example
    if any(map(environ.get, FLUX)):
        return "Flux", "flux run --gpus-per-task=1"
    return "", ""


def granted(environ: Mapping[str, str]) -> str:
    """Return the variable that tells the job's GPUs on this node, as ``NAME=value``, or ""."""
    named = [name for name in GRANTED if environ.get(name)]
    named += [name for name in GRANTED_COUNTS if environ.get(name, "0") not in ("", "0")]
    return f"{named[0]}={environ[named[0]]}" if named else ""


def how_to_request(job: str | None) -> str:
    """Return advice on how to get a GPU, in a queueing system's job or on a workstation."""
    if job is None:
        return "Check nvidia-smi and CUDA_VISIBLE_DEVICES there. "
    _, way = title_and_request()
    if given := granted(os.environ):
        return (
            f"This job ({job.partition('.r')[0]}) has GPUs ({given}): see nvidia-smi there, "
            f"CUDA_VISIBLE_DEVICES, and whether the step has them: {way}. In a container, pass "
            f"them in: apptainer exec --nv, or docker run --gpus all. "
        )
    return f"This job ({job.partition('.r')[0]}) got none: request them, for example {way}. "
