"""Launch as rank 0 saw it: findings on its ranks, and on the network between its nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hpcdask.bootstrap.ranks import Rank
from hpcdask.comm.transport import NodeLinks, choose
from hpcdask.errors import HpcdaskError
from hpcdask.logs import by_host, numbered, plural, some
from hpcdask.spec.specs import WorkerSpec

from .findings import Finding, Reporter
from .nccl import Measured
from .nodes import Node, RankFacts

say, of_network = Reporter("between nodes"), Reporter("network")
#: Seconds by which clocks may differ. Credentials are valid from an hour before.
CLOCK_WARNING_S, CLOCK_ERROR_S = 2.0, 1800.0


@dataclass(frozen=True)
class Route:
    """Way of a rank to rank 0: the address that answered, and the errors of other addresses."""

    address: str
    failed: dict[str, str]


@dataclass
class Launch:
    """Reports to rank 0, by rank, and its address, as the scheduler's would be.

    `hosts` has the name of each rank's node, `ahead` the seconds by which a rank's clock was ahead
    when it reported. All ranks had to arrive within `timeout` seconds.
    """

    rank: Rank
    timeout: float
    address: str = ""
    hosts: dict[int, str] = field(default_factory=dict)
    reports: dict[int, RankFacts] = field(default_factory=dict)
    routes: dict[int, Route] = field(default_factory=dict)
    ahead: dict[int, float] = field(default_factory=dict)
    nccl: Measured | None = None
    _boots: dict[str, str] = field(default_factory=dict)

    def place(self, rank: int, host: str, boot: str) -> None:
        """Note the node of a rank; nodes of one name differ by the ids of their boots."""
        name, number = host, 1
        while self._boots.setdefault(name, boot) != boot:
            number += 1
            name = f"{host} #{number}"
        self.hosts[rank] = name


def check(launch: Launch) -> Iterator[Finding]:
    """Yield findings on the ranks, their ways to rank 0, and their clocks."""
    yield from _present(launch)
    yield from _routes(launch)
    yield from _clocks(launch)


def _present(launch: Launch) -> Iterator[Finding]:
    size, there = launch.rank.size, by_host(launch.hosts.values())
    missing = sorted(set(range(size)) - set(launch.hosts))
    silent = sorted(set(launch.hosts) - set(launch.reports))
    if missing:
        value = f"{numbered('rank', missing)} of {size} did not arrive within {launch.timeout:g} s"
        advice = f"See what they printed, and whether they reach {launch.rank.host} at "
        advice += f"{launch.address}; allow more with --timeout"
        yield say.error("ranks", f"{value} (there are {there})", advice)
    if silent:
        where = some(launch.hosts[rank] for rank in silent)
        value = f"{numbered('rank', silent)} on {where} ended, or hung, before reporting"
        yield say.error("ranks", value, "See what was printed, and whether the nodes are sound")
    if not missing and not silent:
        yield say.ok("ranks", f"{size}: {there}")


def _routes(launch: Launch) -> Iterator[Finding]:
    """Yield findings on whether other nodes reach the port that the scheduler would have."""
    home, topic = launch.hosts[0], "scheduler's port"
    away = [(launch.hosts[rank], route) for rank, route in launch.routes.items()]
    away = [(host, route) for host, route in away if host != home]
    failed = {host: route for host, route in away if route.failed}
    for host, route in failed.items():
        tried = ", ".join(f"{address}: {why}" for address, why in route.failed.items())
        value = f"{host} cannot reach {home} at {launch.address} ({tried}), but at {route.address}"
        advice = "Let the cluster use the network that works: name its interface with --interface"
        yield say.error(topic, value, advice)
    if away and not failed:
        nodes = plural(len(dict(away)), "other node")
        yield say.ok(topic, f"{launch.address} on {home} reached from {nodes}")


def _clocks(launch: Launch) -> Iterator[Finding]:
    """Yield a finding on other nodes' clocks, known to the time that a message takes."""
    ahead = {launch.hosts[rank]: seconds for rank, seconds in launch.ahead.items()}
    ahead.pop(launch.hosts[0], None)
    if not ahead:
        return
    worst = max(ahead, key=lambda host: abs(ahead[host]))
    seconds = abs(ahead[worst])
    value = f"differ by at most {max(seconds, 0.001):.3f} s"
    if seconds > CLOCK_WARNING_S:
        make = say.error if seconds > CLOCK_ERROR_S else say.warning
        advice = "The nodes' clocks are not set by one server: tell the site's staff"
        yield make("clocks", f"{value} ({worst})", advice)
    else:
        yield say.ok("clocks", value)


def check_transport(nodes: Sequence[Node]) -> Iterator[Finding]:
    """Yield the choice of ``--protocol auto`` for these nodes, and its reason."""
    topic = "protocol"
    seats = [
        NodeLinks(node.name, tuple(gpus), node.fabrics[rank])
        for node in nodes
        for rank, gpus in node.assigned().items()
        if rank in node.fabrics
    ]
    if not seats:
        return
    try:
        choice = choose(WorkerSpec(), seats)
    except HpcdaskError as error:
        yield of_network.error(topic, "auto fails", str(error))
        return
    yield of_network.ok(topic, f"auto would choose {choice.protocol}: {choice.reason}")
    yield from (of_network.ok(topic, f"and says: {warning}") for warning in choice.warnings)
