"""Slow nodes, workers and pairs in a matrix of bandwidths, and the matrix as a table.

Only numbers go in, so recorded cases are enough to test it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from rich.table import Table

from hpcdask.bench.records import decimal_bytes

#: Rows send, columns receive; None where nothing was measured, as on the diagonal.
Matrix = Sequence[Sequence[float | None]]
Cells = dict[tuple[int, int], float]
Kind = Literal["node", "worker", "pair"]

#: Slow is less than this part of what is usual.
SLOW = 0.5
#: A matrix of more workers is no longer readable as text.
MAX_COLUMNS = 16
STYLE: dict[str, Any] = {"box": None, "title_justify": "left", "pad_edge": False}


class Finding(NamedTuple):
    """A node, worker or pair that is slower than usual, in GB/s, with a line for the user."""

    kind: Kind
    who: tuple[str, ...]
    text: str
    value: float
    usual: float


def judge(bandwidth: Matrix, names: Sequence[str], hosts: Sequence[str]) -> list[Finding]:
    """Name slow nodes, then workers, then pairs, each cause once, the slowest first.

    Pairs within a node are compared with such pairs, and those between nodes with those. A pair is
    slow below half of their median, a worker if the median of its pairs is, and a node if all its
    workers are.
    """
    cells = _cells_of(bandwidth)
    inside = {(i, j): value for (i, j), value in cells.items() if hosts[i] == hosts[j]}
    between = {pair: value for pair, value in cells.items() if pair not in inside}
    found = _judge(inside, "of its node", names, hosts)
    found += _judge(between, "of other nodes", names, hosts)
    order: list[Kind] = ["node", "worker", "pair"]
    return sorted(found, key=lambda one: (order.index(one.kind), one.value / one.usual))


def _judge(cells: Cells, where: str, names: Sequence[str], hosts: Sequence[str]) -> list[Finding]:
    senders, receivers = _slow_members(cells, 0), _slow_members(cells, 1)
    rest = {
        (i, j): value for (i, j), value in cells.items() if i not in senders and j not in receivers
    }
    usual = _median(rest.values() or cells.values())
    told = f"{usual:.3g} is usual"
    found = []
    for verb, values in (
        ("exchanges", {m: min(senders[m], receivers[m]) for m in senders if m in receivers}),
        ("sends", {m: value for m, value in senders.items() if m not in receivers}),
        ("receives", {m: value for m, value in receivers.items() if m not in senders}),
    ):
        for host in dict.fromkeys(hosts[m] for m in values):
            members = [m for m in values if hosts[m] == host]
            is_node = len(members) == hosts.count(host) > 1
            for group in [members] if is_node else [[member] for member in members]:
                value = _median(values[m] for m in group)
                kind: Kind = "node" if is_node else "worker"
                who = host if is_node else names[group[0]]
                subject = f"node {host}" if is_node else f"worker {who} on {host}"
                text = f"{subject} {verb} slowly: {value:.3g} GB/s with workers {where}, {told}"
                found.append(Finding(kind, (who,), text, value, usual))
    for (i, j), value in rest.items():
        if value < SLOW * usual:
            there = hosts[i] if hosts[i] == hosts[j] else f"{hosts[i]} -> {hosts[j]}"
            text = f"pair {names[i]} -> {names[j]} on {there}: {value:.3g} GB/s, {told}"
            found.append(Finding("pair", (names[i], names[j]), text, value, usual))
    return found


def _slow_members(cells: Cells, side: int) -> dict[int, float]:
    # Compared with the median member, not the median cell: of three members, one that is slow
    # touches two thirds of the cells. With two, nobody can tell which is to blame.
    lines: dict[int, list[float]] = {}
    for pair, value in cells.items():
        lines.setdefault(pair[side], []).append(value)
    medians = {member: _median(line) for member, line in lines.items() if len(line) > 1}
    usual = _median(medians.values())
    return {member: value for member, value in medians.items() if value < SLOW * usual}


def _cells_of(matrix: Matrix) -> Cells:
    return {
        (i, j): value
        for i, row in enumerate(matrix)
        for j, value in enumerate(row)
        if value is not None
    }


def _median(values: Iterable[float]) -> float:
    return statistics.median(list(values) or [0.0])


def summary(matrix: Matrix, hosts: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return the median, least and greatest of the pairs within nodes and of those between."""
    groups: dict[str, list[float]] = {}
    for (i, j), value in _cells_of(matrix).items():
        name = "same node" if hosts[i] == hosts[j] else "different nodes"
        groups.setdefault(name, []).append(value)
    return {
        name: {
            "pairs": len(values),
            "median": statistics.median(values),
            "min": min(values),
            "max": max(values),
        }
        for name, values in groups.items()
    }


def table(result: Mapping[str, Any]) -> Table:
    """Return the bandwidths of all pairs, or of more than 16 workers those of kinds of pairs."""
    names, hosts = result["names"], result["hosts"]
    if len(names) > MAX_COLUMNS:
        made = Table(
            "", "pairs", "median", "least", "greatest", title="GB/s between workers", **STYLE
        )
        for kind, one in summary(result["GB/s"], hosts).items():
            made.add_row(kind, *(f"{value:.4g}" for value in one.values()))
        return made
    made = Table("", *map(str, range(len(names))), title="GB/s, from row to column", **STYLE)
    for number, row in enumerate(result["GB/s"]):
        cells = ("-" if value is None else f"{value:.3g}" for value in row)
        made.add_row(f"{number} {names[number]}", *cells)
    return made


def all_reduce_line(result: Mapping[str, Any]) -> str:
    """Return what NCCL reached, or why it was left out; empty without GPUs."""
    found = result.get("all_reduce") or {}
    if "missing" in found:
        return f"all-reduce left out: {found['missing']}"
    if not found:
        return ""
    block = decimal_bytes(found["bytes"])
    rate = f"{found['GB/s']:.3g} GB/s bus bandwidth"
    return f"all-reduce over NCCL {found['nccl']}: {rate}, {block} on each worker"
