"""Which worker runs where: decided from what the ranks see, without an effect."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from . import devices
from .devices import Gpu, View
from .nanny import Place
from .ranks import Rank
from .spec import RunSpec, WorkerSpec


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
        See `hpcdask.devices.assign`.
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

        processes, per_process = nprocesses_nthreads(len(views[0].cores))
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
    cores, memory
        What all workers of the node have together; `memory` in bytes.
    count
        How many workers that is.
    """
    return [
        Place(
            name=name,
            gpu=gpu,
            cores=tuple(devices.worker_cores(cores, gpu)),
            nthreads=spec.nthreads or (1 if gpu else max(1, len(cores) // count)),
            memory_limit=memory // count if spec.memory_limit is None else spec.memory_limit,
            protocol="ucx" if spec.protocol == "ucx" else "tcp",
        )
        for name, gpu in zip(names, given, strict=True)
    ]


def owned_cores(views: Sequence[View]) -> list[int]:
    """The cores that the ranks of one node have together."""
    return sorted({core for view in views for core in view.cores})
