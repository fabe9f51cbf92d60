"""Nodes: one set of facts, and one list of findings, from the reports of a node's ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from hpcdask.comm import fabric
from hpcdask.comm.fabric import Fabric
from hpcdask.errors import DeviceError
from hpcdask.node.placement import Inventory
from hpcdask.runner.plan import assign_devices
from hpcdask.spec.records import Record
from hpcdask.spec.specs import RunSpec

from . import configuration, gpus, host, links, proofs, software
from .gpus import GpuFacts, GpusFacts
from .host import FolderFacts, JobFacts, NameFacts, ProcessFacts
from .links import PortFacts
from .proofs import Outcome
from .report import Finding, together
from .software import MpiFacts, SoftwareFacts


@dataclass(frozen=True)
class RankFacts(Record):
    """Facts that one rank gathered; `problems` says by group why its facts are missing."""

    process: ProcessFacts | None = None
    software: SoftwareFacts | None = None
    mpi: MpiFacts | None = None
    gpus: GpusFacts | None = None
    stack: Outcome | None = None
    fabric: Fabric | None = None
    ports: PortFacts | None = None
    queue: JobFacts | None = None
    configuration: tuple[Finding, ...] = ()
    name: NameFacts | None = None
    shared_memory: FolderFacts | None = None
    scratch: FolderFacts | None = None
    problems: dict[str, str] = field(default_factory=dict)


class Group(NamedTuple):
    """Group of facts: reader, check of the facts and their node, and whether all ranks read it."""

    read: Callable[[], Any] | None
    check: Callable[[Any, Any], Iterable[Finding]] = lambda known, node: ()
    by_all: bool = False


GROUPS = {
    "process": Group(ProcessFacts.read, by_all=True),
    "software": Group(SoftwareFacts.read, software.check),
    "mpi": Group(MpiFacts.read, software.check_mpi),
    "gpus": Group(GpusFacts.read, gpus.check, by_all=True),
    "stack": Group(None, proofs.check_stack),  # proven after the others
    "fabric": Group(fabric.look, links.check, by_all=True),
    "ports": Group(PortFacts.read, links.check_range),
    "queue": Group(JobFacts.read, host.check_job),
    "configuration": Group(configuration.examine, lambda known, node: known),
    "name": Group(NameFacts.read, host.check_name),
    "shared_memory": Group(partial(FolderFacts.read, "/dev/shm"), host.check_shared_memory),
    "scratch": Group(host.read_scratch, host.check_scratch),
}
#: Advice where a group cannot be gathered.
ADVICE = {
    "software": "The packages lie on a file system that hangs, or are damaged: see pip check",
    "mpi": "See python -c 'from mpi4py import MPI'; mpirun over several nodes needs it",
    "gpus": "See whether nvidia-smi works on this node, and leave the node out if it does not",
    "fabric": "See whether nvidia-smi nvlink -s and ip addr work on this node",
    "queue": "The queueing system's commands hang on this node: see srun --version",
    "configuration": "A file of Dask's configuration hangs: see dask config list",
    "name": "The name service hangs: see getent hosts $(hostname)",
    "scratch": "See that its file system answers, or name another with --local-directory",
}
AGAIN = "Run hpcdask doctor again; if it stays, report it with this line"


@dataclass(frozen=True)
class Node:
    """Node and the reports of its ranks, in order; `all_workers` are those of the whole cluster."""

    name: str
    reports: Mapping[int, RankFacts]
    launcher: str = "none"
    all_workers: int = 1

    @property
    def facts(self) -> RankFacts:
        """Return the facts of the node, each group of the first rank that gathered it."""
        names = (one.name for one in dataclasses.fields(RankFacts))
        found: dict[str, Any] = {name: [*self._of(name).values(), None][0] for name in names}
        return RankFacts(**found)

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
    def seen(self) -> dict[int, tuple[GpuFacts, ...]]:
        """GPUs by rank, none of one that could not look."""
        known = self.reports.items()
        return {rank: report.gpus.gpus if report.gpus else () for rank, report in known}

    @property
    def gpus(self) -> tuple[GpuFacts, ...]:
        """GPUs that its ranks see, each once, by number."""
        every = {gpu.uuid: gpu for gpus in self.seen.values() for gpu in gpus}
        return tuple(sorted(every.values(), key=lambda gpu: (gpu.index, gpu.uuid)))

    @property
    def packages(self) -> Mapping[str, str]:
        """Versions by package."""
        return self.facts.software.packages if self.facts.software else {}

    @property
    def cores(self) -> set[int]:
        """Cores that its ranks may use."""
        return {core for one in self.processes.values() for core in one.cores}

    @property
    def workers(self) -> int:
        """Number of its workers: one for each rank, or for each GPU if started by hand."""
        return len(self.reports) if len(self.reports) > 1 else max(1, len(self.gpus))

    def assign(self) -> tuple[Mapping[int, Sequence[GpuFacts]], str]:
        """Return the GPUs of each rank's workers; those that it sees and an error if some lack."""
        if len(self.seen) == 1 or not self.gpus:
            return self.seen, ""
        views = [
            Inventory(rank, "this node", place, gpus, (), 0)
            for place, (rank, gpus) in enumerate(self.seen.items())
        ]
        try:
            given = assign_devices(views, RunSpec(device="cuda"), by_hand=False, job=None)
        except DeviceError as error:
            return self.seen, str(error)
        known = {gpu.uuid: gpu for gpu in self.gpus}
        return {rank: [known[gpu.uuid] for gpu in one if gpu] for rank, one in given.items()}, ""


def examine(node: Node) -> list[Finding]:
    """Return all findings of one node; those of its ranks have the ranks, unless all have them."""
    found: list[Finding] = []
    for name, group in GROUPS.items():
        if node.processes and (known := getattr(node.facts, name)):
            found += group.check(known, node)
    sources = ((one, rank) for rank, report in node.reports.items() for one in _own(report, node))
    for finding, ranks in together(sources).items():
        some_ranks = tuple(ranks) if len(ranks) < len(node.reports) else ()
        found.append(dataclasses.replace(finding, ranks=some_ranks))
    return found


def _own(report: RankFacts, node: Node) -> Iterator[Finding]:
    """Yield findings on a rank's own limits and settings, and on what it could not look at."""
    if report.process:
        yield from host.check_process(report.process, node)
        yield from links.check_settings(report.process, node)
    for group, problem in report.problems.items():
        topic, advice = group.replace("_", " "), ADVICE.get(group, AGAIN)
        yield Finding("could not be looked at", topic, "error", problem, advice)
