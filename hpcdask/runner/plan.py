"""Plan of a run: GPUs and workers of the ranks, and how data travel. Pure."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from hpcdask.bootstrap.ranks import Rank
from hpcdask.comm.fabric import Fabric
from hpcdask.comm.transport import Choice, NodeLinks, choose, choose_interface
from hpcdask.errors import DeviceError, LaunchError, UsageError
from hpcdask.gpu.devices import EACH_A_GPU, Gpu
from hpcdask.logs import plural, some
from hpcdask.node.placement import (
    Inventory,
    WorkerPlacement,
    owned_cores,
    split_node,
    with_transport,
)
from hpcdask.node.preflight import tell_warnings
from hpcdask.queues.environment import how_to_request, job_id
from hpcdask.security.ports import PER_SCHEDULER, check_size
from hpcdask.spec import kinds
from hpcdask.spec.specs import RunSpec


def assign_gpus(
    inventories: Sequence[Inventory],
    *,
    device: str,
    oversubscribe: bool,
    job: str | None,
    every_gpu: bool = False,
    mixed: bool = False,
) -> dict[int, list[Gpu | None]]:
    """Give each rank the devices of its workers, by rank; None stands for the CPU.

    Where the ranks of a node see the same GPUs, each takes one by its number on the node; where
    the launcher gave each its own (``--gpus-per-task=1``), it takes that. The inventories are of
    ranks that get a worker. `job` is None on a workstation. With `every_gpu` a single rank, started
    without a launcher, gets a worker for each GPU that it sees. With `mixed`, ranks without a GPU
    compute on the CPU beside others.

    Raises DeviceError if there is no GPU where one is wanted, or too few distinct ones.
    """
    blind = [one for one in inventories if not one.gpus]
    if device == "cpu" or (device == "auto" and len(blind) == len(inventories) and job is None):
        return {one.rank: [None] for one in inventories}
    taken: dict[int, list[Gpu | None]] = {}
    if mixed and len(blind) < len(inventories):
        taken = {one.rank: [None] for one in blind}
        inventories = [one for one in inventories if one.gpus]
    elif blind:
        where = some(sorted(one.host for one in blind))
        who = f"rank {blind[0].rank} does not see"
        if len(blind) == len(inventories):
            who = "none of the ranks sees"
        raise DeviceError(
            f"{who} a GPU on {where}. {how_to_request(job)}To compute on the CPU: --device cpu"
        )
    for host, ranks in _by_host(inventories).items():
        ranks.sort(key=lambda one: one.local_index)
        if every_gpu and len(ranks) == 1:
            taken[ranks[0].rank] = list(ranks[0].gpus)
            continue
        matched = _match(ranks)
        if not oversubscribe:
            _check_distinct(host, ranks, matched)
        taken |= {one.rank: [gpu] for one, gpu in zip(ranks, matched, strict=True)}
    return taken


def assign_groups(
    inventories: Sequence[Inventory], spec: RunSpec, *, by_hand: bool, job: str | None
) -> dict[int, list[Gpu | None]]:
    """Give each rank its devices, by rank, as ``--groups`` has numbers for each node.

    Started `by_hand`, the only rank has all these workers. Raises UsageError if a node has another
    number of ranks, DeviceError if those on GPUs see too few.
    """
    wanted = kinds.kinds(spec.groups)
    number = wanted.count("gpu")
    taken: dict[int, list[Gpu | None]] = {}
    for host, ranks in _by_host(inventories).items():
        ranks.sort(key=lambda one: one.local_index)
        on_gpus = ranks[: number and 1]
        if not by_hand:
            _check_count(host, ranks, spec)
            on_gpus = [one for one, kind in zip(ranks, wanted, strict=True) if kind == "gpu"]
        _check_seen(host, on_gpus, number, spec, job)
        if by_hand:
            gpus = itertools.cycle(ranks[0].gpus)
            taken[ranks[0].rank] = [next(gpus) if kind == "gpu" else None for kind in wanted]
            continue
        on_gpus = [dataclasses.replace(one, local_index=i) for i, one in enumerate(on_gpus)]
        matched = _match(on_gpus)
        if not spec.oversubscribe:
            _check_distinct(host, on_gpus, matched)
        taken |= {one.rank: [None] for one in ranks}
        taken |= {one.rank: [gpu] for one, gpu in zip(on_gpus, matched, strict=True)}
    return taken


def _check_count(host: str, ranks: Sequence[Inventory], spec: RunSpec) -> None:
    """Refuse a node that has more or fewer ranks than ``--groups`` says."""
    wanted, text = len(kinds.kinds(spec.groups)), " ".join(spec.groups)
    if len(ranks) != wanted:
        gpus = len({gpu.uuid for one in ranks for gpu in one.gpus})
        raise UsageError(
            f"--groups {text} is for {plural(wanted, 'rank')} with a worker on each node, and "
            f"{host} has {len(ranks)} ({plural(gpus, 'GPU')}, "
            f"{plural(len(owned_cores(ranks)), 'core')}): start {wanted} there, or change the "
            f"numbers"
        )


def _check_seen(
    host: str, on_gpus: Sequence[Inventory], number: int, spec: RunSpec, job: str | None
) -> None:
    """Refuse ranks of a node that do not see the GPUs that ``--groups`` wants there."""
    wants = f"--groups {' '.join(spec.groups)} wants {plural(number, 'GPU')} on {host}"
    if blind := [one.rank for one in on_gpus if not one.gpus]:
        raise DeviceError(
            f"{wants}, and rank {blind[0]} sees none. {how_to_request(job)}To compute on the "
            f"CPU there, change the numbers"
        )
    seen = len({gpu.uuid for one in on_gpus for gpu in one.gpus})
    if seen < number and not spec.oversubscribe:
        raise DeviceError(
            f"{wants}, whose ranks see {seen}: change the numbers, or let workers share a GPU with "
            f"--oversubscribe"
        )


def _by_host(inventories: Iterable[Inventory]) -> dict[str, list[Inventory]]:
    """The ranks of each node."""
    found: dict[str, list[Inventory]] = {}
    for one in inventories:
        found.setdefault(one.host, []).append(one)
    return found


def _check_distinct(host: str, ranks: Sequence[Inventory], matched: Sequence[Gpu]) -> None:
    """Refuse ranks of a node that would share a GPU."""
    if len({gpu.uuid for gpu in matched}) == len(ranks):
        return
    distinct = {gpu.uuid for one in ranks for gpu in one.gpus}
    if len(distinct) >= len(ranks):
        raise DeviceError(
            f"{host} has {len(ranks)} ranks and {len(distinct)} GPUs, but some see only "
            f"the same ones: request one per rank (srun {EACH_A_GPU}), or let "
            f"workers share a GPU with --oversubscribe"
        )
    raise DeviceError(
        f"{host} has {len(ranks)} ranks but only {plural(len(distinct), 'distinct GPU')}: start at "
        f"most {len(distinct)} per node, or let workers share a GPU with --oversubscribe"
    )


def _match(ranks: Sequence[Inventory]) -> list[Gpu]:
    """Return one GPU per rank of a node: all different where possible, fewest sharers else.

    A maximum bipartite matching by augmenting paths (Kuhn 1955); each rank's first wish is
    the GPU of its own number, so that rank i gets GPU i where all are visible.
    """
    wishes = [
        [one.gpus[(one.local_index + step) % len(one.gpus)] for step in range(len(one.gpus))]
        for one in ranks
    ]
    owner: dict[str, int] = {}

    def place(rank: int, tried: set[str]) -> bool:
        for gpu in wishes[rank]:
            if gpu.uuid not in tried:
                tried.add(gpu.uuid)
                if gpu.uuid not in owner or place(owner[gpu.uuid], tried):
                    owner[gpu.uuid] = rank
                    return True
        return False

    placed = [place(rank, set()) for rank in range(len(ranks))]
    by_uuid = {gpu.uuid: gpu for wish in wishes for gpu in wish}
    result = {rank: by_uuid[uuid] for uuid, rank in owner.items()}
    sharers = Counter(gpu.uuid for gpu in result.values())
    for rank, alone in enumerate(placed):
        if not alone:
            result[rank] = min(wishes[rank], key=lambda gpu: sharers[gpu.uuid])
            sharers[result[rank].uuid] += 1
    return [result[rank] for rank in range(len(ranks))]


def place_workers(
    spec: RunSpec, rank: Rank, inventories: Mapping[int, Inventory], *, job: str | None
) -> dict[int, list[WorkerPlacement]]:
    """Give every rank its workers, each with a device, cores, threads and memory.

    `rank` is rank 0: started by hand, it gets a worker for every GPU. The result has only ranks
    with workers. Raises DeviceError as `assign_gpus` does.
    """
    working = [one for _, one in sorted(inventories.items())]
    by_hand = rank.launcher == "none"
    numbered = bool(kinds.kinds(spec.groups))
    if numbered:
        given = assign_groups(working, spec, by_hand=by_hand, job=job)
    else:
        given = assign_gpus(
            working,
            device=spec.device,
            oversubscribe=spec.oversubscribe,
            job=job,
            every_gpu=by_hand,
            mixed=spec.groups == kinds.AUTO,
        )
    threads = spec.nthreads
    if by_hand and given[0] == [None] and not numbered:
        from distributed.deploy.utils import nprocesses_nthreads

        processes, per_process = nprocesses_nthreads(inventories[0].cpus)
        given[0] = [None] * processes
        threads = threads or per_process
    spec = dataclasses.replace(spec, nthreads=threads)
    placements: dict[int, list[WorkerPlacement]] = {}
    nodes = _by_host(working)
    for one in working:
        mates = nodes[one.host]
        numbers = range(one.rank, one.rank + len(given[one.rank]))
        names = [f"{spec.name or one.host}-{number}" for number in numbers]
        devices = [device for mate in mates for device in given[mate.rank]]
        on_gpus = sum(device is not None for device in devices)
        placements[one.rank] = split_node(
            spec, given[one.rank], names, mates, len(devices), on_gpus
        )
    return placements


def _check_ports(
    spec: RunSpec,
    rank: Rank,
    placements: Mapping[int, Sequence[WorkerPlacement]],
    nodes: Mapping[int, NodeLinks],
) -> None:
    """Raise UsageError if a node needs more ports than the range has."""
    workers, on_ucx = Counter[str](), set()
    for index, group in placements.items():
        workers[nodes[index].host] += len(group)
        on_ucx |= {nodes[index].host for one in group if one.protocol == "ucx"}
    for host, count in workers.items():
        more = PER_SCHEDULER if host == rank.host else 0
        check_size(spec.port_range, count, ucx=host in on_ucx, more=more, where=f"on {host}")


@dataclass(frozen=True)
class Plan:
    """Plan of a run: devices of the workers, and how data travel.

    `placements` is by rank. `interfaces` is by node, and has only nodes for which one was chosen.
    """

    placements: dict[int, list[WorkerPlacement]]
    choice: Choice
    interfaces: dict[str, str]


def make_plan(
    spec: RunSpec, rank: Rank, inventories: Mapping[int, Inventory], fabrics: Mapping[int, Fabric]
) -> Plan:
    """Decide for all ranks, from what each has and what joins it to others; warn of what is slow.

    Raises UsageError if there will be fewer workers than ``--workers-min``, or as `place_workers`.
    """
    placements = place_workers(spec, rank, inventories, job=job_id())
    planned = sum(map(len, placements.values()))
    if (spec.workers_min or 0) > planned:
        raise UsageError(
            f"--workers-min {spec.workers_min}: there will be {plural(planned, 'worker')} here. "
            f"Ask for no more"
        )
    nodes = {
        index: NodeLinks(
            one.host,
            tuple(placed.gpu for placed in placements.get(index, ()) if placed.gpu),
            fabrics[index],
        )
        for index, one in inventories.items()
    }
    # also of ranks without workers: the scheduler's must be one that the workers reach
    interfaces = choose_interface(spec, list(nodes.values()))
    working = {index: nodes[index] for index in placements}
    on_gpus = [node for node in working.values() if node.gpus]
    choice = choose(spec, on_gpus or list(working.values()))
    if planned > 1 and sum(len(node.gpus) for node in on_gpus) == 1 and spec.protocol == "auto":
        choice = dataclasses.replace(choice, reason="only one worker has a GPU")
    tell_warnings(spec, choice, on_device=any(node.gpus for node in working.values()))
    complete = with_transport(spec, placements, working, choice, interfaces)
    _check_ports(spec, rank, complete, nodes)
    return Plan(complete, choice, interfaces)


class WantedWorkers:
    """The names of the workers that are wanted; fewer of them as some are given up."""

    def __init__(self, spec: RunSpec) -> None:
        self.names: set[str] = set()
        self.on_device = False
        self._spec = spec
        self._by_rank: dict[int, set[str]] = {}

    def plan(self, placements: Mapping[int, Sequence[WorkerPlacement]]) -> None:
        """These will be started, by rank."""
        self._by_rank = {rank: {one.name for one in group} for rank, group in placements.items()}
        self.names = set().union(*self._by_rank.values())
        self.on_device = any(one.gpu for group in placements.values() for one in group)

    @property
    def least(self) -> int:
        """Return how many must register before the program starts."""
        return min(self._spec.workers_min or len(self.names), len(self.names))

    def are_enough(self, registered: Set[str]) -> bool:
        """Return whether the program may start. Numbers are compared first, at each arrival."""
        least = self.least
        return len(registered) >= least and len(registered & self.names) >= least

    def enough_without(self, rank: int, name: str | None = None) -> bool:
        """Give up a worker of a rank, by default all; say whether --workers-min is still met."""
        self.names -= {name} if name else self._by_rank.get(rank, set())
        return self._spec.workers_min is not None and len(self.names) >= self._spec.workers_min

    def give_up(self) -> None:
        """None is wanted any more."""
        self.names = set()

    def too_late(self, registered: Collection[str]) -> LaunchError:
        """The error that says which did not register."""
        missing = some(sorted(self.names - set(registered)))
        return LaunchError(
            f"of {plural(len(self.names), 'worker')}, these did not register within "
            f"{self._spec.timeout:g} s: {missing}. Allow more with --timeout, or start with fewer "
            f"by --workers-min"
        )
