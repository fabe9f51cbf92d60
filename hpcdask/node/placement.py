"""Inventory of a node, and placement of workers from what the ranks see, without an effect."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hpcdask.comm.fabric import Fabric
from hpcdask.comm.transport import Choice, Reach
from hpcdask.gpu import memory as gpu_memory
from hpcdask.gpu.devices import Gpu
from hpcdask.gpu.memory import ON_HOST, MemoryPlan
from hpcdask.spec.records import Record
from hpcdask.spec.specs import WorkerSpec

#: Said where workers fall back to the CPU.
NO_GPU_HERE = "no GPU here, so workers compute on the CPU (--device cpu says that this is meant)"


def place_workers(
    spec: WorkerSpec,
    given: Mapping[str, Gpu | None],
    sharers: Sequence[Inventory],
    devices: Sequence[Gpu | None],
    choice: Choice,
    interface: str | None,
    *,
    beside_gpus: bool = False,
) -> list[WorkerPlacement]:
    """Return the workers that have the `given` devices, by name, of all `devices` of their node.

    A worker on a GPU has the cores near it, or else all. Those on the CPU share the threads that
    the others leave; `beside_gpus` they exchange over tcp.
    """
    cores, on_gpus = owned_cores(sharers), Counter(gpu.uuid for gpu in devices if gpu)
    cpus = min([len(cores), *(one.quota for one in sharers if one.quota)])
    left = cpus - on_gpus.total() * (spec.nthreads or 1)
    share = max(1, left // max(1, len(devices) - on_gpus.total()))
    memory = min(one.memory for one in sharers) // len(devices)
    return [
        WorkerPlacement(
            name=name,
            gpu=gpu,
            cores=tuple(core for core in cores if gpu and core in gpu.cores) or tuple(cores),
            nthreads=spec.nthreads or (1 if gpu else share),
            memory_limit=memory if spec.memory_limit is None else spec.memory_limit,
            protocol=choice.protocol if gpu or not beside_gpus else "tcp",
            reach=choice.reach,
            interface=interface,
            device_memory=gpu_memory.plan(
                spec, gpu, protocol=choice.protocol, shared=on_gpus[gpu.uuid] if gpu else 1
            ),
        )
        for name, gpu in given.items()
    ]


def slow_parts(spec: WorkerSpec, choice: Choice, *, on_device: bool) -> list[str]:
    return [*choice.warnings, *filter(None, [gpu_memory.missing(spec) if on_device else None])]


def owned_cores(inventories: Sequence[Inventory]) -> list[int]:
    """Return the cores that the ranks of one node have together."""
    return sorted({core for one in inventories for core in one.cores})


@dataclass(frozen=True)
class WorkerPlacement(Record):
    """Place of one worker; its GPU is None for the CPU.

    ``memory_limit`` is bytes of host memory, 0 for no limit. Without an interface, it listens on
    the one that leads to the scheduler.
    """

    name: str
    gpu: Gpu | None
    cores: tuple[int, ...]
    nthreads: int
    memory_limit: int
    protocol: str = "tcp"
    reach: Reach = "all"
    interface: str | None = None
    device_memory: MemoryPlan = ON_HOST


@dataclass(frozen=True)
class Inventory(Record):
    """Devices, cores and memory that a rank, or a job on one node, may use, and their links.

    ``local_index`` is the rank's number on its node. The GPUs are in CUDA's order. ``memory`` is in
    bytes of the host; ``quota`` is the number of cores whose time a cgroup allows, None for all.
    """

    rank: int
    host: str
    local_index: int
    gpus: tuple[Gpu, ...]
    cores: tuple[int, ...]
    memory: int
    quota: int | None = None
    fabric: Fabric = field(default_factory=Fabric)
