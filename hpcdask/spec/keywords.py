"""Types of the keywords of workers and runs; `hpcdask.spec.specs` has their texts and defaults.

None stands for a value that nobody gave.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, TypedDict

Device = Literal["auto", "cuda", "cpu"]
Protocol = Literal["auto", "tcp", "ucx"]


class WorkerKeywords(TypedDict, total=False):
    """Fields of `WorkerSpec` but ``protocol``, of which clusters take more."""

    device: Device | None
    interface: str | None
    port_range: str | None
    nthreads: int | None
    memory_limit: str | float | None
    enable_nvlink: bool | None
    rmm_pool_size: str | int | float | None
    rmm_async: bool | None
    rmm_allocator_external_lib_list: str | Iterable[str] | None
    device_memory_limit: str | int | float | None
    local_directory: str | None
    name: str | None
    resources: str | Mapping[str, float] | None
    preload: str | Iterable[str] | None
    preload_nanny: str | Iterable[str] | None
    lifetime: str | float | None
    lifetime_stagger: str | float | None
    lifetime_restart: bool | None
    death_timeout: str | float | None


class RunKeywords(WorkerKeywords, total=False):
    """Fields of `RunSpec`."""

    protocol: Protocol | None
    scheduler_file: str | None
    dashboard_address: str | None
    tls: bool | None
    groups: str | Mapping[str, int] | tuple[str, ...] | None
    oversubscribe: bool | None
    timeout: str | float | None
    workers_min: int | None


class InitializeKeywords(RunKeywords, total=False):
    """Keywords of `hpcdask.initialize`, which takes those of dask-mpi, too."""

    nanny: Literal[True] | None
    worker_class: Literal["distributed.Worker", "distributed.Nanny"] | None
    comm: None
    dashboard: bool | None
