"""The range of ports, if there is one: what is free on a node, and what others reach there."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterator, Mapping

from hpcdask.logs import plural
from hpcdask.security import ports

from .findings import Facts, Finding, Reporter

say, between = Reporter("network"), Reporter("between nodes")
#: Seconds to connect to another node's port.
DEADLINE_S = 5.0
#: Other nodes that each node connects to, at most.
MOST_TARGETS = 32
TOPIC = "port range"


def read() -> Facts:
    """The range in use, and how many of its ports are free here."""
    if (port_range := ports.current()) is None:
        return {}
    free = 0
    for port in (every := ports.ports_of(port_range)):
        with contextlib.suppress(OSError):
            ports.check_free(port)
            free += 1
    return {"range": port_range, "size": len(every), "free": free}


def check(facts: Facts, workers: int) -> Iterator[Finding]:
    """Yield a finding on whether the ports are enough for so many workers on this node."""
    if not (known := facts.get("ports")):
        return
    value = f"{known['range']}: {known['free']} of {known['size']} ports are free"
    needed = workers * ports.PER_WORKER + ports.PER_SCHEDULER
    if known["free"] < needed:
        advice = f"{plural(workers, 'worker')} and the scheduler need {needed}. {ports.NEEDS}"
        yield say.error(TOPIC, value, f"{advice}: give a wider range")
    else:
        most = [
            (known["free"] - ports.PER_SCHEDULER) // each
            for each in (ports.PER_WORKER, ports.PER_UCX_WORKER)
        ]
        count = plural(most[0], "worker")
        hint = f"Enough on this node for the scheduler and {count}, with ucx {most[1]}"
        yield say.ok(TOPIC, value, hint)


class Listener:
    """A port of the range on which this node can be reached; `error` says why there is none."""

    def __init__(self, address: str) -> None:
        self.address, self.port, self.error = address, 0, ""
        try:
            self._server = ports.choose(lambda port: socket.create_server((address, port)))
            self.port = int(self._server.getsockname()[1])
        except Exception as error:
            self.error = str(error)

    def facts(self) -> Facts:
        """Where it listens, for the others."""
        return {"address": self.address, "port": self.port, "error": self.error}

    def close(self) -> None:
        """Listen no more."""
        if self.port:
            self._server.close()


def targets(host: str, listeners: Mapping[str, Facts]) -> dict[str, Facts]:
    """Return the nodes that a node connects to: those after it, in a ring."""
    names = list(listeners)
    at = names.index(host) + 1
    chosen = [*names[at:], *names[: at - 1]][:MOST_TARGETS]
    return {name: listeners[name] for name in chosen if listeners[name]["port"]}


async def connect(others: Mapping[str, Facts]) -> dict[str, str]:
    """Connect to other nodes' ports; by node, why that failed."""

    async def attempt(address: str, port: int) -> str:
        try:
            async with asyncio.timeout(DEADLINE_S):
                _, writer = await asyncio.open_connection(address, port)
            writer.close()
        except TimeoutError:
            return f"no answer in {DEADLINE_S:g} s"
        except OSError as error:
            return os.strerror(error.errno) if error.errno else str(error)
        return ""

    found = await asyncio.gather(
        *(attempt(other["address"], other["port"]) for other in others.values())
    )
    return {name: why for name, why in zip(others, found, strict=True) if why}


def check_reached(reached: Mapping[str, Mapping[str, str]], port_range: str) -> Iterator[Finding]:
    """Yield findings on nodes that did not reach others, and why."""
    advice = "A firewall stands between the nodes: ask the site's staff which ports it lets through"
    for host, failed in reached.items():
        for other, why in failed.items():
            yield between.error(
                TOPIC, f"{host} cannot reach {other} in {port_range}: {why}", advice
            )
    if reached and not any(reached.values()):
        nodes = plural(len(reached), "node")
        yield between.ok(TOPIC, f"{port_range}: {nodes} reach each other in it")
