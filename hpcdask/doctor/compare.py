"""Differences between nodes that should be alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from dask.utils import format_bytes

from hpcdask.logs import some

from .findings import Finding, Status
from .nodes import Node

GROUP = "between nodes"
#: Packages that must be the same on all nodes: they exchange pickles.
ALIKE = ("dask", "distributed", "hpcdask")


@dataclass(frozen=True)
class Difference:
    """Difference between nodes: its severity, and each node's value."""

    what: str
    status: Status
    values: dict[str, str]

    def to_finding(self) -> Finding:
        """Return the difference as a finding of the whole launch."""
        common = Counter(self.values.values()).most_common(1)[0][0]
        odd = [name for name, value in self.values.items() if value != common]
        advice = f"Make them alike, or leave out those that differ ({some(odd)})"
        hint = "" if self.status == "ok" else advice
        return Finding(GROUP, self.what, self.status, "differs: see the table", hint)


def _counted(things: Iterable[str], form: str) -> str:
    counts = sorted(Counter(things).items())
    return ", ".join(form.format(count, thing) for thing, count in counts) or "none"


def _settings(node: Node) -> str:
    environ = sorted(next(iter(node.processes.values())).env.items())
    known = [f"{name}={value}" for name, value in environ if name.startswith(("UCX_", "DASK_"))]
    return " ".join(known) or "none"


def _rows(node: Node) -> Iterator[tuple[str, Status, str]]:
    """Yield what is compared, how bad a difference is, and a node's value."""
    facts, processes = node.facts, node.processes.values()
    if facts.software:
        yield "Python", "error", facts.software.python
        yield "kernel", "ok", facts.software.kernel
    if facts.gpus:
        yield "driver", "warning", facts.gpus.driver or "none"
        yield "GPUs", "warning", _counted((gpu.name for gpu in node.gpus), "{} x {}")
    if fabric := facts.fabric:
        states = (port.state for port in fabric.infiniband)
        yield "InfiniBand ports", "warning", _counted(states, "{} {}")
        yield "UCX modules", "warning", " ".join(fabric.ucx.transports) or "none"
        yield "interfaces", "ok", " ".join(one.name for one in fabric.interfaces) or "none"
    if processes:
        yield "host memory", "ok", format_bytes(min(one.memory for one in processes))
        yield "cores", "ok", str(len(node.cores))
        yield "open files", "warning", str(min(one.nofile[0] for one in processes))
        yield "locked memory", "ok", str(min(one.memlock[0] for one in processes))
    if facts.scratch:
        yield "scratch", "ok", f"{facts.scratch.path} ({facts.scratch.type})"
    if processes:
        yield "settings", "warning", _settings(node)


def differences(nodes: Sequence[Node]) -> list[Difference]:
    """Return the rows of the table: what is not the same on all nodes that could be asked."""
    found: dict[str, Difference] = {}
    for node in nodes:
        for what, status, value in _rows(node):
            found.setdefault(what, Difference(what, status, {})).values[node.name] = value
    packages = {node.name: node.facts.software.packages for node in nodes if node.facts.software}
    for name in sorted({name for known in packages.values() for name in known}):
        values = {host: known.get(name, "missing") for host, known in packages.items() if known}
        found[name] = Difference(name, "error" if name in ALIKE else "warning", values)
    return [one for one in found.values() if len(set(one.values.values())) > 1]
