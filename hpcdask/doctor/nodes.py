"""Nodes: one set of facts, and one list of findings, from the reports of a node's ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hpcdask.comm import fabric
from hpcdask.comm.fabric import Fabric
from hpcdask.errors import DeviceError
from hpcdask.gpu.devices import Gpu
from hpcdask.gpu.driver import extra_for
from hpcdask.node.placement import Inventory
from hpcdask.runner.plan import assign_devices
from hpcdask.spec.records import Record
from hpcdask.spec.specs import RunSpec

from . import gpus, links, node, queue, software, stack
from .configuration import ConfigurationFacts
from .findings import Finding, Reporter
from .gpus import GpuFacts, GpusFacts
from .links import PortFacts
from .node import FolderFacts, NameFacts, ProcessFacts, check_process
from .queue import QueueFacts
from .software import MpiFacts, SoftwareFacts
from .stack import Told


@dataclass(frozen=True)
class RankFacts(Record):
    """Facts that one rank gathered; `problems` says by group why its facts are missing."""

    process: ProcessFacts | None = None
    software: SoftwareFacts | None = None
    mpi: MpiFacts | None = None
    gpus: GpusFacts | None = None
    stack: Told | None = None
    fabric: Fabric | None = None
    ports: PortFacts | None = None
    queue: QueueFacts | None = None
    configuration: ConfigurationFacts | None = None
    name: NameFacts | None = None
    shared_memory: FolderFacts | None = None
    scratch: FolderFacts | None = None
    problems: dict[str, str] = field(default_factory=dict)


class Group(NamedTuple):
    """Group of facts: its reader, and its check of the facts and their node.

    One rank of each node reads the group, or all of them.
    """

    read: Callable[[], Record | None]
    check: Callable[[Any, Any], Iterable[Finding]] = lambda known, node: ()
    by_all: bool = False


GROUPS = {
    "process": Group(ProcessFacts.read, by_all=True),
    "software": Group(SoftwareFacts.read, software.check),
    "mpi": Group(MpiFacts.read, software.check_mpi),
    "gpus": Group(GpusFacts.read, gpus.check, by_all=True),
    "fabric": Group(fabric.look, links.check, by_all=True),
    "ports": Group(PortFacts.read, links.check_range),
    "queue": Group(QueueFacts.read, queue.check),
    "configuration": Group(ConfigurationFacts.read, lambda known, node: known.findings),
    "name": Group(NameFacts.read, node.check_name),
    "shared_memory": Group(node.read_shared_memory, node.check_shared_memory),
    "scratch": Group(node.read_scratch, node.check_scratch),
}
#: Advice where a group cannot be gathered.
ADVICE = {
    "software": "The packages lie on a file system that hangs, or are damaged: see pip check",
    "mpi": "See python -c 'from mpi4py import MPI'; mpirun over several nodes needs it",
    "gpus": "See whether nvidia-smi works on this node, and leave the node out if it does not",
    "fabric": "See whether nvidia-smi nvlink -s and ip addr work on this node",
    "queue": "The queueing system's commands hang on this node: see srun --version",
    "configuration": "A folder or command that Dask's configuration names hangs: see its files",
    "name": "The name service hangs: see getent hosts $(hostname)",
    "scratch": "See that its file system answers, or name another with --local-directory",
}
AGAIN = "Run hpcdask doctor again; if it stays, report it with this line"


@dataclass(frozen=True)
class Node:
    """Node and the reports of its ranks, in order.

    `facts` has each group of the first rank that gathered it. `all_workers` are those of the whole
    cluster.
    """

    name: str
    reports: Mapping[int, RankFacts]
    launcher: str = "none"
    all_workers: int = 1

    @property
    def ranks(self) -> tuple[int, ...]:
        """Its ranks."""
        return tuple(self.reports)

    @property
    def facts(self) -> RankFacts:
        """Return the facts of the node, each group from one rank."""
        groups = (one.name for one in dataclasses.fields(RankFacts))
        return RankFacts(
            **{group: next(iter(known.values())) for group in groups if (known := self._of(group))}
        )

    def _of(self, group: str) -> dict[int, Any]:
        found = {rank: getattr(report, group) for rank, report in self.reports.items()}
        return {rank: facts for rank, facts in found.items() if facts}

    @property
    def processes(self) -> dict[int, ProcessFacts]:
        """Limits by rank."""
        return self._of("process")

    @property
    def fabrics(self) -> dict[int, Fabric]:
        """Links by rank."""
        return self._of("fabric")

    @property
    def gpus(self) -> tuple[GpuFacts, ...]:
        """GPUs that its ranks see, each once, by number."""
        every = {gpu.uuid: gpu for known in self._of("gpus").values() for gpu in known.gpus}
        return tuple(sorted(every.values(), key=lambda gpu: (gpu.index, gpu.uuid)))

    @property
    def cores(self) -> set[int]:
        """Cores that its ranks may use."""
        return {core for one in self.processes.values() for core in one.cores}

    @property
    def workers(self) -> int:
        """Number of its workers: one for each rank, or for each GPU if started by hand."""
        ranks = len(self.processes) or len(self.ranks)
        return ranks if ranks > 1 else max(1, len(self.gpus))

    @property
    def cuda(self) -> int:
        """CUDA version whose packages fit the node."""
        packages = self.facts.software.packages if self.facts.software else {}
        return int(extra_for(software.newest_cuda(self)[0], packages).removeprefix("cuda"))

    def seen(self, rank: int) -> tuple[GpuFacts, ...]:
        """Return the GPUs that a rank sees."""
        known = self.reports[rank].gpus
        return known.gpus if known else ()

    def assign(self) -> dict[int, list[Gpu]]:
        """Return the GPUs of each rank's workers. Raises DeviceError if some get none."""
        if len(self.ranks) == 1 or not self.gpus:
            return self._seen_by_all()
        views = [
            Inventory(rank, "this node", place, self.seen(rank), (), 0)
            for place, rank in enumerate(self.ranks)
        ]
        given = assign_devices(views, RunSpec(device="cuda"), by_hand=False, job=None)
        return {rank: [gpu for gpu in group if gpu] for rank, group in given.items()}

    def assigned(self) -> dict[int, list[Gpu]]:
        """Return what `assign` does, or where that fails the GPUs that each rank sees."""
        try:
            return self.assign()
        except DeviceError:
            return self._seen_by_all()

    def _seen_by_all(self) -> dict[int, list[Gpu]]:
        return {rank: list(self.seen(rank)) for rank in self.ranks}


def assemble(
    reports: Mapping[int, RankFacts], hosts: Mapping[int, str], launcher: str = "none"
) -> list[Node]:
    """Put the ranks' facts together, node by node; reports and hosts are by rank."""
    places: dict[str, dict[int, RankFacts]] = {}
    for rank in sorted(reports):
        places.setdefault(hosts[rank], {})[rank] = reports[rank]
    found = [Node(host, ranks, launcher) for host, ranks in places.items()]
    workers = sum(one.workers for one in found)
    return [dataclasses.replace(one, all_workers=workers) for one in found]


def examine(node: Node) -> list[Finding]:
    """Return all findings of one node."""
    found = list(_problems(node))
    if not node.processes:
        return found
    for name, group in GROUPS.items():
        if known := getattr(node.facts, name):
            found += group.check(known, node)
        if name == "gpus" and node.facts.stack:
            found += stack.check(node.facts.stack, node)
    found += queue.check_ranks(node)
    of_ranks: dict[Finding, list[int]] = {}
    for rank, process in node.processes.items():
        for finding in (*check_process(process, node), *links.check_settings(process, node)):
            of_ranks.setdefault(finding, []).append(rank)
    for finding, ranks in of_ranks.items():
        of_some = len(ranks) < len(node.processes)
        found.append(dataclasses.replace(finding, ranks=tuple(ranks) if of_some else ()))
    return found


def _problems(node: Node) -> Iterator[Finding]:
    """Yield a finding on each group that could not be gathered."""
    found: dict[tuple[str, str], list[int]] = {}
    for rank, report in node.reports.items():
        for problem in report.problems.items():
            found.setdefault(problem, []).append(rank)
    say = Reporter("could not be looked at")
    for (name, text), ranks in found.items():
        finding = say.error(name.replace("_", " "), text, ADVICE.get(name, AGAIN))
        of_some = GROUPS[name].by_all and tuple(ranks) != node.ranks
        yield dataclasses.replace(finding, ranks=tuple(ranks) if of_some else ())
