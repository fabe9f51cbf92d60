"""Findings on a launch, as rank 0 heard of it, and on the network between its nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hpcdask.bootstrap.ranks import Rank
from hpcdask.comm.transport import NodeLinks, choose
from hpcdask.errors import HpcdaskError
from hpcdask.logs import by_host, numbered, plural, some
from hpcdask.security.ports import current
from hpcdask.spec.specs import WorkerSpec

from . import ports
from .findings import Finding, Reporter
from .nccl import Measured
from .nodes import Node, RankFacts

say, of_network = Reporter("between nodes"), Reporter("network")
#: Seconds by which clocks may differ. Credentials are valid from an hour before.
CLOCK_WARNING_S, CLOCK_ERROR_S = 2.0, 1800.0


@dataclass(frozen=True)
class Route:
    """Way of a rank to rank 0: the address that answered, and by address why others did not."""

    address: str
    failed: dict[str, str]


@dataclass
class Launch:
    """Reports to rank 0, by rank, and where it listened, as the scheduler would.

    `hosts` has the name of each rank's node. `clocks` has for each reading how long a rank's answer
    took and how far its clock was ahead, in seconds. `reached` says by node which others it did not
    reach in the range of ports, and why. All ranks had to arrive within `timeout` seconds.
    """

    rank: Rank
    timeout: float
    address: str = ""
    hosts: dict[int, str] = field(default_factory=dict)
    reports: dict[int, RankFacts] = field(default_factory=dict)
    routes: dict[int, Route] = field(default_factory=dict)
    clocks: dict[int, list[tuple[float, float]]] = field(default_factory=dict)
    reached: dict[str, dict[str, str]] = field(default_factory=dict)
    nccl: Measured | None = None
    _boots: dict[str, str] = field(default_factory=dict)

    def place(self, rank: int, host: str, boot: str) -> None:
        """Note the node of a rank; nodes of one name differ by the ids of their boots."""
        name, number = host, 1
        while self._boots.setdefault(name, boot) != boot:
            number += 1
            name = f"{host} #{number}"
        self.hosts[rank] = name

    def one_of_each(self) -> dict[str, int]:
        """Return the first rank of each node, by node."""
        return {host: rank for rank, host in sorted(self.hosts.items(), reverse=True)}


def check(launch: Launch) -> list[Finding]:
    """Return findings on what was seen between the ranks."""
    in_range = ports.check_reached(launch.reached, current() or "")
    return [*_present(launch), *_routes(launch), *in_range, *_clocks(launch)]


def _present(launch: Launch) -> Iterator[Finding]:
    size = launch.rank.size
    missing = sorted(set(range(size)) - set(launch.hosts))
    silent = sorted(set(launch.hosts) - set(launch.reports))
    there = by_host(launch.hosts.values())
    if missing:
        yield say.error(
            "ranks",
            f"{numbered('rank', missing)} of {size} did not arrive within {launch.timeout:g} s "
            f"(there are {there})",
            f"See what they printed, and whether they reach {launch.rank.host} at "
            f"{launch.address}; allow more with --timeout",
        )
    if silent:
        where = some(launch.hosts[rank] for rank in silent)
        yield say.error(
            "ranks",
            f"{numbered('rank', silent)} on {where} ended, or hung, before reporting",
            "See what was printed there, and whether the nodes are sound",
        )
    if not missing and not silent:
        yield say.ok("ranks", f"{size}: {there}")


def _routes(launch: Launch) -> Iterator[Finding]:
    """Yield findings on whether other nodes reach the port that the scheduler would have."""
    home, topic = launch.hosts[0], "scheduler's port"
    away = {rank: route for rank, route in launch.routes.items() if launch.hosts[rank] != home}
    failed = {launch.hosts[rank]: route for rank, route in away.items() if route.failed}
    for host, route in failed.items():
        tried = ", ".join(f"{address}: {why}" for address, why in route.failed.items())
        yield say.error(
            topic,
            f"{host} cannot reach {home} at {launch.address} ({tried}), but at {route.address}",
            "Let the cluster use the network that works: name its interface with --interface",
        )
    if away and not failed:
        nodes = plural(len({launch.hosts[rank] for rank in away}), "other node")
        yield say.ok(topic, f"{launch.address} on {home} reached from {nodes}")


def _clocks(launch: Launch) -> Iterator[Finding]:
    """Yield a finding on other nodes' clocks, known to half the time an answer takes."""
    ahead: dict[str, float] = {}
    for rank, readings in launch.clocks.items():
        if launch.hosts[rank] != launch.hosts[0]:
            took, difference = min(readings)
            ahead.setdefault(launch.hosts[rank], difference + took / 2)
    if not ahead:
        return
    worst = max(ahead, key=lambda host: abs(ahead[host]))
    seconds = abs(ahead[worst])
    value = f"differ by at most {max(seconds, 0.001):.3f} s"
    advice = "The nodes' clocks are not set by one server: tell the site's staff"
    if seconds > CLOCK_WARNING_S:
        make = say.error if seconds > CLOCK_ERROR_S else say.warning
        yield make("clocks", f"{value} ({worst})", advice)
    else:
        yield say.ok("clocks", value)


def check_transport(nodes: Sequence[Node]) -> list[Finding]:
    """Return what ``--protocol auto`` would choose for these nodes, and why."""
    topic = "protocol"
    seats = [
        NodeLinks(node.name, tuple(gpus), node.fabrics[rank])
        for node in nodes
        for rank, gpus in node.assigned().items()
        if rank in node.fabrics
    ]
    if not seats:
        return []
    try:
        choice = choose(WorkerSpec(), seats)
    except HpcdaskError as error:
        return [of_network.error(topic, "auto fails", str(error))]
    chosen = f"auto would choose {choice.protocol}: {choice.reason}"
    values = [chosen, *(f"and says: {warning}" for warning in choice.warnings)]
    return [of_network.ok(topic, value) for value in values]
