"""Launch as rank 0 saw it: its ranks and nodes, and findings on what is between the nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

from hpcdask.bootstrap.ranks import Rank
from hpcdask.comm.transport import NodeLinks, choose
from hpcdask.logs import by_host, numbered, plural, some
from hpcdask.spec.specs import WorkerSpec

from . import proofs
from .nodes import Node, RankFacts, examine
from .proofs import Outcome
from .report import Finding, Report, Status, together

finding = partial(Finding, "between nodes")
#: Seconds by which clocks may differ. Credentials are valid from an hour before.
CLOCK_WARNING_S, CLOCK_ERROR_S = 2.0, 1800.0
#: What must be the same on all nodes: they exchange pickles.
ALIKE = ("Python", "dask", "distributed", "hpcdask")


@dataclass
class Arrival:
    """Rank that reached rank 0, with the name of its node, its way, and its report.

    `address` of rank 0 answered; other addresses `failed`, with these errors. The rank's clock was
    `ahead` by these seconds when it reported.
    """

    host: str
    address: str = ""
    failed: dict[str, str] = field(default_factory=dict)
    facts: RankFacts | None = None
    ahead: float = 0.0


@dataclass
class Launch:
    """Arrivals at rank 0, by rank, and its address, as the scheduler's would be.

    All ranks had to arrive within `timeout` seconds. `nccl` has each GPU's outcome.
    """

    rank: Rank
    timeout: float
    address: str = ""
    arrivals: dict[int, Arrival] = field(default_factory=dict)
    nccl: list[tuple[str, Outcome]] | None = None
    boots: dict[str, str] = field(default_factory=dict)

    def place(self, rank: int, host: str, boot: str, **more: Any) -> None:
        """Note an arrival; nodes of one name differ by the ids of their boots."""
        name, number = host, 1
        while self.boots.setdefault(name, boot) != boot:
            number += 1
            name = f"{host} #{number}"
        self.arrivals[rank] = Arrival(name, **more)

    def away(self) -> list[Arrival]:
        """Return the ranks of other nodes than rank 0's."""
        return [one for one in self.arrivals.values() if one.host != self.arrivals[0].host]

    def nodes(self) -> list[Node]:
        """Put the ranks' facts together, node by node."""
        places: dict[str, dict[int, RankFacts]] = {}
        for rank, arrival in sorted(self.arrivals.items()):
            if arrival.facts:
                places.setdefault(arrival.host, {})[rank] = arrival.facts
        found = [Node(host, ranks, self.rank.launcher) for host, ranks in places.items()]
        workers = sum(node.workers for node in found)
        return [replace(node, all_workers=workers) for node in found]

    def report(self) -> Report:
        """Return the findings on the nodes, and on what is between them."""
        nodes = self.nodes()
        between = [*_transport(nodes), *proofs.check_nccl(self.nccl)]
        if self.rank.size > 1:
            between = [*_present(self), *_ways(self), *_clocks(self), *between]
        examined = [(node, examine(node)) for node in nodes]
        return Report(examined, [*between, *_differences(nodes)], self.rank.size)


def _present(launch: Launch) -> Iterator[Finding]:
    size, arrivals = launch.rank.size, launch.arrivals
    there = by_host(arrival.host for arrival in arrivals.values())
    silent = {rank: arrival.host for rank, arrival in arrivals.items() if not arrival.facts}
    if missing := set(range(size)) - set(arrivals):
        value = f"{numbered('rank', missing)} of {size} did not arrive within {launch.timeout:g} s"
        advice = f"See what they printed, and whether they reach {launch.rank.host} at "
        advice += f"{launch.address}; allow more with --timeout"
        yield finding("ranks", "error", f"{value} (there are {there})", advice)
    if silent:
        where = f"{numbered('rank', silent)} on {some(silent.values())}"
        advice = "See what was printed, and whether the nodes are sound"
        yield finding("ranks", "error", f"{where} ended, or hung, before reporting", advice)
    if not missing and not silent:
        yield finding("ranks", "ok", f"{size}: {there}")


def _ways(launch: Launch) -> Iterator[Finding]:
    """Yield findings on whether other nodes reach the port that the scheduler would have."""
    topic, home, away = "scheduler's port", launch.arrivals[0].host, launch.away()
    failed = {arrival.host: arrival for arrival in away if arrival.failed}
    for host, way in failed.items():
        tried = ", ".join(f"{address}: {why}" for address, why in way.failed.items())
        value = f"{host} cannot reach {home} at {launch.address} ({tried}), but at {way.address}"
        advice = "Let the cluster use the network that works: name its interface with --interface"
        yield finding(topic, "error", value, advice)
    if away and not failed:
        nodes = plural(len({arrival.host for arrival in away}), "other node")
        yield finding(topic, "ok", f"{launch.address} on {home} reached from {nodes}")


def _clocks(launch: Launch) -> Iterator[Finding]:
    """Yield a finding on other nodes' clocks, known to the time that a message takes."""
    away = [(abs(one.ahead), one.host) for one in launch.away() if one.facts]
    if not away:
        return
    seconds, host = max(away)
    value = f"differ by at most {max(seconds, 0.001):.3f} s"
    if seconds > CLOCK_WARNING_S:
        status: Status = "error" if seconds > CLOCK_ERROR_S else "warning"
        advice = "The nodes' clocks are not set by one server: tell the site's staff"
        yield finding("clocks", status, f"{value} ({host})", advice)
    else:
        yield finding("clocks", "ok", value)


def _transport(nodes: Sequence[Node]) -> Iterator[Finding]:
    """Yield the choice of ``--protocol auto`` for these nodes, and its reason."""
    say = partial(Finding, "network", "protocol")
    seats = [
        NodeLinks(node.name, tuple(gpus), node.fabrics[rank])
        for node in nodes
        for rank, gpus in node.assign()[0].items()
        if rank in node.fabrics
    ]
    if seats:
        choice = choose(WorkerSpec(), seats)
        yield say("ok", f"auto would choose {choice.protocol}: {choice.reason}")
        yield from (say("ok", f"and says: {warning}") for warning in choice.warnings)


def _differences(nodes: Sequence[Node]) -> Iterator[Finding]:
    """Yield a finding on each property that is not the same on all nodes that reported it."""
    names = sorted({name for node in nodes for name in node.packages})
    found = {node.name: _properties(node, names) for node in nodes}
    for what in dict.fromkeys(chain.from_iterable(found.values())):
        known = [(of[what], host) for host, of in found.items() if what in of]
        hosts = together(known)
        usual = max(hosts.values(), key=len)
        if odd := [host for _, host in known if host not in usual]:
            status: Status = "error" if what in ALIKE else "warning"
            values = "; ".join(f"{value} on {some(there)}" for value, there in hosts.items())
            advice = f"Make them alike, or leave out {some(odd)}"
            yield Finding("differences between nodes", what, status, values, advice)


def _properties(node: Node, packages: Collection[str]) -> dict[str, str]:
    """Return the known properties of a node that should be the same on others, by their names."""
    facts, processes, found = node.facts, list(node.processes.values()), {}
    if facts.software:
        found["Python"] = facts.software.python
        found |= {name: node.packages.get(name, "missing") for name in packages}
    if facts.gpus:
        found["driver"] = facts.gpus.driver or "none"
        found["GPUs"] = _counted(gpu.name for gpu in node.gpus)
    if fabric := facts.fabric:
        found["InfiniBand ports"] = _counted(port.state for port in fabric.infiniband)
        found["UCX modules"] = " ".join(fabric.ucx.transports) or "none"
    if processes:
        found["open files"] = str(min(one.open_files for one in processes))
        environ = sorted(processes[0].env.items())
        known = [f"{name}={value}" for name, value in environ if name.startswith(("UCX_", "DASK_"))]
        found["settings"] = " ".join(known) or "none"
    return found


def _counted(things: Iterable[str]) -> str:
    counts = sorted(Counter(things).items())
    return ", ".join(f"{count} x {thing}" for thing, count in counts) or "none"
