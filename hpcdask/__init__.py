"""Dask clusters on the GPUs of SLURM and MPI systems.

Importing this package starts nothing, opens nothing and changes no signal handler.
Type checkers read ``__init__.pyi``, which ``tools/stub.py`` writes.
"""

from __future__ import annotations

from typing import Any

from .queues.registry import SYSTEMS as _SYSTEMS
from .queues.registry import systems as _systems

__version__ = "0.1.0"
__all__ = ["Runner", "attach", "connect", "gang", "gpus", "initialize", "load", "save"]
__all__ += sorted(system.cluster for system in _SYSTEMS.values())
_HOMES = {
    "Runner": "runner.runner",
    "initialize": "runner.runner",
    "attach": "clusters.detached.attached",
    "connect": "client.connect",
    "gang": "client.gang",
    "gpus": "gpu.table",
    "load": "client.saving",
    "save": "client.saving",
}


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES and name not in (system.cluster for system in _systems().values()):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    home = _HOMES.get(name, "clusters.classes")
    return getattr(importlib.import_module(f".{home}", __name__), name)
