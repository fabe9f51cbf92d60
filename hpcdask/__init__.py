"""Dask clusters on the GPUs of SLURM and MPI systems.

Importing this package starts nothing, opens nothing and changes no signal handler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .queues.registry import SYSTEMS as _SYSTEMS
from .queues.registry import systems as _systems

if TYPE_CHECKING:
    from .client.connect import connect as connect
    from .client.gang import gang as gang
    from .clusters.classes import HTCondorCUDACluster as HTCondorCUDACluster
    from .clusters.classes import LocalCUDAJobCluster as LocalCUDAJobCluster
    from .clusters.classes import LSFCUDACluster as LSFCUDACluster
    from .clusters.classes import MoabCUDACluster as MoabCUDACluster
    from .clusters.classes import OARCUDACluster as OARCUDACluster
    from .clusters.classes import PBSCUDACluster as PBSCUDACluster
    from .clusters.classes import SGECUDACluster as SGECUDACluster
    from .clusters.classes import SLURMCUDACluster as SLURMCUDACluster
    from .clusters.detached.attached import attach as attach
    from .gpu.monitor import gpus as gpus
    from .runner.runner import Runner as Runner
    from .runner.runner import initialize as initialize

__version__ = "0.1.0"
_HOMES = {
    "Runner": "runner.runner",
    "initialize": "runner.runner",
    "attach": "clusters.detached.attached",
    "connect": "client.connect",
    "gang": "client.gang",
    "gpus": "gpu.monitor",
}
__all__ = [*_HOMES, *sorted(system.cluster for system in _SYSTEMS.values())]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


if not TYPE_CHECKING:  # type checkers would take any name for one of this module's

    def __getattr__(name: str) -> object:
        if name not in _HOMES and name not in (system.cluster for system in _systems().values()):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import importlib

        home = _HOMES.get(name, "clusters.classes")
        return getattr(importlib.import_module(f".{home}", __name__), name)
