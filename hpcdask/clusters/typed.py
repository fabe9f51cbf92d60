"""The cluster classes and their keywords, for type checkers and editors; nothing imports it.

At run time `hpcdask.clusters.classes` makes the classes from the registry of queueing systems.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Literal, TypedDict, Unpack

from distributed import Scheduler, Security

from hpcdask.spec.keywords import Protocol, WorkerKeywords

from .cluster import JobCluster


class ClusterKeywords(WorkerKeywords, total=False):
    """Keywords that all cluster classes take."""

    groups: Mapping[str, Mapping[str, Any]] | None
    gpus_per_job: int | None
    gpu_type: str | None
    nodes_per_job: int
    poll_interval: str | float | timedelta | None
    start_timeout: str | float | timedelta | None
    security: Security | bool | None
    shared_temp_directory: str | None
    scheduler_options: dict[str, Any] | None
    scheduler_cls: type[Scheduler]
    protocol: Literal[Protocol, "tls", "tls://", "tcp://", "ucx://"] | None
    config_name: str | None
    silence_logs: int | str | bool
    detached: bool
    scheduler_job: dict[str, Any] | None
    scheduler_timeout: str | float | timedelta | None
    idle_timeout: str | float | timedelta | None
    asynchronous: bool
    loop: Any
    # Of dask-jobqueue's jobs
    cores: int | None
    memory: str | int | float | None
    job_script_prologue: list[str] | None
    job_directives_skip: list[str] | None
    job_name: str | None
    processes: int | None
    worker_extra_args: list[str] | None
    log_directory: str | None
    python: str | None
    shebang: str | None
    header_skip: list[str] | None
    env_extra: list[str] | None
    extra: list[str] | None
    nanny: Literal[True] | None
    worker_command: Literal["distributed.cli.dask_worker", "hpcdask.worker"] | None
    job_extra: list[str] | None


class QueueKeywords(ClusterKeywords, total=False):
    """Keywords of all systems but HTCondor."""

    walltime: str | None
    queue: str | None
    job_extra_directives: list[str] | None


class _Account(TypedDict, total=False):
    account: str | None


class _Project(TypedDict, total=False):
    project: str | None


class _ResourceSpec(TypedDict, total=False):
    resource_spec: str | None


class SLURMKeywords(QueueKeywords, _Account, _Project, total=False):
    """Keywords of `SLURMCUDACluster`."""

    gpu_request: Literal["gres", "gpus-per-node", "gpus"] | None
    job_cpu: int | None
    job_mem: str | None


class LSFKeywords(QueueKeywords, _Project, total=False):
    """Keywords of `LSFCUDACluster`."""

    ncpus: int | None
    mem: int | None
    lsf_units: str | None
    use_stdin: bool | None


class SGEKeywords(QueueKeywords, _Project, _ResourceSpec, total=False):
    """Keywords of `SGECUDACluster` and `LocalCUDAJobCluster`."""


class PBSKeywords(SGEKeywords, _Account, total=False):
    """Keywords of `PBSCUDACluster` and `MoabCUDACluster`."""


class OARKeywords(SGEKeywords, total=False):
    """Keywords of `OARCUDACluster`."""

    memory_per_core_property_name: str | None


class HTCondorKeywords(ClusterKeywords, total=False):
    """Keywords of `HTCondorCUDACluster`."""

    job_extra_directives: dict[str, Any] | None
    disk: str | int | None
    submit_command_extra: list[str] | None
    cancel_command_extra: list[str] | None


class SLURMCUDACluster(JobCluster):
    """Dask workers on GPUs that SLURM grants."""

    def __init__(self, n_workers: int = 0, **keywords: Unpack[SLURMKeywords]) -> None: ...


class LSFCUDACluster(JobCluster):
    """Dask workers on GPUs that LSF grants."""

    def __init__(self, n_workers: int = 0, **keywords: Unpack[LSFKeywords]) -> None: ...


class SGECUDACluster(JobCluster):
    """Dask workers on GPUs that Grid Engine grants."""

    def __init__(self, n_workers: int = 0, **keywords: Unpack[SGEKeywords]) -> None: ...


class MoabCUDACluster(JobCluster):
    """Dask workers on GPUs that Moab grants."""

    def __init__(self, n_workers: int = 0, **keywords: Unpack[PBSKeywords]) -> None: ...


class PBSCUDACluster(JobCluster):
    """Dask workers on GPUs that PBS grants."""

    def __init__(self, n_workers: int = 0, **keywords: Unpack[PBSKeywords]) -> None: ...


class OARCUDACluster(JobCluster):
    """Dask workers on GPUs that OAR grants."""

    def __init__(self, n_workers: int = 0, **keywords: Unpack[OARKeywords]) -> None: ...


class HTCondorCUDACluster(JobCluster):
    """Dask workers on GPUs that HTCondor grants."""

    def __init__(self, n_workers: int = 0, **keywords: Unpack[HTCondorKeywords]) -> None: ...


class LocalCUDAJobCluster(JobCluster):
    """Dask workers whose jobs are processes of this machine."""

    def __init__(self, n_workers: int = 0, **keywords: Unpack[SGEKeywords]) -> None: ...
