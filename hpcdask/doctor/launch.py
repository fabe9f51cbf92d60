"""Launch as rank 0 saw it: its ranks and nodes, and findings on what is between the nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from hpcdask.bootstrap.ranks import Rank
from hpcdask.comm.transport import NodeLinks, choose
from hpcdask.errors import HpcdaskError
from hpcdask.logs import by_host, numbered, plural, some
from hpcdask.spec.specs import WorkerSpec

from . import proofs
from .nodes import Node, RankFacts, examine
from .proofs import Outcome
from .report import Finding, Report, Status, together

finding = partial(Finding, "between nodes")
#: Seconds by which clocks may differ. Credentials are valid from an hour before.
CLOCK_WARNING_S, CLOCK_ERROR_S = 2.0, 1800.0
#: Packages that must be the same on all nodes: they exchange pickles.
ALIKE = ("dask", "distributed", "hpcdask")


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
    _boots: dict[str, str] = field(default_factory=dict)

    def place(self, rank: int, host: str, boot: str) -> Arrival:
        """Note an arrival; nodes of one name differ by the ids of their boots."""
        name, number = host, 1
        while self._boots.setdefault(name, boot) != boot:
            number += 1
            name = f"{host} #{number}"
        self.arrivals[rank] = Arrival(name)
        return self.arrivals[rank]

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
    away = [arrival for arrival in launch.away() if arrival.facts]
    worst = max(away, key=lambda arrival: abs(arrival.ahead), default=None)
    if worst is None:
        return
    seconds = abs(worst.ahead)
    value = f"differ by at most {max(seconds, 0.001):.3f} s"
    if seconds > CLOCK_WARNING_S:
        status: Status = "error" if seconds > CLOCK_ERROR_S else "warning"
        advice = "The nodes' clocks are not set by one server: tell the site's staff"
        yield finding("clocks", status, f"{value} ({worst.host})", advice)
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
    if not seats:
        return
    try:
        choice = choose(WorkerSpec(), seats)
    except HpcdaskError as error:
        yield say("error", "auto fails", str(error))
        return
    yield say("ok", f"auto would choose {choice.protocol}: {choice.reason}")
    yield from (say("ok", f"and says: {warning}") for warning in choice.warnings)


def _differences(nodes: Sequence[Node]) -> Iterator[Finding]:
    """Yield a finding on each property that is not the same on all nodes that reported it."""
    names = sorted({name for node in nodes for name in _packages(node)})
    properties = [
        ((what, status), (value, node.name))
        for node in nodes
        for what, status, value in _properties(node, names)
    ]
    for (what, status), found in together(properties).items():
        hosts = together(found)
        usual = max(hosts.values(), key=len)
        if odd := [host for _, host in found if host not in usual]:
            values = "; ".join(f"{value} on {some(there)}" for value, there in hosts.items())
            advice = f"Make them alike, or leave out {some(odd)}"
            yield Finding("differences between nodes", what, status, values, advice)


def _packages(node: Node) -> Mapping[str, str]:
    return node.facts.software.packages if node.facts.software else {}


def _properties(node: Node, names: Iterable[str]) -> Iterator[tuple[str, Status, str]]:
    """Yield properties, and the packages of these names: what, severity of a difference, value."""
    facts, processes = node.facts, list(node.processes.values())
    if facts.software:
        yield "Python", "error", facts.software.python
        for name in names:
            yield (
                name,
                "error" if name in ALIKE else "warning",
                _packages(node).get(name, "missing"),
            )
    if facts.gpus:
        yield "driver", "warning", facts.gpus.driver or "none"
        yield "GPUs", "warning", _counted(gpu.name for gpu in node.gpus)
    if fabric := facts.fabric:
        yield "InfiniBand ports", "warning", _counted(port.state for port in fabric.infiniband)
        yield "UCX modules", "warning", " ".join(fabric.ucx.transports) or "none"
    if processes:
        yield "open files", "warning", str(min(one.open_files for one in processes))
        environ = sorted(processes[0].env.items())
        known = [f"{name}={value}" for name, value in environ if name.startswith(("UCX_", "DASK_"))]
        yield "settings", "warning", " ".join(known) or "none"


def _counted(things: Iterable[str]) -> str:
    counts = sorted(Counter(things).items())
    return ", ".join(f"{count} x {thing}" for thing, count in counts) or "none"
