"""From what the ranks reported to one set of facts, and one list of findings, for each node."""

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
from hpcdask.runner.plan import assign_gpus
from hpcdask.spec.records import Record

from . import configuration, gpus, links, node, ports, process, queue, software, stack
from .configuration import ConfigurationFacts
from .findings import Finding, Reporter
from .gpu_facts import GpuFacts, GpusFacts
from .node import FolderFacts, NameFacts
from .ports import PortFacts
from .process import ProcessFacts
from .queue import QueueFacts
from .software import MpiFacts, SoftwareFacts
from .stack import Told


@dataclass(frozen=True)
class RankFacts(Record):
    """Facts that one rank gathered; `problems` says by group why its facts are missing.

    `boot` is the id of the system that its node runs since it was started.
    """

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
    boot: str = ""


class Group(NamedTuple):
    """Group of facts: how it is gathered, and the check, which is given the facts and their node.

    One rank of each node gathers it, or all of them.
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
    "ports": Group(PortFacts.read, ports.check),
    "queue": Group(QueueFacts.read, queue.check),
    "configuration": Group(ConfigurationFacts.read, configuration.check),
    "name": Group(NameFacts.read, node.check_name),
    "shared_memory": Group(node.read_shared_memory, node.check_shared_memory),
    "scratch": Group(node.read_scratch, node.check_scratch),
}
#: What to do where a group cannot be gathered.
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

    `facts` has each group of the first rank that gathered it. Two nodes of one name have their
    first rank in `name`. `all_workers` are those of the whole cluster.
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
        """What is known of the node, from one rank each."""
        groups = [one.name for one in dataclasses.fields(RankFacts)]
        known = {group: list(self._of(group).values()) for group in groups}
        return RankFacts(**{group: values[0] for group, values in known.items() if values})

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
            return {rank: list(self.seen(rank)) for rank in self.ranks}
        views = [
            Inventory(rank, "this node", place, self.seen(rank), (), 0)
            for place, rank in enumerate(self.ranks)
        ]
        given = assign_gpus(views, device="cuda", oversubscribe=False, job=None)
        return {rank: [gpu for gpu in group if gpu] for rank, group in given.items()}

    def assigned(self) -> dict[int, list[Gpu]]:
        """Return the same; where that is an error, the GPUs that each rank sees."""
        try:
            return self.assign()
        except DeviceError:
            return {rank: list(self.seen(rank)) for rank in self.ranks}


def assemble(
    reports: Mapping[int, RankFacts], hosts: Mapping[int, str], launcher: str = "none"
) -> list[Node]:
    """Put the ranks' facts together, node by node; reports and hosts are by rank."""
    places: dict[tuple[str, str], dict[int, RankFacts]] = {}
    for rank in sorted(reports):
        places.setdefault((hosts[rank], reports[rank].boot), {})[rank] = reports[rank]
    count = [host for host, _ in places]
    names = [
        host if count.count(host) == 1 else f"{host} (rank {min(ranks)})"
        for (host, _), ranks in places.items()
    ]
    found = [
        Node(name, ranks, launcher) for name, ranks in zip(names, places.values(), strict=True)
    ]
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
    return found + merge_ranks(
        {
            rank: [*process.check(known, node), *links.check_settings(known, node)]
            for rank, known in node.processes.items()
        }
    )


def merge_ranks(found: Mapping[int, list[Finding]]) -> list[Finding]:
    """Merge the findings of a node's ranks: common ones once, the rest with their ranks."""
    merged: dict[Finding, list[int]] = {}
    for rank, findings in sorted(found.items()):
        for finding in findings:
            merged.setdefault(finding, []).append(rank)
    return [
        finding if len(ranks) == len(found) else dataclasses.replace(finding, ranks=tuple(ranks))
        for finding, ranks in merged.items()
    ]


def _problems(node: Node) -> Iterator[Finding]:
    by_text: dict[tuple[str, str], list[int]] = {}
    for rank, report in node.reports.items():
        for name, text in report.problems.items():
            by_text.setdefault((name, text), []).append(rank)
    for (name, text), ranks in by_text.items():
        some = GROUPS[name].by_all and tuple(ranks) != node.ranks
        topic = name.replace("_", " ")
        found = Reporter("could not be looked at").error(topic, text, ADVICE.get(name, AGAIN))
        yield dataclasses.replace(found, ranks=tuple(ranks) if some else ())
