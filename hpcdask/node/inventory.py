"""What this rank or job has: GPUs, cores, memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpcdask.gpu.devices import Gpu


@dataclass(frozen=True)
class View:
    """What one rank reports of itself, for the choice of devices and cores.

    Attributes
    ----------
    rank, host, local_index
        The rank, its node, its number among the node's ranks.
    gpus
        The GPUs it sees, in CUDA's order.
    cores
        CPU cores it may run on.
    memory
        Bytes of host memory that the job may use on this node.
    shown
        The node's GPUs about which NVML was asked; None where it was not, see `complete`.
    quota
        Of how many cores a cgroup allows the time; None for all.
    """

    rank: int
    host: str
    local_index: int
    gpus: tuple[Gpu, ...]
    cores: tuple[int, ...]
    memory: int
    shown: tuple[Gpu, ...] | None = ()
    quota: int | None = None

    @property
    def cpus(self) -> int:
        """How many threads can run at a time."""
        return min(len(self.cores), self.quota or len(self.cores))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> View:
        """Read what ``dataclasses.asdict`` and JSON made of a view."""
        gpus = tuple(map(Gpu.from_json, data["gpus"]))
        shown = None if data["shown"] is None else tuple(map(Gpu.from_json, data["shown"]))
        return cls(**{**data, "gpus": gpus, "cores": tuple(data["cores"]), "shown": shown})
