"""Which queueing systems there are: a line here, and a module that defines one class of queue.

The first moments of a rank ask for the job's id, and `import hpcdask` for the names of its classes.
What both need stands here, since `hpcdask.queues.base` loads asyncio: nothing else is imported.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from hpcdask.errors import UsageError

if TYPE_CHECKING:
    from .base import Queue


class System(NamedTuple):
    """The name of a system's cluster class, and the variables by which a job knows its id.

    Only the system's jobs have the variable `job`; its value is the id if there is no `task`.
    `restarts` counts how often a job was started again under its id. The elements of an array share
    a `number`, and `task` tells them apart.
    """

    cluster: str
    job: str = ""
    restarts: str = ""
    number: str = ""
    task: str = ""


#: In the order in which commands are looked for: SLURM, Grid Engine and Moab may have a qsub too.
SYSTEMS = {
    "slurm": System(
        "SLURMCUDACluster", "SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_ARRAY_JOB_ID"
    ),
    # An instance of Flux within the job says so; flux run alone has FLUX_JOB_ID
    "flux": System("FluxCUDACluster", "FLUX_ENCLOSING_ID"),
    "lsf": System("LSFCUDACluster", "LSB_JOBID"),
    # JOB_ID alone might be anybody's
    "sge": System("SGECUDACluster", "SGE_JOB_SPOOL_DIR", number="JOB_ID", task="SGE_TASK_ID"),
    "moab": System("MoabCUDACluster"),  # its jobs are PBS's too
    "pbs": System("PBSCUDACluster", "PBS_JOBID"),
    "oar": System("OARCUDACluster", "OAR_JOB_ID"),
    "htcondor": System("HTCondorCUDACluster", "_CONDOR_JOB_AD"),
    "local": System("LocalCUDAJobCluster"),
}


def queue_class(name: str) -> type[Queue]:
    """The class of a queueing system; its module is imported now.

    Raises UsageError if there is none of this name.
    """
    from .base import Queue

    if name not in SYSTEMS:
        raise UsageError(f"there is no queue {name!r}. There are: {', '.join(SYSTEMS)}")
    module = importlib.import_module(f"hpcdask.queues.{name}")
    (found,) = (
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, Queue)
        and value.__module__ == module.__name__
    )
    return found


def batch_systems() -> list[str]:
    """Those that take batch jobs: all but this machine."""
    return [name for name in SYSTEMS if not queue_class(name).is_local]


def requested_gpus(directive: str, nodes: int = 1) -> int | None:
    """As `Queue.requested_gpus`, in the words of any system."""
    queues = map(queue_class, batch_systems())
    counts = (queue.requested_gpus(directive, nodes) for queue in queues)
    return next((count for count in counts if count is not None), None)


def system_of_job(environ: Mapping[str, str] | None = None) -> str | None:
    """The system whose job this process runs in, by the job's variables."""
    environ = os.environ if environ is None else environ
    return next((name for name, system in SYSTEMS.items() if environ.get(system.job)), None)
