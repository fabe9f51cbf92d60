"""Which worker runs where: decided from what the ranks see, without an effect."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

from .bootstrap.ranks import Rank
from .comm.topology import Seat
from .comm.transport import Choice
from .gpu import devices, memory_plan
from .gpu.devices import Gpu, View
from .nanny import Place
from .spec.specs import RunSpec, WorkerSpec


def first_worker_rank(spec: RunSpec) -> int:
    """Ranks before this one have no worker."""
    return 2 if spec.layout == "dedicated" else 0


def plan(
    spec: RunSpec, rank: Rank, views: Mapping[int, View], *, job: str | None
) -> dict[int, list[Place]]:
    """Give every rank its workers, each with a device, cores, threads and memory.

    Parameters
    ----------
    spec
        The options of the run.
    rank
        Rank 0: started by hand, it gets a worker for every GPU.
    views
        What each rank sees.
    job
        Id of the queueing system's job, or None.

    Returns
    -------
    dict of int to list of Place
        Per rank that has workers.

    Raises
    ------
    DeviceError
        See `hpcdask.gpu.devices.assign`.
    """
    working = [view for index, view in sorted(views.items()) if index >= first_worker_rank(spec)]
    by_hand = rank.launcher == "none"
    given = devices.assign(
        working,
        device=spec.device,
        oversubscribe=spec.oversubscribe,
        job=job,
        every_gpu=by_hand,
    )
    threads = spec.nthreads
    if by_hand and given[0] == [None]:
        from distributed.deploy.utils import nprocesses_nthreads

        processes, per_process = nprocesses_nthreads(views[0].cpus)
        given[0] = [None] * processes
        threads = threads or per_process
    places: dict[int, list[Place]] = {}
    for view in working:
        mates = [mate for mate in working if mate.host == view.host]
        cores = owned_cores(mates)
        names = [
            f"{spec.name or view.host}-{number}"
            for number in range(view.rank, view.rank + len(given[view.rank]))
        ]
        places[view.rank] = share(
            dataclasses.replace(spec, nthreads=threads),
            given[view.rank],
            names,
            cores=cores,
            cpus=min([len(cores), *(mate.quota for mate in mates if mate.quota)]),
            memory=min(mate.memory for mate in mates),
            count=sum(len(given[mate.rank]) for mate in mates),
        )
    return places


def share(
    spec: WorkerSpec,
    given: Sequence[Gpu | None],
    names: Sequence[str],
    *,
    cores: Sequence[int],
    cpus: int,
    memory: int,
    count: int,
) -> list[Place]:
    """Places on one node, whose cores and memory its workers share.

    Parameters
    ----------
    spec
        What the workers are.
    given, names
        Each worker's device and name.
    cores, cpus, memory
        What all workers of the node have together: which cores, the time of how many, bytes.
    count
        How many workers that is.
    """
    return [
        Place(
            name=name,
            gpu=gpu,
            cores=tuple(devices.worker_cores(cores, gpu)),
            nthreads=spec.nthreads or (1 if gpu else max(1, cpus // count)),
            memory_limit=memory // count if spec.memory_limit is None else spec.memory_limit,
        )
        for name, gpu in zip(names, given, strict=True)
    ]


def settle(
    spec: WorkerSpec,
    places: Mapping[int, Sequence[Place]],
    seats: Mapping[int, Seat],
    choice: Choice,
    interfaces: Mapping[str, str],
) -> dict[int, list[Place]]:
    """Complete places with what depends on the transport.

    Parameters
    ----------
    spec
        What the workers are.
    places
        Per rank.
    seats
        What joins them, per rank.
    choice
        Of the transport.
    interfaces
        Host to network interface, for those that have one to listen on.

    Raises
    ------
    UsageError
        Options that the device or the transport does not allow.
    """
    sharers = Counter(
        (seats[rank].host, place.gpu.uuid)
        for rank, group in places.items()
        for place in group
        if place.gpu
    )

    def complete(host: str, place: Place) -> Place:
        shared = sharers[host, place.gpu.uuid] if place.gpu else 1
        return dataclasses.replace(
            place,
            protocol=choice.protocol,
            reach=choice.reach,
            interface=interfaces.get(host),
            device_memory=memory_plan.plan(
                spec, place.gpu, protocol=choice.protocol, shared=shared
            ),
        )

    return {
        rank: [complete(seats[rank].host, place) for place in group]
        for rank, group in places.items()
    }


def owned_cores(views: Sequence[View]) -> list[int]:
    """The cores that the ranks of one node have together."""
    return sorted({core for view in views for core in view.cores})
