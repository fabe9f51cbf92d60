"""From what the ranks reported to one set of facts, and one list of findings, for each node."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from . import gpus, links, node, nvml, process, queue, software, stack
from .findings import Facts, Finding, Reporter, merge_ranks

Reader = Callable[[], Facts]
#: Gathered by every rank.
OF_RANKS: dict[str, Reader] = {
    "process": process.read,
    "gpus": nvml.read,
    "fabric": links.read,
}
#: Gathered by one rank of each node.
OF_NODES: dict[str, Reader] = {
    "software": software.read,
    "mpi": software.read_mpi,
    "name": node.read_name,
    "shared memory": node.read_shared_memory,
    "scratch": node.read_scratch,
    "queue": queue.read,
}
#: What to do where a group cannot be gathered.
ADVICE = {
    "process": "Run hpcdask doctor again; if it stays, report it with this line",
    "gpus": "See whether nvidia-smi works on this node, and leave the node out if it does not",
    "software": "The packages lie on a file system that hangs, or are damaged: see pip check",
    "mpi": "See python -c 'from mpi4py import MPI'; mpirun over several nodes needs it",
    "fabric": "See whether nvidia-smi nvlink -s and ip addr work on this node",
    "name": "The name service hangs: see getent hosts $(hostname)",
    "shared memory": "See ls /dev/shm; in a container, mount the host's (docker run --ipc=host)",
    "scratch": "The folder's file system hangs: name another with TMPDIR or --local-directory",
    "queue": "The queueing system's commands hang on this node: see srun --version",
}


@dataclass
class Node:
    """One node and what its ranks reported; `ranks` are in order.

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
        for group, by_rank in parts.items():
            if group == "process":
                built.facts[group] = list(by_rank.values())
            elif group == "gpus":
                built.facts[group] = _join(by_rank, ranks)
            else:
                built.facts[group] = next(iter(by_rank.values()))
        built.facts["fabrics"] = parts.get("fabric", {})
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
    """How many workers a node would have."""
    return process.local_workers(built.facts) if "process" in built.facts else len(built.ranks)


def examine(built: Node, *, launcher: str, workers: int) -> list[Finding]:
    """All findings of one node; `workers` is how many the whole cluster would have."""
    facts = built.facts
    found = list(_problems(built))
    checks: dict[str, list[Callable[[Facts], list[Finding]]]] = {
        "software": [software.check],
        "mpi": [lambda facts: software.check_mpi(facts, launcher)],
        "gpus": [gpus.check],
        "stack": [stack.check],
        "fabric": [links.check],
        "queue": [queue.check],
        "name": [node.check_name],
        "shared memory": [node.check_shared_memory],
        "scratch": [node.check_scratch],
    }
    if "process" in facts:
        for group, group_checks in checks.items():
            if group in facts:
                for check in group_checks:
                    found += check(facts)
        if "gpus" in facts:
            found += queue.check_ranks(facts, built.ranks)
        there = [rank for rank in built.ranks if (rank, "process") not in built.problems]
        own = zip(there, facts["process"], strict=True)
        found += merge_ranks(
            {
                rank: [
                    *process.check(known, facts, workers),
                    *links.check_settings(known, facts),
                ]
                for rank, known in own
            }
        )
    return found


def _problems(built: Node) -> Iterator[Finding]:
    by_text: dict[tuple[str, str], list[int]] = {}
    for (rank, group), text in built.problems.items():
        by_text.setdefault((group, text), []).append(rank)
    for (group, text), ranks in by_text.items():
        some = group in OF_RANKS and tuple(ranks) != built.ranks
        found = Reporter("could not be looked at").error(group, text, ADVICE[group])
        yield replace(found, ranks=tuple(ranks) if some else ())
