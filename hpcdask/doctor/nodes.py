"""From what the ranks reported to one set of facts, and one list of findings, for each node."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from . import configuration, gpus, links, node, nvml, ports, process, queue, software, stack
from .findings import Facts, Finding, Reporter, merge_ranks


class Group(NamedTuple):
    """Group of facts: how it is gathered, and what to do where it cannot be.

    One rank of each node gathers it, or all of them. `check` is given the facts of one node.
    """

    read: Callable[[], Facts]
    advice: str
    check: Callable[[Facts], Iterable[Finding]] = lambda facts: ()
    by_all: bool = False


GROUPS = {
    "process": Group(
        process.read, "Run hpcdask doctor again; if it stays, report it with this line", by_all=True
    ),
    "software": Group(
        software.read,
        "The packages lie on a file system that hangs, or are damaged: see pip check",
        software.check,
    ),
    "mpi": Group(
        software.read_mpi,
        "See python -c 'from mpi4py import MPI'; mpirun over several nodes needs it",
        software.check_mpi,
    ),
    "gpus": Group(
        nvml.read,
        "See whether nvidia-smi works on this node, and leave the node out if it does not",
        lambda facts: (*gpus.check(facts), *stack.check(facts)),
        by_all=True,
    ),
    "fabric": Group(
        links.read,
        "See whether nvidia-smi nvlink -s and ip addr work on this node",
        links.check,
        by_all=True,
    ),
    "ports": Group(ports.read, "See whether this node lets you listen: ss -tln"),
    "queue": Group(
        queue.read,
        "The queueing system's commands hang on this node: see srun --version",
        queue.check,
    ),
    "configuration": Group(
        configuration.read,
        "A folder or command that Dask's configuration names hangs: see its files, and df",
        configuration.check,
    ),
    "name": Group(
        node.read_name, "The name service hangs: see getent hosts $(hostname)", node.check_name
    ),
    "shared memory": Group(
        node.read_shared_memory,
        "See ls /dev/shm; in a container, mount the host's (docker run --ipc=host)",
        node.check_shared_memory,
    ),
    "scratch": Group(
        node.read_scratch,
        "See that its file system answers, or name another with TMPDIR or --local-directory",
        node.check_scratch,
    ),
}


@dataclass
class Node:
    """Node and the reports of its ranks; `ranks` are in order.

    `facts` is by group: ``process`` is a list with one entry per rank, ``gpus`` has the GPUs of all
    ranks and in ``seen`` the UUIDs that each rank sees, ``fabrics`` has the links by rank; the
    others come from one rank. `problems` says by rank and group why facts are missing.
    """

    host: str
    ranks: tuple[int, ...]
    facts: Facts = field(default_factory=dict)
    problems: dict[tuple[int, str], str] = field(default_factory=dict)


def assemble(reports: Mapping[int, Facts], hosts: Mapping[int, str]) -> list[Node]:
    """Put the ranks' facts together, node by node; reports and hosts are by rank."""
    nodes = []
    for host in dict.fromkeys(hosts[rank] for rank in sorted(reports)):
        ranks = tuple(rank for rank in sorted(reports) if hosts[rank] == host)
        built = Node(host, ranks)
        parts: dict[str, dict[int, Facts]] = {}
        for rank in ranks:
            for group, facts in reports[rank].items():
                if "problem" in facts:
                    built.problems[rank, group] = facts["problem"]
                else:
                    parts.setdefault(group, {})[rank] = facts
        built.facts = {group: next(iter(by_rank.values())) for group, by_rank in parts.items()}
        built.facts["fabrics"] = parts.get("fabric", {})
        if "process" in parts:
            built.facts["process"] = list(parts["process"].values())
        if "gpus" in parts:
            built.facts["gpus"] = _join(parts["gpus"], ranks)
        nodes.append(built)
    return nodes


def _join(by_rank: Mapping[int, Facts], ranks: tuple[int, ...]) -> Facts:
    """The GPUs that the ranks of a node see, each once."""
    joined = dict(next(iter(by_rank.values())))
    every = {gpu["uuid"]: gpu for facts in by_rank.values() for gpu in facts["gpus"]}
    joined["gpus"] = sorted(every.values(), key=lambda gpu: (gpu["index"], gpu["uuid"]))
    joined["seen"] = [
        [gpu["uuid"] for gpu in by_rank[rank]["gpus"]] if rank in by_rank else [] for rank in ranks
    ]
    return joined


def workers(built: Node) -> int:
    """Return how many workers a node would have."""
    return process.local_workers(built.facts) if "process" in built.facts else len(built.ranks)


def examine(built: Node, *, launcher: str, workers: int) -> list[Finding]:
    """All findings of one node; `workers` is how many the whole cluster would have."""
    facts = {**built.facts, "launcher": launcher}
    found = list(_problems(built))
    if "process" not in facts:
        return found
    for name, group in GROUPS.items():
        if name in facts:
            found += group.check(facts)
    found += ports.check(facts, process.local_workers(facts))
    if "gpus" in facts:
        found += queue.check_ranks(facts, built.ranks)
    there = [rank for rank in built.ranks if (rank, "process") not in built.problems]
    of_ranks = {
        rank: [*process.check(known, facts, workers), *links.check_settings(known, facts)]
        for rank, known in zip(there, facts["process"], strict=True)
    }
    return found + merge_ranks(of_ranks)


def _problems(built: Node) -> Iterator[Finding]:
    by_text: dict[tuple[str, str], list[int]] = {}
    for (rank, name), text in built.problems.items():
        by_text.setdefault((name, text), []).append(rank)
    for (name, text), ranks in by_text.items():
        some = GROUPS[name].by_all and tuple(ranks) != built.ranks
        found = Reporter("could not be looked at").error(name, text, GROUPS[name].advice)
        yield replace(found, ranks=tuple(ranks) if some else ())
