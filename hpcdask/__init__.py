"""Dask clusters on the GPUs of SLURM and MPI systems.

Importing this package starts nothing, opens nothing and changes no signal handler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .client.connect import connect
    from .clusters.classes import (
        HTCondorCUDACluster,
        LocalCUDAJobCluster,
        LSFCUDACluster,
        MoabCUDACluster,
        OARCUDACluster,
        PBSCUDACluster,
        SGECUDACluster,
        SLURMCUDACluster,
    )
    from .runner.runner import Runner, initialize

__version__ = "0.1.0"
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
    "connect",
    "initialize",
]
_HOMES = {
    **dict.fromkeys((name for name in __all__ if name.endswith("Cluster")), "clusters.classes"),
    "Runner": "runner.runner",
    "initialize": "runner.runner",
    "connect": "client.connect",
}


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
