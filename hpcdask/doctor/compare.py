"""Differences between nodes that should be alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from hpcdask.logs import some

from .findings import Facts, Finding, Status, amount
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
        """The difference as a finding of the whole launch."""
        value = "differs: see the table"
        if self.status == "ok":
            return Finding(GROUP, self.what, "ok", value)
        common = Counter(self.values.values()).most_common(1)[0][0]
        odd = [host for host, value in self.values.items() if value != common]
        advice = f"Make them alike, or leave out those that differ ({some(odd)})"
        return Finding(GROUP, self.what, self.status, value, advice)


def _counted(things: Iterable[str], form: str) -> str:
    """Each with its number; ``none`` for none."""
    counts = sorted(Counter(things).items())
    return ", ".join(form.format(count, thing) for thing, count in counts) or "none"


def _settings(facts: Facts) -> str:
    environ = sorted(facts["process"][0]["env"].items())
    known = [f"{name}={value}" for name, value in environ if name.startswith(("UCX_", "DASK_"))]
    return " ".join(known) or "none"


def _cores(facts: Facts) -> str:
    return str(len({core for one in facts["process"] for core in one["cores"]}))


def _least(name: str) -> Callable[[Facts], str]:
    return lambda facts: str(min(one[name][0] for one in facts["process"]))


#: How bad a difference is, and what is compared.
ROWS: dict[str, tuple[Status, Callable[[Facts], str]]] = {
    "Python": ("error", lambda facts: facts["software"]["python"]),
    "kernel": ("ok", lambda facts: facts["software"]["kernel"]),
    "driver": ("warning", lambda facts: facts["gpus"].get("driver", "none")),
    "GPUs": (
        "warning",
        lambda facts: _counted((gpu["name"] for gpu in facts["gpus"]["gpus"]), "{} x {}"),
    ),
    "InfiniBand ports": (
        "warning",
        lambda facts: _counted((one["state"] for one in facts["fabric"]["infiniband"]), "{} {}"),
    ),
    "UCX modules": (
        "warning",
        lambda facts: " ".join(facts["fabric"]["ucx"]["transports"]) or "none",
    ),
    "interfaces": (
        "ok",
        lambda facts: " ".join(one["name"] for one in facts["fabric"]["interfaces"]) or "none",
    ),
    "host memory": ("ok", lambda facts: amount(min(one["memory"] for one in facts["process"]))),
    "cores": ("ok", _cores),
    "open files": ("warning", _least("nofile")),
    "locked memory": ("ok", _least("memlock")),
    "scratch": ("ok", lambda facts: f"{facts['scratch']['path']} ({facts['scratch']['type']})"),
    "settings": ("warning", _settings),
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
