"""The range of ports, if there is one: what is free on a node, and what others reach there."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpcdask.logs import plural
from hpcdask.security import ports
from hpcdask.spec.records import Record

from .findings import Finding, Reporter

if TYPE_CHECKING:
    from .nodes import Node

say, between = Reporter("network"), Reporter("between nodes")
#: Seconds to connect to another node's port.
DEADLINE_S = 5.0
#: Other nodes that each node connects to, at most.
MOST_TARGETS = 32
TOPIC = "port range"


@dataclass(frozen=True)
class PortFacts(Record):
    """The range in use, its size, and how many of its ports are free."""

    range: str
    size: int
    free: int

    @classmethod
    def read(cls) -> PortFacts | None:
        """Try all ports of the range, if there is one."""
        if (port_range := ports.current()) is None:
            return None
        free = 0
        for port in (every := ports.ports_of(port_range)):
            with contextlib.suppress(OSError):
                ports.check_free(port)
                free += 1
        return cls(port_range, len(every), free)


def check(known: PortFacts, node: Node) -> Iterator[Finding]:
    """Yield a finding on whether the ports are enough for the workers of this node."""
    value = f"{known.range}: {known.free} of {known.size} ports are free"
    needed = node.workers * ports.PER_WORKER + ports.PER_SCHEDULER
    if known.free < needed:
        advice = f"{plural(node.workers, 'worker')} and the scheduler need {needed}. {ports.NEEDS}"
        yield say.error(TOPIC, value, f"{advice}: give a wider range")
        return
    left = known.free - ports.PER_SCHEDULER
    count, with_ucx = left // ports.PER_WORKER, left // ports.PER_UCX_WORKER
    hint = (
        f"Enough on this node for the scheduler and {plural(count, 'worker')}, with ucx {with_ucx}"
    )
    yield say.ok(TOPIC, value, hint)


@dataclass(frozen=True)
class Listening(Record):
    """Port of the range on which a node listens; `error` says why there is none."""

    address: str
    port: int = 0
    error: str = ""

    @classmethod
    def start(cls, address: str) -> Listening:
        """Listen until this process ends."""
        try:
            server = ports.choose(lambda port: socket.create_server((address, port)))
        except Exception as error:
            return cls(address, error=str(error))
        port = int(server.getsockname()[1])
        server.detach()  # which would be closed with its object
        return cls(address, port)


def targets(name: str, listening: Mapping[str, Listening]) -> dict[str, Listening]:
    """Return the nodes that a node connects to: those after it, in a ring."""
    names = list(listening)
    at = names.index(name) + 1
    chosen = [*names[at:], *names[: at - 1]][:MOST_TARGETS]
    return {other: listening[other] for other in chosen if listening[other].port}


async def connect(others: Mapping[str, Listening]) -> dict[str, str]:
    """Connect to other nodes' ports, and return by node why that failed."""

    async def attempt(other: Listening) -> str:
        try:
            async with asyncio.timeout(DEADLINE_S):
                _, writer = await asyncio.open_connection(other.address, other.port)
            writer.close()
        except TimeoutError:
            return f"no answer in {DEADLINE_S:g} s"
        except OSError as error:
            return os.strerror(error.errno) if error.errno else str(error)
        return ""

    found: Sequence[str] = await asyncio.gather(*map(attempt, others.values()))
    return {name: why for name, why in zip(others, found, strict=True) if why}


def check_reached(reached: Mapping[str, Mapping[str, str]], port_range: str) -> Iterator[Finding]:
    """Yield findings on nodes that did not reach others, and why."""
    advice = "A firewall stands between the nodes: ask the site's staff which ports it lets through"
    for name, failed in reached.items():
        for other, why in failed.items():
            value = f"{name} cannot reach {other} in {port_range}: {why}"
            yield between.error(TOPIC, value, advice)
    if reached and not any(reached.values()):
        nodes = plural(len(reached), "node")
        yield between.ok(TOPIC, f"{port_range}: {nodes} reach each other in it")
