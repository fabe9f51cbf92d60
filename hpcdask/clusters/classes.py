"""The public cluster classes, one for each queueing system."""

from __future__ import annotations

import functools
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


class SLURMCUDACluster(JobCluster, queue_name="slurm", keywords=SLURMKeywords):
    """Dask workers on GPUs that SLURM grants, one job per GPU, following the work up and down.

    >>> cluster = SLURMCUDACluster(cores=8, memory="64GiB", walltime="02:00:00", queue="gpu")
    >>> cluster.adapt(minimum=0, maximum=32)
    >>> client = cluster.get_client()
    """

    def __init__(self, n_workers: int = 0, **keywords: Unpack[SLURMKeywords]) -> None:
        super().__init__(n_workers, **keywords)


class LSFCUDACluster(JobCluster, queue_name="lsf", keywords=LSFKeywords):
    """Dask workers on GPUs that LSF grants."""

    def __init__(self, n_workers: int = 0, **keywords: Unpack[LSFKeywords]) -> None:
        super().__init__(n_workers, **keywords)


class SGECUDACluster(JobCluster, queue_name="sge", keywords=SGEKeywords):
    """Dask workers on GPUs that Grid Engine grants."""

    def __init__(self, n_workers: int = 0, **keywords: Unpack[SGEKeywords]) -> None:
        super().__init__(n_workers, **keywords)


class MoabCUDACluster(JobCluster, queue_name="moab", keywords=PBSKeywords):
    """Dask workers on GPUs that Moab grants."""

    def __init__(self, n_workers: int = 0, **keywords: Unpack[PBSKeywords]) -> None:
        super().__init__(n_workers, **keywords)


class PBSCUDACluster(JobCluster, queue_name="pbs", keywords=PBSKeywords):
    """Dask workers on GPUs that PBS grants."""

    def __init__(self, n_workers: int = 0, **keywords: Unpack[PBSKeywords]) -> None:
        super().__init__(n_workers, **keywords)


class OARCUDACluster(JobCluster, queue_name="oar", keywords=OARKeywords):
    """Dask workers on GPUs that OAR grants."""

    def __init__(self, n_workers: int = 0, **keywords: Unpack[OARKeywords]) -> None:
        super().__init__(n_workers, **keywords)


class HTCondorCUDACluster(JobCluster, queue_name="htcondor", keywords=HTCondorKeywords):
    """Dask workers on GPUs that HTCondor grants."""

    def __init__(self, n_workers: int = 0, **keywords: Unpack[HTCondorKeywords]) -> None:
        super().__init__(n_workers, **keywords)


class LocalCUDAJobCluster(JobCluster, queue_name="local", keywords=SGEKeywords):
    """Dask workers whose jobs are processes of this machine: for laptops, tests, one GPU box.

    Cores and memory of a job default to this machine's, shared by its GPUs. Each job gets GPUs of
    its own; jobs that find none free are pending.
    """

    def __init__(self, n_workers: int = 0, **keywords: Unpack[SGEKeywords]) -> None:
        super().__init__(n_workers, **keywords)


@functools.cache
def class_of(system: str) -> type[JobCluster]:
    """Return the cluster class of a queueing system; make that of another package's system."""
    name, queue = systems()[system].cluster, queue_class(system)
    if name in globals():
        return globals()[name]  # type: ignore[no-any-return]
    known = make_keywords(name, import_job_class(queue.jobqueue), queue.keywords)

    class OfPackage(JobCluster, queue_name=system, keywords=known):
        __doc__ = f"Dask workers on GPUs that {queue.title} grants."

        def __init__(self, n_workers: int = 0, **keywords: Any) -> None:
            super().__init__(n_workers, **keywords)

    OfPackage.__name__ = OfPackage.__qualname__ = name
    return OfPackage


def __getattr__(name: str) -> Any:
    for system, known in systems().items():
        if known.cluster == name:
            return class_of(system)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
