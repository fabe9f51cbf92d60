"""Inventory of this rank or job: GPUs, cores, memory."""

from __future__ import annotations

from dataclasses import dataclass

from hpcdask.bootstrap import resources
from hpcdask.bootstrap.ranks import Rank
from hpcdask.comm import fabric, transport
from hpcdask.comm.fabric import Fabric
from hpcdask.gpu.devices import Gpu
from hpcdask.spec.records import Record
from hpcdask.spec.specs import WorkerSpec

from .gpu_probe import GpuProbe, ProbeResult
from .preflight import check_extras


@dataclass(frozen=True)
class Inventory(Record):
    """Report of one rank on itself, for the choice of devices and cores.

    The GPUs it sees are in CUDA's order. ``shown`` are those of the node about which NVML was
    asked; None where the node's first rank does that. ``memory`` are bytes of the host that the job
    may use on this node; ``quota`` is of how many cores a cgroup allows the time, None for all.
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
        """Return how many threads can run at a time."""
        return min(len(self.cores), self.quota or len(self.cores))


def look(spec: WorkerSpec, rank: Rank, probe: GpuProbe | None) -> tuple[Inventory, Fabric]:
    """Return what a rank or a job's part sees here, checked, and what joins its devices.

    There is no probe where there is no driver, or no GPU is wanted.
    """
    found = ProbeResult()
    if probe is not None:
        found = probe.report()
    elif spec.protocol == "ucx" or spec.interface == transport.AUTO:
        found = ProbeResult(fabric=fabric.look(gpus=False))
    if spec.interface and spec.interface != transport.AUTO:
        transport.check_interface(spec.interface, fabric.interfaces(every=True), rank.host)
    check_extras(cuda=bool(found.gpus))
    seen = Inventory(
        rank.index,
        rank.host,
        rank.local_index,
        found.gpus,
        tuple(sorted(resources.launcher_cores())),
        resources.job_memory(),
        found.shown,
        resources.cpu_quota(),
    )
    return seen, found.fabric
