"""What rank 0 heard of a launch, and what that says of the network between its nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hpcdask.bootstrap.ranks import Rank
from hpcdask.comm.fabric import Fabric
from hpcdask.comm.topology import NodeLinks
from hpcdask.comm.transport import choose
from hpcdask.errors import HpcdaskError
from hpcdask.spec.specs import WorkerSpec

from .findings import Facts, Finding, Reporter, spans
from .nodes import Node
from .queue import assigned

GROUP = "between nodes"
#: Seconds by which clocks may differ. Credentials are valid from an hour before.
CLOCK_WARNING_S, CLOCK_ERROR_S = 2.0, 1800.0


@dataclass(frozen=True)
class Route:
    """How a rank reached rank 0: where it did, and by address why it did not."""

    address: str
    failed: dict[str, str]


@dataclass
class Launch:
    """What rank 0 heard, by rank, and where it listened, as the scheduler would.

    `clocks` has for each reading how long a rank's answer took and how far its clock was ahead, in
    seconds. All ranks had to arrive within `timeout` seconds.
    """

    rank: Rank
    timeout: float
    address: str = ""
    hosts: dict[int, str] = field(default_factory=dict)
    reports: dict[int, Facts] = field(default_factory=dict)
    routes: dict[int, Route] = field(default_factory=dict)
    clocks: dict[int, list[tuple[float, float]]] = field(default_factory=dict)


def check(launch: Launch) -> list[Finding]:
    """What was seen between the ranks."""
    say = Reporter(GROUP)
    return [*_present(say, launch), *_routes(say, launch), *_clocks(say, launch)]


def _present(say: Reporter, launch: Launch) -> Iterator[Finding]:
    size = launch.rank.size
    missing = sorted(set(range(size)) - set(launch.hosts))
    silent = sorted(set(launch.hosts) - set(launch.reports))
    there = ", ".join(
        f"{count} on {host}" for host, count in Counter(launch.hosts.values()).items()
    )
    if missing:
        yield say.error(
            "ranks",
            f"{_ranks(missing)} of {size} did not arrive within {launch.timeout:g} s (there are "
            f"{there})",
            f"See what they printed, and whether they reach {launch.rank.host} at "
            f"{launch.address}; allow more with --timeout",
        )
    for rank in silent:
        yield say.error(
            "ranks",
            f"rank {rank} on {launch.hosts[rank]} ended, or hangs, before it reported",
            "See what it printed, and whether its node is sound",
        )
    if not missing and not silent:
        yield say.ok("ranks", f"{size}: {there}")


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank{'s' * (len(numbers) != 1)} {spans(numbers)}"


def _routes(say: Reporter, launch: Launch) -> Iterator[Finding]:
    """Could all other nodes reach the port that the scheduler would have?"""
    home = launch.rank.host
    away = {rank: route for rank, route in launch.routes.items() if launch.hosts[rank] != home}
    failed: dict[str, Route] = {}
    for rank, route in away.items():
        if route.failed:
            failed.setdefault(launch.hosts[rank], route)
    for host, route in failed.items():
        tried = ", ".join(f"{address}: {why}" for address, why in route.failed.items())
        yield say.error(
            "scheduler's port",
            f"{host} cannot reach {home} at {launch.address} ({tried}), but at {route.address}",
            "Let the cluster use the network that works: name its interface with --interface",
        )
    if away and not failed:
        nodes = len({launch.hosts[rank] for rank in away})
        yield say.ok(
            "scheduler's port",
            f"{launch.address} on {home} reached from {nodes} other node{'s' * (nodes != 1)}",
        )


def _clocks(say: Reporter, launch: Launch) -> Iterator[Finding]:
    """How far other nodes' clocks are from rank 0's; known to half the time an answer takes."""
    ahead: dict[str, float] = {}
    for rank, readings in launch.clocks.items():
        if launch.hosts[rank] != launch.rank.host:
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
    """What ``--protocol auto`` would choose for these nodes, and why."""
    say = Reporter("network")
    topic = "--protocol auto"
    seats = [seat for node in nodes for seat in _seats(node)]
    if not seats:
        return []
    try:
        choice = choose(WorkerSpec(), seats)
    except HpcdaskError as error:
        return [say.error(topic, "fails", str(error))]
    found = [say.ok(topic, f"would choose {choice.protocol}: {choice.reason}")]
    known = {finding.value for finding in found}
    found += [
        say.ok(topic, f"and says: {warning}") for warning in choice.warnings if warning not in known
    ]
    return found


def _seats(node: Node) -> Iterator[NodeLinks]:
    """What each of a node's ranks brings: the GPUs of its workers, and what joins them."""
    for rank, gpus in assigned(node.facts, node.ranks).items():
        known = node.facts.get("fabrics", {}).get(rank)
        if known is not None:
            yield NodeLinks(node.host, tuple(gpus), Fabric.from_json(known))
