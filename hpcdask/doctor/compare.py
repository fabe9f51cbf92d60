"""What differs between nodes that should be alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .findings import Facts, Finding, Reporter, Status, amount
from .nodes import Node

GROUP = "between nodes"
#: Packages that must be the same on all nodes: they exchange pickles.
ALIKE = ("dask", "distributed", "hpcdask")


@dataclass(frozen=True)
class Difference:
    """One thing that is not the same on all nodes: how bad that is, and by node what is there."""

    what: str
    status: Status
    values: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        """The difference as JSON holds it."""
        return {"what": self.what, "status": self.status, "values": self.values}

    def to_finding(self) -> Finding:
        """The difference as a finding of the whole launch."""
        if self.status == "ok":
            return Reporter(GROUP).ok(self.what, "differs: see the table")
        common = Counter(self.values.values()).most_common(1)[0][0]
        odd = [host for host, value in self.values.items() if value != common]
        names = ", ".join(odd[:4]) + (f" and {len(odd) - 4} more" if len(odd) > 4 else "")
        advice = f"Make them alike, or leave out those that differ ({names})"
        return Finding(GROUP, self.what, self.status, "differs: see the table", advice)


def _python(facts: Facts) -> str:
    return str(facts["software"]["python"])


def _gpus(facts: Facts) -> str:
    kinds = Counter(gpu["name"] for gpu in facts["gpus"]["gpus"])
    return ", ".join(f"{count} x {name}" for name, count in kinds.items()) or "none"


def _driver(facts: Facts) -> str:
    return str(facts["gpus"].get("driver", "none"))


def _memory(facts: Facts) -> str:
    return amount(min(one["memory"] for one in facts["process"]))


def _transports(facts: Facts) -> str:
    return " ".join(facts["fabric"]["ucx"]["transports"]) or "none"


def _ports(facts: Facts) -> str:
    states = Counter(port["state"] for port in facts["fabric"]["infiniband"])
    return ", ".join(f"{count} {state}" for state, count in sorted(states.items())) or "none"


def _interfaces(facts: Facts) -> str:
    return " ".join(one["name"] for one in facts["fabric"]["interfaces"]) or "none"


ROWS: dict[str, tuple[Status, Callable[[Facts], str]]] = {
    "Python": ("error", _python),
    "kernel": ("ok", lambda facts: str(facts["software"]["kernel"])),
    "driver": ("warning", _driver),
    "GPUs": ("warning", _gpus),
    "InfiniBand ports": ("warning", _ports),
    "UCX modules": ("warning", _transports),
    "interfaces": ("ok", _interfaces),
    "host memory": ("ok", _memory),
    "cores": (
        "ok",
        lambda facts: str(len({core for one in facts["process"] for core in one["cores"]})),
    ),
    "open files": ("warning", lambda facts: str(min(one["nofile"][0] for one in facts["process"]))),
    "locked memory": ("ok", lambda facts: str(min(one["memlock"][0] for one in facts["process"]))),
    "scratch": ("ok", lambda facts: f"{facts['scratch']['path']} ({facts['scratch']['type']})"),
    "settings": (
        "warning",
        lambda facts: (
            " ".join(
                f"{name}={value}"
                for name, value in sorted(facts["process"][0]["env"].items())
                if name.startswith(("UCX_", "DASK_"))
            )
            or "none"
        ),
    ),
}


def differences(nodes: Sequence[Node]) -> list[Difference]:
    """The rows of the table: what is not the same on all nodes."""
    rows = {what: (status, _values(nodes, read)) for what, (status, read) in ROWS.items()}
    packages = [node.facts.get("software", {}).get("packages", {}) for node in nodes]
    for name in sorted({name for known in packages for name in known}):
        values = {
            node.host: known.get(name, "missing")
            for node, known in zip(nodes, packages, strict=True)
            if known
        }
        rows[name] = ("error" if name in ALIKE else "warning", values)
    return [
        Difference(what, status, values)
        for what, (status, values) in rows.items()
        if len(set(values.values())) > 1
    ]


def _values(nodes: Sequence[Node], read: Callable[[Facts], str]) -> dict[str, str]:
    """By node; without those that could not be asked."""
    values = {}
    for node in nodes:
        try:
            values[node.host] = read(node.facts)
        except (KeyError, IndexError, ValueError):
            continue
    return values
