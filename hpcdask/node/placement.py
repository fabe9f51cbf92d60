"""Inventory of a node, and placement of workers from what the ranks see, without an effect."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpcdask.comm.transport import Choice, NodeLinks, Reach
from hpcdask.gpu import memory_plan
from hpcdask.gpu.devices import Gpu
from hpcdask.gpu.memory_plan import ON_HOST, MemoryPlan
from hpcdask.spec.records import Record
from hpcdask.spec.specs import WorkerSpec


def split_node(
    spec: WorkerSpec,
    given: Sequence[Gpu | None],
    names: Sequence[str],
    sharers: Sequence[Inventory],
    count: int,
    on_gpus: int = 0,
) -> list[WorkerPlacement]:
    """Workers of one node, each with its device (``given``) and name.

    The ranks that share the node, and its ``count`` workers together, have cores and memory. Those
    on the CPU share the threads that the others, ``on_gpus``, leave.
    """
    cores = owned_cores(sharers)
    cpus = min([len(cores), *(one.quota for one in sharers if one.quota)])
    memory = min(one.memory for one in sharers)
    share = max(1, (cpus - on_gpus * (spec.nthreads or 1)) // max(1, count - on_gpus))
    return [
        WorkerPlacement(
            name=name,
            gpu=gpu,
            cores=tuple(worker_cores(cores, gpu)),
            nthreads=spec.nthreads or (1 if gpu else share),
            memory_limit=memory // count if spec.memory_limit is None else spec.memory_limit,
        )
        for name, gpu in zip(names, given, strict=True)
    ]


def with_transport(
    spec: WorkerSpec,
    placements: Mapping[int, Sequence[WorkerPlacement]],
    links: Mapping[int, NodeLinks],
    choice: Choice,
    interfaces: Mapping[str, str],
) -> dict[int, list[WorkerPlacement]]:
    """Complete the placements of each rank with what depends on the transport.

    ``links`` are what joins them, per rank; ``interfaces`` are of hosts that have one to listen on.
    Beside workers on GPUs, those on the CPU take tcp.
    """
    sharers = Counter(
        (links[rank].host, one.gpu.uuid)
        for rank, group in placements.items()
        for one in group
        if one.gpu
    )

    def complete(host: str, one: WorkerPlacement) -> WorkerPlacement:
        shared = sharers[host, one.gpu.uuid] if one.gpu else 1
        memory = memory_plan.plan(spec, one.gpu, protocol=choice.protocol, shared=shared)
        protocol = choice.protocol if one.gpu or not sharers else "tcp"
        return dataclasses.replace(
            one,
            protocol=protocol,
            reach=choice.reach,
            interface=interfaces.get(host),
            device_memory=memory,
        )

    return {
        rank: [complete(links[rank].host, one) for one in group]
        for rank, group in placements.items()
    }


def owned_cores(inventories: Sequence[Inventory]) -> list[int]:
    """The cores that the ranks of one node have together."""
    return sorted({core for one in inventories for core in one.cores})


def worker_cores(owned: Sequence[int], gpu: Gpu | None) -> list[int]:
    """The cores a worker should run on: the job's that are near its GPU, else all the job's."""
    near = sorted(set(owned) & set(gpu.cores)) if gpu else []
    return near or sorted(owned)


@dataclass(frozen=True)
class WorkerPlacement(Record):
    """Where one worker runs; its GPU is None for the CPU.

    ``memory_limit`` is bytes of host memory, 0 for no limit; ucx reaches ``all`` workers, or those
    of one ``node`` among each other; without an interface, it listens on the one that leads to the
    scheduler.
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
    """What a rank, or a job on one node, may use.

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

    @property
    def cpus(self) -> int:
        """Return how many threads can run at a time."""
        return min(len(self.cores), self.quota or len(self.cores))
