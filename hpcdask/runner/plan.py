"""Plan of a run: GPUs and workers of the ranks, and how data travel. Pure."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from operator import attrgetter

from toolz import groupby

from hpcdask.bootstrap.ranks import Rank
from hpcdask.comm.transport import Choice, NodeLinks, choose, choose_interface
from hpcdask.errors import DeviceError, LaunchError, UsageError
from hpcdask.gpu.devices import EACH_A_GPU, Gpu
from hpcdask.logs import plural, some
from hpcdask.node.placement import (
    NO_GPU_HERE,
    Inventory,
    WorkerPlacement,
    owned_cores,
    place_workers,
    slow_parts,
)
from hpcdask.queues.registry import how_to_request
from hpcdask.security.ports import PER_SCHEDULER, check_size
from hpcdask.spec.specs import RunSpec


def assign_devices(
    inventories: Sequence[Inventory], spec: RunSpec, *, by_hand: bool, job: str | None
) -> dict[int, list[Gpu | None]]:
    """Give each rank the devices of its workers, by rank; None stands for the CPU.

    Where the ranks of a node see the same GPUs, each takes one by its number; where the launcher
    gave each its own (``--gpus-per-task=1``), it takes that. Started `by_hand`, the only rank has a
    worker for each GPU, or all that ``--groups`` numbers. `job` is None on a workstation.

    Raises DeviceError for too few GPUs, and UsageError for other ranks than ``--groups`` has.
    """
    wanted = spec.kinds()
    blind = [one for one in inventories if not one.gpus]
    all_blind = len(blind) == len(inventories)
    if not wanted:
        if spec.device == "cpu" or (spec.device == "auto" and all_blind and job is None):
            return {one.rank: [None] for one in inventories}
        if all_blind or (blind and spec.groups != ("auto",)):
            who = "none of the ranks sees" if all_blind else f"rank {blind[0].rank} does not see"
            where = some(sorted(one.host for one in blind))
            raise DeviceError(
                f"{who} a GPU on {where}. {how_to_request(job)}To compute on the CPU: --device cpu"
            )
    taken: defaultdict[int, list[Gpu | None]] = defaultdict(list)
    for host, ranks in groupby(attrgetter("host"), inventories).items():
        ranks.sort(key=lambda one: one.local_index)
        if by_hand:
            kinds = wanted or ("gpu",) * len(ranks[0].gpus)
            ranks = ranks * len(kinds)
        elif wanted:
            kinds = wanted
            if len(ranks) != len(wanted):
                gpus = plural(len({gpu.uuid for one in ranks for gpu in one.gpus}), "GPU")
                raise UsageError(
                    f"--groups {' '.join(spec.groups)} is for {plural(len(wanted), 'rank')} with a "
                    f"worker on each node, and {host} has {len(ranks)} ({gpus}, "
                    f"{plural(len(owned_cores(ranks)), 'core')}): start {len(wanted)} there, or "
                    f"change the numbers"
                )
        else:
            kinds = ["gpu" if one.gpus else "cpu" for one in ranks]
        on_gpus = [one for one, kind in zip(ranks, kinds, strict=True) if kind == "gpu"]
        if unseeing := [one.rank for one in on_gpus if not one.gpus]:
            raise DeviceError(
                f"--groups {' '.join(spec.groups)} wants {plural(len(on_gpus), 'GPU')} on {host}, "
                f"and rank {unseeing[0]} sees none. {how_to_request(job)}To compute on the CPU "
                f"there, change the numbers"
            )
        matched = _match(on_gpus)
        if not spec.oversubscribe:
            _check_distinct(host, on_gpus, matched)
        left = iter(matched)
        for one, kind in zip(ranks, kinds, strict=True):
            taken[one.rank].append(next(left) if kind == "gpu" else None)
    return taken


def _check_distinct(host: str, ranks: Sequence[Inventory], matched: Sequence[Gpu]) -> None:
    distinct, count = {gpu.uuid for one in ranks for gpu in one.gpus}, len(matched)
    if len({gpu.uuid for gpu in matched}) == count:
        return
    if len(distinct) >= count:
        raise DeviceError(
            f"{host} has {count} ranks and {len(distinct)} GPUs, but some see only the same ones: "
            f"request one per rank (srun {EACH_A_GPU}), or let workers share a GPU with "
            f"--oversubscribe"
        )
    raise DeviceError(
        f"{host} has {plural(count, 'worker')} for GPUs but only "
        f"{plural(len(distinct), 'distinct GPU')}: start at most {len(distinct)} per node, or let "
        f"workers share a GPU with --oversubscribe"
    )


def _match(ranks: Sequence[Inventory]) -> list[Gpu]:
    """Return one GPU per rank of a node, with the fewest sharers; who sees few chooses first."""
    sharers: Counter[str] = Counter()
    found: dict[int, Gpu] = {}
    for place, one in sorted(enumerate(ranks), key=lambda each: len(each[1].gpus)):
        first = place % len(one.gpus)  # rank i wishes for GPU i
        wishes = one.gpus[first:] + one.gpus[:first]
        found[place] = min(wishes, key=lambda gpu: sharers[gpu.uuid])
        sharers[found[place].uuid] += 1
    return [found[place] for place in range(len(ranks))]


@dataclass(frozen=True)
class Plan:
    """Workers by rank, how they exchange data, and warnings."""

    placements: dict[int, list[WorkerPlacement]]
    choice: Choice
    hosts: frozenset[str] = frozenset()
    warnings: tuple[str, ...] = ()

    @property
    def workers(self) -> list[WorkerPlacement]:
        return [one for group in self.placements.values() for one in group]

    @property
    def on_device(self) -> bool:
        return any(one.gpu for one in self.workers)

    def describe(self, spec: RunSpec, registered: int) -> str:
        """Return what computes on what, and how data travel."""
        devices = Counter(one.gpu.name if one.gpu else "CPU" for one in self.workers)
        what = ", ".join(f"{count} x {device}" for device, count in devices.items())
        network = "tcp with TLS" if spec.tls else "tcp without TLS"
        if self.choice.protocol == "ucx":
            network = f"ucx between workers, {network} to the scheduler"
        if spec.protocol == "auto" and self.on_device:
            network += f" ({self.choice.reason})"
        count = plural(len(self.workers), "worker")
        missing = f"{registered} of " * (registered < len(self.workers))
        return f"{missing}{count} on {plural(len(self.hosts), 'node')} ({what}), {network}"


def _fallback(spec: RunSpec, ranks: Sequence[Inventory]) -> str:
    """Return a line on ranks that fall back to the CPU without ``--device cpu``, or nothing."""
    blind = [one.host for one in ranks if not one.gpus]
    if spec.device != "auto" or spec.kinds() or not blind:
        return ""
    if len(blind) == len(ranks):
        return NO_GPU_HERE
    where = f"{plural(len(blind), 'rank')} without a GPU on {some(blind)}"
    return f"{where}, so on the CPU (--groups auto)"


def make_plan(
    spec: RunSpec,
    rank: Rank,
    inventories: Mapping[int, Inventory],
    *,
    job: str | None,
) -> Plan:
    """Give every rank its workers; started by hand, rank 0 has one for every GPU.

    Raises UsageError, also for fewer workers than ``--workers-min``.
    """
    ranks = [one for _, one in sorted(inventories.items())]
    by_hand = rank.launcher == "none"
    given = assign_devices(ranks, spec, by_hand=by_hand, job=job)
    if by_hand and given[0] == [None] and not spec.kinds():
        from distributed.deploy.utils import nprocesses_nthreads

        cores = len(inventories[0].cores)
        processes, threads = nprocesses_nthreads(min(cores, inventories[0].quota or cores))
        given[0] = [None] * processes
        spec = dataclasses.replace(spec, nthreads=spec.nthreads or threads)
    planned = sum(map(len, given.values()))
    if (spec.workers_min or 0) > planned:
        raise UsageError(
            f"--workers-min {spec.workers_min}: there will be {plural(planned, 'worker')} here. "
            f"Ask for no more"
        )
    nodes = [NodeLinks(one.host, tuple(filter(None, given[one.rank])), one.fabric) for one in ranks]
    interfaces = choose_interface(spec, nodes)
    on_gpus = [node for node in nodes if node.gpus]
    choice = choose(spec, on_gpus or nodes)
    slow = slow_parts(spec, choice, on_device=bool(on_gpus))
    lines = [_fallback(spec, ranks), *(f"warning: {one}" for one in slow)]
    placements: dict[int, list[WorkerPlacement]] = {}
    hosts = groupby(attrgetter("host"), ranks)
    for one in ranks:
        mates, name = hosts[one.host], spec.name or one.host
        devices = [device for mate in mates for device in given[mate.rank]]
        own = {f"{name}-{number}": gpu for number, gpu in enumerate(given[one.rank], one.rank)}
        placements[one.rank] = place_workers(
            *(spec, own, mates, devices, choice, interfaces.get(one.host)),
            beside_gpus=bool(on_gpus),
        )
    for host, mates in hosts.items():
        there = [worker for one in mates for worker in placements[one.rank]]
        ucx = any(one.protocol == "ucx" for one in there)
        more = PER_SCHEDULER if host == rank.host else 0
        check_size(spec.port_range, len(there), ucx=ucx, more=more, where=f"on {host}")
    return Plan(placements, choice, frozenset(hosts), tuple(filter(None, lines)))


class WantedWorkers:
    """The names of the workers that are wanted; fewer of them as some are given up."""

    def __init__(
        self, spec: RunSpec, placements: Mapping[int, Sequence[WorkerPlacement]] | None = None
    ) -> None:
        self._spec = spec
        self._by_rank = {
            rank: {one.name for one in group} for rank, group in (placements or {}).items()
        }
        self.names = {name for names in self._by_rank.values() for name in names}

    def are_enough(self, registered: Set[str]) -> bool:
        """Return whether the program may start. Numbers are compared first, at each arrival."""
        least = min(self._spec.workers_min or len(self.names), len(self.names))
        return len(registered) >= least and len(registered & self.names) >= least

    def give_up(self, rank: int, name: str = "") -> None:
        """Want a worker of a rank no more, by default all of them."""
        self.names -= {name} if name else self._by_rank.get(rank, set())

    def suffice(self, least: int | None) -> bool:
        """Return whether the run goes on with those that are left: --workers-min, or `least`."""
        least = self._spec.workers_min or least
        return least is not None and len(self.names) >= least

    def too_late(self, registered: Collection[str]) -> LaunchError:
        missing = some(sorted(self.names - set(registered)))
        return LaunchError(
            f"of {plural(len(self.names), 'worker')}, these did not register within "
            f"{self._spec.timeout:g} s: {missing}. Allow more with --timeout, or start with fewer "
            f"by --workers-min"
        )
