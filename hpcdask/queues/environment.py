"""A job's own variables, per system."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping

#: Variables that queueing systems set inside a job, and how one asks each for a GPU.
QUEUE_JOBS = {
    "SLURM_JOB_ID": "#SBATCH --gpus-per-node=1 (or --gres=gpu:1), and srun --gpus-per-task=1 "
    "--gpu-bind=none",
    "PBS_JOBID": "#PBS -l select=1:ngpus=1",
    "LSB_JOBID": "#BSUB -gpu num=1",
    "OAR_JOB_ID": "oarsub -l gpu=1",
    "SGE_JOB_SPOOL_DIR": "#$ -l gpu=1",
    "_CONDOR_JOB_AD": "request_gpus = 1",
    "COBALT_JOBID": "#COBALT -q <a queue with GPUs>",
    "FLUX_JOB_ID": "flux run --gpus-per-task=1",
}


def job_id(environ: Mapping[str, str] | None = None) -> str | None:
    """Id of the queueing system's job that this process runs in, or None.

    A requeued SLURM job keeps its id, so the id carries the restart count.
    """
    environ = os.environ if environ is None else environ
    for name in QUEUE_JOBS:
        if environ.get(name):
            if name == "SGE_JOB_SPOOL_DIR":  # JOB_ID alone might be anybody's
                return f"{environ.get('JOB_ID')}.{environ.get('SGE_TASK_ID')}"
            restarts = environ.get("SLURM_RESTART_COUNT", "0") if "SLURM" in name else "0"
            return f"{environ[name]}.r{restarts}"
    return None


#: Variables of queueing systems that name a file with the job's nodes.
NODE_FILES = ("PBS_NODEFILE", "OAR_NODEFILE")


def is_job_of_queue(job: str) -> bool:
    """Whether the queueing system's variables speak of this very job, not of one around it."""

    def number(text: str) -> str:
        return re.split(r"\D", text, maxsplit=1)[0]

    names = (*QUEUE_JOBS, "SLURM_ARRAY_JOB_ID", "JOB_ID")
    return number(job) in {number(os.environ.get(name, "")) for name in names} - {""}


def listed_nodes() -> int:
    """Number of nodes that a system other than SLURM gave this job."""
    for name in NODE_FILES:
        with contextlib.suppress(OSError), open(os.environ.get(name, "")) as file:
            return len(set(file.read().split()))
    if os.environ.get("NHOSTS", "").isdigit():
        return int(os.environ["NHOSTS"])
    return len(set(os.environ.get("LSB_MCPU_HOSTS", "").split()[::2]))


def how_to_request(job: str | None) -> str:
    """A sentence that tells how to get a GPU, in a queueing system's job or on a workstation."""
    if job is None:
        return "Check nvidia-smi and CUDA_VISIBLE_DEVICES there. "
    ways = next((way for name, way in QUEUE_JOBS.items() if os.environ.get(name)), "")
    return f"This job ({job.partition('.r')[0]}) got none: request them, for example {ways}. "
