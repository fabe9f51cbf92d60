"""The public cluster classes, one for each queueing system."""

from __future__ import annotations

from typing import Any, Unpack

from hpcdask.queues.registry import queue_class, systems

from .cluster import JobCluster
from .keywords import (
    HTCondorKeywords,
    LSFKeywords,
    OARKeywords,
    PBSKeywords,
    SGEKeywords,
    SLURMKeywords,
    make_keywords,
)
from .options import import_job_class


class SLURMCUDACluster(JobCluster):
    """Dask workers on GPUs that SLURM grants, one job per GPU, following the work up and down.

    >>> cluster = SLURMCUDACluster(cores=8, memory="64GiB", walltime="02:00:00", queue="gpu")
    >>> cluster.adapt(minimum=0, maximum=32)
    >>> client = cluster.get_client()
    """

    queue_name = "slurm"
    keywords = SLURMKeywords

    def __init__(self, n_workers: int = 0, **keywords: Unpack[SLURMKeywords]) -> None:
        super().__init__(n_workers, **keywords)


class LSFCUDACluster(JobCluster):
    """Dask workers on GPUs that LSF grants."""

    queue_name = "lsf"
    keywords = LSFKeywords

    def __init__(self, n_workers: int = 0, **keywords: Unpack[LSFKeywords]) -> None:
        super().__init__(n_workers, **keywords)


class SGECUDACluster(JobCluster):
    """Dask workers on GPUs that Grid Engine grants."""

    queue_name = "sge"
    keywords = SGEKeywords

    def __init__(self, n_workers: int = 0, **keywords: Unpack[SGEKeywords]) -> None:
        super().__init__(n_workers, **keywords)


class MoabCUDACluster(JobCluster):
    """Dask workers on GPUs that Moab grants."""

    queue_name = "moab"
    keywords = PBSKeywords

    def __init__(self, n_workers: int = 0, **keywords: Unpack[PBSKeywords]) -> None:
        super().__init__(n_workers, **keywords)


class PBSCUDACluster(JobCluster):
    """Dask workers on GPUs that PBS grants."""

    queue_name = "pbs"
    keywords = PBSKeywords

    def __init__(self, n_workers: int = 0, **keywords: Unpack[PBSKeywords]) -> None:
        super().__init__(n_workers, **keywords)


class OARCUDACluster(JobCluster):
    """Dask workers on GPUs that OAR grants."""

    queue_name = "oar"
    keywords = OARKeywords

    def __init__(self, n_workers: int = 0, **keywords: Unpack[OARKeywords]) -> None:
        super().__init__(n_workers, **keywords)


class HTCondorCUDACluster(JobCluster):
    """Dask workers on GPUs that HTCondor grants."""

    queue_name = "htcondor"
    keywords = HTCondorKeywords

    def __init__(self, n_workers: int = 0, **keywords: Unpack[HTCondorKeywords]) -> None:
        super().__init__(n_workers, **keywords)


class LocalCUDAJobCluster(JobCluster):
    """Dask workers whose jobs are processes of this machine: for laptops, tests, one GPU box.

    Cores and memory of a job default to this machine's, shared by its GPUs. Each job gets GPUs of
    its own; jobs that find none free are pending.
    """

    queue_name = "local"
    keywords = SGEKeywords

    def __init__(self, n_workers: int = 0, **keywords: Unpack[SGEKeywords]) -> None:
        super().__init__(n_workers, **keywords)


def class_of(system: str) -> type[JobCluster]:
    """Return the cluster class of a queueing system; make that of another package's system."""
    name = systems()[system].cluster
    if name not in globals():
        queue = queue_class(system)

        def init(self: JobCluster, n_workers: int = 0, **keywords: Any) -> None:
            JobCluster.__init__(self, n_workers, **keywords)

        contents = {
            "__doc__": f"Dask workers on GPUs that {queue.title} grants.",
            "__init__": init,
            "__module__": __name__,
            "queue_name": system,
            "keywords": make_keywords(name, import_job_class(queue.jobqueue), queue.keywords),
        }
        globals()[name] = type(name, (JobCluster,), contents)
    cls: type[JobCluster] = globals()[name]
    return cls


def __getattr__(name: str) -> Any:
    for system, known in systems().items():
        if known.cluster == name:
            return class_of(system)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
