# Made by tools/stub.py from what there is at run time: change that, and run it again.
# ruff: noqa: I001
# fmt: off
import collections.abc
import datetime
import distributed.scheduler
import distributed.security
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from distributed import Client

from hpcdask.clusters.cluster import JobCluster
from hpcdask.clusters.detached.attached import AttachedCluster
from hpcdask.runner.runner import Runner as _Runner

__version__: str
__all__ = [
    "HTCondorCUDACluster",
    "LSFCUDACluster",
    "LocalCUDAJobCluster",
    "MoabCUDACluster",
    "OARCUDACluster",
    "PBSCUDACluster",
    "Runner",
    "SGECUDACluster",
    "SLURMCUDACluster",
    "attach",
    "connect",
    "gang",
    "gpus",
    "initialize",
    "load",
    "save",
]

class HTCondorCUDACluster(JobCluster):
    """Dask workers on GPUs that HTCondor grants; see `SLURMCUDACluster`."""

    def __init__(
        self, n_workers: int = 0, *,
        groups: collections.abc.Mapping[str, collections.abc.Mapping[str, Any]] | None = None,
        gpus_per_job: int | None = None, gpu_type: str | None = None, nodes_per_job: int = 1,
        poll_interval: str | float | datetime.timedelta | None = None,
        start_timeout: str | float | datetime.timedelta | None = None,
        security: distributed.security.Security | bool | None = None,
        shared_temp_directory: str | None = None, scheduler_options: dict[str, Any] | None = None,
        scheduler_cls: type[distributed.scheduler.Scheduler] = ...,
        protocol: Literal['auto', 'tcp', 'ucx', 'tls', 'tls://', 'tcp://', 'ucx://'] | None = None,
        interface: str | None = None, config_name: str | None = None,
        silence_logs: int | str | bool = 'error', name: str | None = None, detached: bool = False,
        scheduler_job: dict[str, Any] | None = ...,
        scheduler_timeout: str | float | datetime.timedelta | None = None,
        idle_timeout: str | float | datetime.timedelta | None = None, asynchronous: bool = False,
        loop: Any = None, cores: int | None = None, memory: str | int | float | None = None,
        job_script_prologue: list[str] | None = None,
        job_extra_directives: dict[str, Any] | None = None,
        job_directives_skip: list[str] | None = None, job_name: str | None = None,
        processes: int | None = None, worker_extra_args: list[str] | None = None,
        log_directory: str | None = None, python: str | None = None, shebang: str | None = None,
        job_extra: list[str] | None = None, header_skip: list[str] | None = None,
        env_extra: list[str] | None = None, extra: list[str] | None = None,
        nanny: Literal[True] | None = None,
        worker_command: Literal['distributed.cli.dask_worker', 'hpcdask.worker'] | None = None,
        disk: str | int | None = None, submit_command_extra: list[str] | None = None,
        cancel_command_extra: list[str] | None = None,
        device: Literal['auto', 'cuda', 'cpu'] | None = None, port_range: str | None = None,
        nthreads: int | None = None, memory_limit: str | float | None = None,
        enable_nvlink: bool | None = None, enable_infiniband: bool | None = None,
        enable_rdmacm: bool | None = None, enable_tcp_over_ucx: bool | None = None,
        rmm_pool_size: str | int | float | None = None, rmm_async: bool | None = None,
        rmm_allocator_external_lib_list: str | collections.abc.Iterable[str] | None = None,
        device_memory_limit: str | int | float | None = None, local_directory: str | None = None,
        resources: str | collections.abc.Mapping[str, float] | None = None,
        preload: str | collections.abc.Iterable[str] | None = None,
        preload_nanny: str | collections.abc.Iterable[str] | None = None,
        lifetime: str | float | None = None, lifetime_stagger: str | float | None = None,
        lifetime_restart: bool | None = None, death_timeout: str | float | None = None,
        profile: Literal['none', 'nsys', 'py-spy'] | None = None, profile_folder: str | None = None,
    ) -> None: ...

class LSFCUDACluster(JobCluster):
    """Dask workers on GPUs that LSF grants; see `SLURMCUDACluster`."""

    def __init__(
        self, n_workers: int = 0, *,
        groups: collections.abc.Mapping[str, collections.abc.Mapping[str, Any]] | None = None,
        gpus_per_job: int | None = None, gpu_type: str | None = None, nodes_per_job: int = 1,
        poll_interval: str | float | datetime.timedelta | None = None,
        start_timeout: str | float | datetime.timedelta | None = None,
        security: distributed.security.Security | bool | None = None,
        shared_temp_directory: str | None = None, scheduler_options: dict[str, Any] | None = None,
        scheduler_cls: type[distributed.scheduler.Scheduler] = ...,
        protocol: Literal['auto', 'tcp', 'ucx', 'tls', 'tls://', 'tcp://', 'ucx://'] | None = None,
        interface: str | None = None, config_name: str | None = None,
        silence_logs: int | str | bool = 'error', name: str | None = None, detached: bool = False,
        scheduler_job: dict[str, Any] | None = ...,
        scheduler_timeout: str | float | datetime.timedelta | None = None,
        idle_timeout: str | float | datetime.timedelta | None = None, asynchronous: bool = False,
        loop: Any = None, cores: int | None = None, memory: str | int | float | None = None,
        walltime: str | None = None, queue: str | None = None, project: str | None = None,
        job_script_prologue: list[str] | None = None, job_extra_directives: list[str] | None = None,
        job_directives_skip: list[str] | None = None, job_name: str | None = None,
        processes: int | None = None, worker_extra_args: list[str] | None = None,
        log_directory: str | None = None, python: str | None = None, shebang: str | None = None,
        job_extra: list[str] | None = None, header_skip: list[str] | None = None,
        env_extra: list[str] | None = None, extra: list[str] | None = None,
        nanny: Literal[True] | None = None,
        worker_command: Literal['distributed.cli.dask_worker', 'hpcdask.worker'] | None = None,
        ncpus: int | None = None, mem: int | None = None, lsf_units: str | None = None,
        use_stdin: bool | None = None, device: Literal['auto', 'cuda', 'cpu'] | None = None,
        port_range: str | None = None, nthreads: int | None = None,
        memory_limit: str | float | None = None, enable_nvlink: bool | None = None,
        enable_infiniband: bool | None = None, enable_rdmacm: bool | None = None,
        enable_tcp_over_ucx: bool | None = None, rmm_pool_size: str | int | float | None = None,
        rmm_async: bool | None = None,
        rmm_allocator_external_lib_list: str | collections.abc.Iterable[str] | None = None,
        device_memory_limit: str | int | float | None = None, local_directory: str | None = None,
        resources: str | collections.abc.Mapping[str, float] | None = None,
        preload: str | collections.abc.Iterable[str] | None = None,
        preload_nanny: str | collections.abc.Iterable[str] | None = None,
        lifetime: str | float | None = None, lifetime_stagger: str | float | None = None,
        lifetime_restart: bool | None = None, death_timeout: str | float | None = None,
        profile: Literal['none', 'nsys', 'py-spy'] | None = None, profile_folder: str | None = None,
    ) -> None: ...

class LocalCUDAJobCluster(JobCluster):
    """The same with processes of this machine as jobs: for laptops, tests, one GPU box."""

    def __init__(
        self, n_workers: int = 0, *,
        groups: collections.abc.Mapping[str, collections.abc.Mapping[str, Any]] | None = None,
        gpus_per_job: int | None = None, gpu_type: str | None = None, nodes_per_job: int = 1,
        poll_interval: str | float | datetime.timedelta | None = None,
        start_timeout: str | float | datetime.timedelta | None = None,
        security: distributed.security.Security | bool | None = None,
        shared_temp_directory: str | None = None, scheduler_options: dict[str, Any] | None = None,
        scheduler_cls: type[distributed.scheduler.Scheduler] = ...,
        protocol: Literal['auto', 'tcp', 'ucx', 'tls', 'tls://', 'tcp://', 'ucx://'] | None = None,
        interface: str | None = None, config_name: str | None = None,
        silence_logs: int | str | bool = 'error', name: str | None = None, detached: bool = False,
        scheduler_job: dict[str, Any] | None = ...,
        scheduler_timeout: str | float | datetime.timedelta | None = None,
        idle_timeout: str | float | datetime.timedelta | None = None, asynchronous: bool = False,
        loop: Any = None, cores: int | None = None, memory: str | int | float | None = None,
        walltime: str | None = None, queue: str | None = None, project: str | None = None,
        resource_spec: str | None = None, job_script_prologue: list[str] | None = None,
        job_extra_directives: list[str] | None = None, job_directives_skip: list[str] | None = None,
        job_name: str | None = None, processes: int | None = None,
        worker_extra_args: list[str] | None = None, log_directory: str | None = None,
        python: str | None = None, shebang: str | None = None, job_extra: list[str] | None = None,
        header_skip: list[str] | None = None, env_extra: list[str] | None = None,
        extra: list[str] | None = None, nanny: Literal[True] | None = None,
        worker_command: Literal['distributed.cli.dask_worker', 'hpcdask.worker'] | None = None,
        device: Literal['auto', 'cuda', 'cpu'] | None = None, port_range: str | None = None,
        nthreads: int | None = None, memory_limit: str | float | None = None,
        enable_nvlink: bool | None = None, enable_infiniband: bool | None = None,
        enable_rdmacm: bool | None = None, enable_tcp_over_ucx: bool | None = None,
        rmm_pool_size: str | int | float | None = None, rmm_async: bool | None = None,
        rmm_allocator_external_lib_list: str | collections.abc.Iterable[str] | None = None,
        device_memory_limit: str | int | float | None = None, local_directory: str | None = None,
        resources: str | collections.abc.Mapping[str, float] | None = None,
        preload: str | collections.abc.Iterable[str] | None = None,
        preload_nanny: str | collections.abc.Iterable[str] | None = None,
        lifetime: str | float | None = None, lifetime_stagger: str | float | None = None,
        lifetime_restart: bool | None = None, death_timeout: str | float | None = None,
        profile: Literal['none', 'nsys', 'py-spy'] | None = None, profile_folder: str | None = None,
    ) -> None: ...

class MoabCUDACluster(JobCluster):
    """Dask workers on GPUs that Moab grants; see `SLURMCUDACluster`."""

    def __init__(
        self, n_workers: int = 0, *,
        groups: collections.abc.Mapping[str, collections.abc.Mapping[str, Any]] | None = None,
        gpus_per_job: int | None = None, gpu_type: str | None = None, nodes_per_job: int = 1,
        poll_interval: str | float | datetime.timedelta | None = None,
        start_timeout: str | float | datetime.timedelta | None = None,
        security: distributed.security.Security | bool | None = None,
        shared_temp_directory: str | None = None, scheduler_options: dict[str, Any] | None = None,
        scheduler_cls: type[distributed.scheduler.Scheduler] = ...,
        protocol: Literal['auto', 'tcp', 'ucx', 'tls', 'tls://', 'tcp://', 'ucx://'] | None = None,
        interface: str | None = None, config_name: str | None = None,
        silence_logs: int | str | bool = 'error', name: str | None = None, detached: bool = False,
        scheduler_job: dict[str, Any] | None = ...,
        scheduler_timeout: str | float | datetime.timedelta | None = None,
        idle_timeout: str | float | datetime.timedelta | None = None, asynchronous: bool = False,
        loop: Any = None, cores: int | None = None, memory: str | int | float | None = None,
        walltime: str | None = None, queue: str | None = None, account: str | None = None,
        project: str | None = None, resource_spec: str | None = None,
        job_script_prologue: list[str] | None = None, job_extra_directives: list[str] | None = None,
        job_directives_skip: list[str] | None = None, job_name: str | None = None,
        processes: int | None = None, worker_extra_args: list[str] | None = None,
        log_directory: str | None = None, python: str | None = None, shebang: str | None = None,
        job_extra: list[str] | None = None, header_skip: list[str] | None = None,
        env_extra: list[str] | None = None, extra: list[str] | None = None,
        nanny: Literal[True] | None = None,
        worker_command: Literal['distributed.cli.dask_worker', 'hpcdask.worker'] | None = None,
        device: Literal['auto', 'cuda', 'cpu'] | None = None, port_range: str | None = None,
        nthreads: int | None = None, memory_limit: str | float | None = None,
        enable_nvlink: bool | None = None, enable_infiniband: bool | None = None,
        enable_rdmacm: bool | None = None, enable_tcp_over_ucx: bool | None = None,
        rmm_pool_size: str | int | float | None = None, rmm_async: bool | None = None,
        rmm_allocator_external_lib_list: str | collections.abc.Iterable[str] | None = None,
        device_memory_limit: str | int | float | None = None, local_directory: str | None = None,
        resources: str | collections.abc.Mapping[str, float] | None = None,
        preload: str | collections.abc.Iterable[str] | None = None,
        preload_nanny: str | collections.abc.Iterable[str] | None = None,
        lifetime: str | float | None = None, lifetime_stagger: str | float | None = None,
        lifetime_restart: bool | None = None, death_timeout: str | float | None = None,
        profile: Literal['none', 'nsys', 'py-spy'] | None = None, profile_folder: str | None = None,
    ) -> None: ...

class OARCUDACluster(JobCluster):
    """Dask workers on GPUs that OAR grants; see `SLURMCUDACluster`."""

    def __init__(
        self, n_workers: int = 0, *,
        groups: collections.abc.Mapping[str, collections.abc.Mapping[str, Any]] | None = None,
        gpus_per_job: int | None = None, gpu_type: str | None = None, nodes_per_job: int = 1,
        poll_interval: str | float | datetime.timedelta | None = None,
        start_timeout: str | float | datetime.timedelta | None = None,
        security: distributed.security.Security | bool | None = None,
        shared_temp_directory: str | None = None, scheduler_options: dict[str, Any] | None = None,
        scheduler_cls: type[distributed.scheduler.Scheduler] = ...,
        protocol: Literal['auto', 'tcp', 'ucx', 'tls', 'tls://', 'tcp://', 'ucx://'] | None = None,
        interface: str | None = None, config_name: str | None = None,
        silence_logs: int | str | bool = 'error', name: str | None = None, detached: bool = False,
        scheduler_job: dict[str, Any] | None = ...,
        scheduler_timeout: str | float | datetime.timedelta | None = None,
        idle_timeout: str | float | datetime.timedelta | None = None, asynchronous: bool = False,
        loop: Any = None, cores: int | None = None, memory: str | int | float | None = None,
        walltime: str | None = None, queue: str | None = None, project: str | None = None,
        resource_spec: str | None = None, job_script_prologue: list[str] | None = None,
        job_extra_directives: list[str] | None = None, job_directives_skip: list[str] | None = None,
        job_name: str | None = None, processes: int | None = None,
        worker_extra_args: list[str] | None = None, log_directory: str | None = None,
        python: str | None = None, shebang: str | None = None, job_extra: list[str] | None = None,
        header_skip: list[str] | None = None, env_extra: list[str] | None = None,
        extra: list[str] | None = None, nanny: Literal[True] | None = None,
        worker_command: Literal['distributed.cli.dask_worker', 'hpcdask.worker'] | None = None,
        memory_per_core_property_name: str | None = None,
        device: Literal['auto', 'cuda', 'cpu'] | None = None, port_range: str | None = None,
        nthreads: int | None = None, memory_limit: str | float | None = None,
        enable_nvlink: bool | None = None, enable_infiniband: bool | None = None,
        enable_rdmacm: bool | None = None, enable_tcp_over_ucx: bool | None = None,
        rmm_pool_size: str | int | float | None = None, rmm_async: bool | None = None,
        rmm_allocator_external_lib_list: str | collections.abc.Iterable[str] | None = None,
        device_memory_limit: str | int | float | None = None, local_directory: str | None = None,
        resources: str | collections.abc.Mapping[str, float] | None = None,
        preload: str | collections.abc.Iterable[str] | None = None,
        preload_nanny: str | collections.abc.Iterable[str] | None = None,
        lifetime: str | float | None = None, lifetime_stagger: str | float | None = None,
        lifetime_restart: bool | None = None, death_timeout: str | float | None = None,
        profile: Literal['none', 'nsys', 'py-spy'] | None = None, profile_folder: str | None = None,
    ) -> None: ...

class PBSCUDACluster(JobCluster):
    """Dask workers on GPUs that PBS grants; see `SLURMCUDACluster`."""

    def __init__(
        self, n_workers: int = 0, *,
        groups: collections.abc.Mapping[str, collections.abc.Mapping[str, Any]] | None = None,
        gpus_per_job: int | None = None, gpu_type: str | None = None, nodes_per_job: int = 1,
        poll_interval: str | float | datetime.timedelta | None = None,
        start_timeout: str | float | datetime.timedelta | None = None,
        security: distributed.security.Security | bool | None = None,
        shared_temp_directory: str | None = None, scheduler_options: dict[str, Any] | None = None,
        scheduler_cls: type[distributed.scheduler.Scheduler] = ...,
        protocol: Literal['auto', 'tcp', 'ucx', 'tls', 'tls://', 'tcp://', 'ucx://'] | None = None,
        interface: str | None = None, config_name: str | None = None,
        silence_logs: int | str | bool = 'error', name: str | None = None, detached: bool = False,
        scheduler_job: dict[str, Any] | None = ...,
        scheduler_timeout: str | float | datetime.timedelta | None = None,
        idle_timeout: str | float | datetime.timedelta | None = None, asynchronous: bool = False,
        loop: Any = None, cores: int | None = None, memory: str | int | float | None = None,
        walltime: str | None = None, queue: str | None = None, account: str | None = None,
        project: str | None = None, resource_spec: str | None = None,
        job_script_prologue: list[str] | None = None, job_extra_directives: list[str] | None = None,
        job_directives_skip: list[str] | None = None, job_name: str | None = None,
        processes: int | None = None, worker_extra_args: list[str] | None = None,
        log_directory: str | None = None, python: str | None = None, shebang: str | None = None,
        job_extra: list[str] | None = None, header_skip: list[str] | None = None,
        env_extra: list[str] | None = None, extra: list[str] | None = None,
        nanny: Literal[True] | None = None,
        worker_command: Literal['distributed.cli.dask_worker', 'hpcdask.worker'] | None = None,
        device: Literal['auto', 'cuda', 'cpu'] | None = None, port_range: str | None = None,
        nthreads: int | None = None, memory_limit: str | float | None = None,
        enable_nvlink: bool | None = None, enable_infiniband: bool | None = None,
        enable_rdmacm: bool | None = None, enable_tcp_over_ucx: bool | None = None,
        rmm_pool_size: str | int | float | None = None, rmm_async: bool | None = None,
        rmm_allocator_external_lib_list: str | collections.abc.Iterable[str] | None = None,
        device_memory_limit: str | int | float | None = None, local_directory: str | None = None,
        resources: str | collections.abc.Mapping[str, float] | None = None,
        preload: str | collections.abc.Iterable[str] | None = None,
        preload_nanny: str | collections.abc.Iterable[str] | None = None,
        lifetime: str | float | None = None, lifetime_stagger: str | float | None = None,
        lifetime_restart: bool | None = None, death_timeout: str | float | None = None,
        profile: Literal['none', 'nsys', 'py-spy'] | None = None, profile_folder: str | None = None,
    ) -> None: ...

class Runner(_Runner):
    """A Dask cluster from the ranks that all run this program."""

    def __init__(
        self, *, device: Literal['auto', 'cuda', 'cpu'] = 'auto',
        protocol: Literal['auto', 'tcp', 'ucx'] = 'auto', interface: str | None = None,
        port_range: str | None = None, nthreads: int | None = None,
        memory_limit: str | float | None = None, enable_nvlink: bool | None = None,
        enable_infiniband: bool | None = None, enable_rdmacm: bool | None = None,
        enable_tcp_over_ucx: bool | None = None, rmm_pool_size: str | int | float | None = None,
        rmm_async: bool = False,
        rmm_allocator_external_lib_list: str | collections.abc.Iterable[str] | None = ...,
        device_memory_limit: str | int | float | None = None, local_directory: str | None = None,
        name: str | None = None, resources: str | collections.abc.Mapping[str, float] | None = None,
        preload: str | collections.abc.Iterable[str] | None = ...,
        preload_nanny: str | collections.abc.Iterable[str] | None = ...,
        lifetime: str | float | None = None, lifetime_stagger: str | float | None = None,
        lifetime_restart: bool = False, death_timeout: str | float | None = 60.0,
        profile: Literal['none', 'nsys', 'py-spy'] = 'none', profile_folder: str | None = None,
        layout: Literal['shared', 'dedicated'] = 'shared', scheduler_file: str | None = None,
        dashboard_address: str | None = None, tls: bool = True,
        groups: str | collections.abc.Mapping[str, int] | tuple[str, ...] | None = ...,
        oversubscribe: bool = False, timeout: str | float = 300.0,
        profile_ranks: str | collections.abc.Iterable[str] | None = ...,
        workers_min: int | None = None,
    ) -> None: ...

class SGECUDACluster(JobCluster):
    """Dask workers on GPUs that Grid Engine grants; see `SLURMCUDACluster`."""

    def __init__(
        self, n_workers: int = 0, *,
        groups: collections.abc.Mapping[str, collections.abc.Mapping[str, Any]] | None = None,
        gpus_per_job: int | None = None, gpu_type: str | None = None, nodes_per_job: int = 1,
        poll_interval: str | float | datetime.timedelta | None = None,
        start_timeout: str | float | datetime.timedelta | None = None,
        security: distributed.security.Security | bool | None = None,
        shared_temp_directory: str | None = None, scheduler_options: dict[str, Any] | None = None,
        scheduler_cls: type[distributed.scheduler.Scheduler] = ...,
        protocol: Literal['auto', 'tcp', 'ucx', 'tls', 'tls://', 'tcp://', 'ucx://'] | None = None,
        interface: str | None = None, config_name: str | None = None,
        silence_logs: int | str | bool = 'error', name: str | None = None, detached: bool = False,
        scheduler_job: dict[str, Any] | None = ...,
        scheduler_timeout: str | float | datetime.timedelta | None = None,
        idle_timeout: str | float | datetime.timedelta | None = None, asynchronous: bool = False,
        loop: Any = None, cores: int | None = None, memory: str | int | float | None = None,
        walltime: str | None = None, queue: str | None = None, project: str | None = None,
        resource_spec: str | None = None, job_script_prologue: list[str] | None = None,
        job_extra_directives: list[str] | None = None, job_directives_skip: list[str] | None = None,
        job_name: str | None = None, processes: int | None = None,
        worker_extra_args: list[str] | None = None, log_directory: str | None = None,
        python: str | None = None, shebang: str | None = None, job_extra: list[str] | None = None,
        header_skip: list[str] | None = None, env_extra: list[str] | None = None,
        extra: list[str] | None = None, nanny: Literal[True] | None = None,
        worker_command: Literal['distributed.cli.dask_worker', 'hpcdask.worker'] | None = None,
        device: Literal['auto', 'cuda', 'cpu'] | None = None, port_range: str | None = None,
        nthreads: int | None = None, memory_limit: str | float | None = None,
        enable_nvlink: bool | None = None, enable_infiniband: bool | None = None,
        enable_rdmacm: bool | None = None, enable_tcp_over_ucx: bool | None = None,
        rmm_pool_size: str | int | float | None = None, rmm_async: bool | None = None,
        rmm_allocator_external_lib_list: str | collections.abc.Iterable[str] | None = None,
        device_memory_limit: str | int | float | None = None, local_directory: str | None = None,
        resources: str | collections.abc.Mapping[str, float] | None = None,
        preload: str | collections.abc.Iterable[str] | None = None,
        preload_nanny: str | collections.abc.Iterable[str] | None = None,
        lifetime: str | float | None = None, lifetime_stagger: str | float | None = None,
        lifetime_restart: bool | None = None, death_timeout: str | float | None = None,
        profile: Literal['none', 'nsys', 'py-spy'] | None = None, profile_folder: str | None = None,
    ) -> None: ...

class SLURMCUDACluster(JobCluster):
    """Dask workers on GPUs that SLURM grants, one job per GPU, following the work up and down."""

    def __init__(
        self, n_workers: int = 0, *,
        groups: collections.abc.Mapping[str, collections.abc.Mapping[str, Any]] | None = None,
        gpus_per_job: int | None = None, gpu_type: str | None = None, nodes_per_job: int = 1,
        poll_interval: str | float | datetime.timedelta | None = None,
        start_timeout: str | float | datetime.timedelta | None = None,
        security: distributed.security.Security | bool | None = None,
        shared_temp_directory: str | None = None, scheduler_options: dict[str, Any] | None = None,
        scheduler_cls: type[distributed.scheduler.Scheduler] = ...,
        protocol: Literal['auto', 'tcp', 'ucx', 'tls', 'tls://', 'tcp://', 'ucx://'] | None = None,
        interface: str | None = None, config_name: str | None = None,
        silence_logs: int | str | bool = 'error', name: str | None = None, detached: bool = False,
        scheduler_job: dict[str, Any] | None = ...,
        scheduler_timeout: str | float | datetime.timedelta | None = None,
        idle_timeout: str | float | datetime.timedelta | None = None, asynchronous: bool = False,
        loop: Any = None, cores: int | None = None, memory: str | int | float | None = None,
        walltime: str | None = None, queue: str | None = None, account: str | None = None,
        project: str | None = None, job_script_prologue: list[str] | None = None,
        job_extra_directives: list[str] | None = None, job_directives_skip: list[str] | None = None,
        job_name: str | None = None, processes: int | None = None,
        worker_extra_args: list[str] | None = None, log_directory: str | None = None,
        python: str | None = None, shebang: str | None = None, job_extra: list[str] | None = None,
        header_skip: list[str] | None = None, env_extra: list[str] | None = None,
        extra: list[str] | None = None, nanny: Literal[True] | None = None,
        worker_command: Literal['distributed.cli.dask_worker', 'hpcdask.worker'] | None = None,
        gpu_request: Literal['gres', 'gpus-per-node', 'gpus'] | None = None,
        job_cpu: int | None = None, job_mem: str | None = None,
        device: Literal['auto', 'cuda', 'cpu'] | None = None, port_range: str | None = None,
        nthreads: int | None = None, memory_limit: str | float | None = None,
        enable_nvlink: bool | None = None, enable_infiniband: bool | None = None,
        enable_rdmacm: bool | None = None, enable_tcp_over_ucx: bool | None = None,
        rmm_pool_size: str | int | float | None = None, rmm_async: bool | None = None,
        rmm_allocator_external_lib_list: str | collections.abc.Iterable[str] | None = None,
        device_memory_limit: str | int | float | None = None, local_directory: str | None = None,
        resources: str | collections.abc.Mapping[str, float] | None = None,
        preload: str | collections.abc.Iterable[str] | None = None,
        preload_nanny: str | collections.abc.Iterable[str] | None = None,
        lifetime: str | float | None = None, lifetime_stagger: str | float | None = None,
        lifetime_restart: bool | None = None, death_timeout: str | float | None = None,
        profile: Literal['none', 'nsys', 'py-spy'] | None = None, profile_folder: str | None = None,
    ) -> None: ...

def attach(
    name: str, *, folder: str | None = None, timeout: float = 600.0, asynchronous: bool = False,
    loop: Any = None,
) -> AttachedCluster: ...

def connect(
    path: str | None = None, *, timeout: float = 30.0, set_as_default: bool = True,
    asynchronous: bool = False, name: str | None = None, loop: Any = None,
    heartbeat_interval: int | str | None = None, serializers: list[str] | None = None,
    deserializers: list[str] | None = None, extensions: dict[str, Any] = ...,
    direct_to_workers: bool | None = None, connection_limit: int = 512,
) -> Client: ...

def gang(
    function: Callable[..., Any], *arguments: Sequence[Any], client: Client | None = None,
    size: int | None = None, timeout: str | float = '1h',
    shared: Mapping[str, Any] | None = None, grace: str | float = '5s',
) -> Any: ...

def gpus(
    client: Client | None = None,
) -> Any: ...

def initialize(
    *, exit: bool = True, worker_options: dict[str, Any] | None = None,
    device: Literal['auto', 'cuda', 'cpu'] | None = None,
    protocol: Literal['auto', 'tcp', 'ucx'] | None = None, interface: str | None = None,
    port_range: str | None = None, nthreads: int | None = None,
    memory_limit: str | float | None = None, enable_nvlink: bool | None = None,
    enable_infiniband: bool | None = None, enable_rdmacm: bool | None = None,
    enable_tcp_over_ucx: bool | None = None, rmm_pool_size: str | int | float | None = None,
    rmm_async: bool | None = None,
    rmm_allocator_external_lib_list: str | collections.abc.Iterable[str] | None = None,
    device_memory_limit: str | int | float | None = None, local_directory: str | None = None,
    name: str | None = None, resources: str | collections.abc.Mapping[str, float] | None = None,
    preload: str | collections.abc.Iterable[str] | None = None,
    preload_nanny: str | collections.abc.Iterable[str] | None = None,
    lifetime: str | float | None = None, lifetime_stagger: str | float | None = None,
    lifetime_restart: bool | None = None, death_timeout: str | float | None = None,
    profile: Literal['none', 'nsys', 'py-spy'] | None = None, profile_folder: str | None = None,
    layout: Literal['shared', 'dedicated'] | None = None, scheduler_file: str | None = None,
    dashboard_address: str | None = None, tls: bool | None = None,
    groups: str | collections.abc.Mapping[str, int] | tuple[str, ...] | None = None,
    oversubscribe: bool | None = None, timeout: str | float | None = None,
    profile_ranks: str | collections.abc.Iterable[str] | None = None,
    workers_min: int | None = None, nanny: Literal[True] | None = None,
    worker_class: Literal['distributed.Worker', 'distributed.Nanny'] | None = None,
    comm: None = None, dashboard: bool | None = None,
) -> bool: ...

def load(
    folder: str | os.PathLike[str], *, device: Literal['cuda', 'cpu'] | None = None,
) -> Any: ...

def save(
    collection: Any, folder: str | os.PathLike[str], *, overwrite: bool = False,
    compress: bool = False,
) -> None: ...
