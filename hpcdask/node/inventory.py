"""What this rank or job has: GPUs, cores, memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpcdask.bootstrap import resources
from hpcdask.bootstrap.ranks import Rank
from hpcdask.comm import fabric, transport
from hpcdask.comm.fabric import Fabric
from hpcdask.gpu.devices import Gpu
from hpcdask.spec.specs import WorkerSpec

from .gpu_probe import GpuProbe
from .preflight import check_extras


@dataclass(frozen=True)
class Inventory:
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
    def from_json(cls, data: Mapping[str, Any]) -> Inventory:
        """Read what ``dataclasses.asdict`` and JSON made of a view."""
        gpus = tuple(map(Gpu.from_json, data["gpus"]))
        shown = None if data["shown"] is None else tuple(map(Gpu.from_json, data["shown"]))
        return cls(**{**data, "gpus": gpus, "cores": tuple(data["cores"]), "shown": shown})


def look(spec: WorkerSpec, rank: Rank, probe: GpuProbe | None) -> tuple[Inventory, Fabric]:
    """What a rank or a job's part sees here, checked, and what joins its devices.

    Parameters
    ----------
    spec
        The workers' options.
    rank
        Which one it is.
    probe
        Knows which GPUs it sees; None where there is no driver, or none are wanted.

    Raises
    ------
    UsageError
        The interface does not exist here, a package is missing, or the GPUs cannot be asked.
    """
    gpus: list[Gpu] = []
    shown: list[Gpu] | None = []
    joins = Fabric()
    if probe is not None:
        gpus, shown, joins = probe.report()
    elif spec.protocol == "ucx" or spec.interface == transport.AUTO:
        joins = fabric.look(gpus=False)
    if spec.interface and spec.interface != transport.AUTO:
        transport.check_interface(spec.interface, fabric.interfaces(every=True), rank.host)
    check_extras(cuda=bool(gpus))
    view = Inventory(
        rank.index,
        rank.host,
        rank.local_index,
        tuple(gpus),
        tuple(sorted(resources.launcher_cores())),
        resources.job_memory(),
        None if shown is None else tuple(shown),
        resources.cpu_quota(),
    )
    return view, joins
