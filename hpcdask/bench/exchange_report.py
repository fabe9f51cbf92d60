"""Who is slow: a verdict on a matrix of bandwidths, and the matrix as text.

Only numbers go in, so recorded cases are enough to test it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

__all__ = ["Finding", "Matrix", "hints", "judge", "short", "summary", "table"]

#: Rows send, columns receive; None where nothing was measured, as on the diagonal.
Matrix = Sequence[Sequence[float | None]]
Kind = Literal["node", "nodes", "worker", "pair", "hint"]

#: Slow is less than this part of what is usual.
SLOW = 0.5
#: GPUs of one node that exchange over ucx do more than this with CUDA IPC, and less without.
IPC_LEAST = 10.0
#: Smaller blocks do not show a bandwidth.
HINT_NBYTES = 64_000_000
#: A matrix of more workers is no longer readable as text.
MAX_COLUMNS = 16
MAX_LINES = 10
NETWORK = ("tcp", "tls")


@dataclass(frozen=True)
class Finding:
    """Something that is slower than the others or than it should be, in GB/s.

    It names a node, an ordered pair of nodes, a worker or an ordered pair of workers, or is a hint
    at the cause; ``text`` is one line for the user.
    """

    kind: Kind
    who: tuple[str, ...]
    text: str
    value: float
    usual: float

    def as_dict(self) -> dict[str, Any]:
        """Return the finding as a dict ready for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class _Slow:
    """Slow members and cells of a matrix, and what is usual in it."""

    senders: dict[int, float]
    receivers: dict[int, float]
    cells: dict[tuple[int, int], float]
    usual: float


Cells = Mapping[tuple[int, int], float]


def _median(values: Iterable[float]) -> float:
    return statistics.median(list(values) or [0.0])


def _slow_members(lines: Mapping[int, list[float]]) -> dict[int, float]:
    # Compared with the median member, not the median cell: of three members, one that is slow
    # touches two thirds of the cells. With two, nobody can tell which is to blame.
    medians = {member: _median(line) for member, line in lines.items() if len(line) > 1}
    usual = _median(medians.values())
    return {member: value for member, value in medians.items() if value < SLOW * usual}


def _slow_parts(cells: Cells) -> _Slow:
    rows: dict[int, list[float]] = {}
    columns: dict[int, list[float]] = {}
    for (source, destination), value in cells.items():
        rows.setdefault(source, []).append(value)
        columns.setdefault(destination, []).append(value)
    senders, receivers = _slow_members(rows), _slow_members(columns)
    rest = {
        (source, destination): value
        for (source, destination), value in cells.items()
        if source not in senders and destination not in receivers
    }
    usual = _median(rest.values())
    slow = {pair: value for pair, value in rest.items() if value < SLOW * usual}
    return _Slow(senders, receivers, slow, usual)


def judge(
    bandwidth: Matrix,
    names: Sequence[str],
    hosts: Sequence[str],
    transport: Sequence[Sequence[str | None]],
) -> list[Finding]:
    """Name the slow nodes, then workers, then pairs, each cause once, the slowest first.

    Bandwidths are in GB/s. Pairs within a node are compared with such pairs, and those between
    nodes with those. A pair is slow below half of their median; a worker or a node if its median
    pair is below half of the median worker's or node's, that is if most of its pairs are slow. What
    a slow node explains is not said again of its workers, nor of their pairs.
    """
    pairs = {
        (i, j): value
        for i, row in enumerate(bandwidth)
        for j, value in enumerate(row)
        if value is not None
    }
    inside = {pair: v for pair, v in pairs.items() if hosts[pair[0]] == hosts[pair[1]]}
    between = {pair: v for pair, v in pairs.items() if pair not in inside}
    found = [*_judge_inside(inside, hosts), *_judge_nodes(between, hosts)]
    for cells, where in ((inside, "of its node"), (between, "of other nodes")):
        found += _judge_workers(cells, where, names, hosts, transport)
    order: list[Kind] = ["node", "nodes", "worker", "pair"]
    return sorted(found, key=lambda one: (order.index(one.kind), one.value / one.usual))


def _judge_inside(inside: dict[tuple[int, int], float], hosts: Sequence[str]) -> list[Finding]:
    """Find nodes within which exchange is slow, and take their pairs away."""
    nodes: dict[str, list[float]] = {}
    for (i, _), value in inside.items():
        nodes.setdefault(hosts[i], []).append(value)
    medians = {host: _median(values) for host, values in nodes.items()}
    usual = _median(medians.values())
    found = []
    for host, value in medians.items():
        if value < SLOW * usual:
            text = (
                f"node {host} is slow inside: {value:.3g} GB/s between its workers, "
                f"{usual:.3g} on the others"
            )
            found.append(Finding("node", (host,), text, value, usual))
            for pair in [pair for pair in inside if hosts[pair[0]] == host]:
                del inside[pair]
    return found


def _judge_nodes(between: dict[tuple[int, int], float], hosts: Sequence[str]) -> list[Finding]:
    """Find nodes that exchange slowly with others, and take their pairs away."""
    nodes = list(dict.fromkeys(hosts))
    if len(nodes) == len(hosts):
        return []  # one worker per node: as well said of the worker
    number = [nodes.index(host) for host in hosts]
    values: dict[tuple[int, int], list[float]] = {}
    for (i, j), value in between.items():
        values.setdefault((number[i], number[j]), []).append(value)
    slow = _slow_parts({pair: _median(several) for pair, several in values.items()})
    found = []
    for node, value, verb in _members(slow):
        text = (
            f"node {nodes[node]} {verb} slowly: {value:.3g} GB/s with other nodes, "
            f"{slow.usual:.3g} is usual"
        )
        found.append(Finding("node", (nodes[node],), text, value, slow.usual))
    for (a, b), value in slow.cells.items():
        text = f"node {nodes[a]} -> node {nodes[b]}: {value:.3g} GB/s, {slow.usual:.3g} is usual"
        found.append(Finding("nodes", (nodes[a], nodes[b]), text, value, slow.usual))
    for i, j in list(between):
        a, b = number[i], number[j]
        if a in slow.senders or b in slow.receivers or (a, b) in slow.cells:
            del between[i, j]
    return found


def _members(slow: _Slow) -> list[tuple[int, float, str]]:
    members = []
    for member in sorted({*slow.senders, *slow.receivers}):
        values = [side[member] for side in (slow.senders, slow.receivers) if member in side]
        verb = "exchanges" if len(values) == 2 else "sends"
        members.append((member, min(values), verb if member in slow.senders else "receives"))
    return members


def _judge_workers(
    cells: Cells,
    where: str,
    names: Sequence[str],
    hosts: Sequence[str],
    transport: Sequence[Sequence[str | None]],
) -> list[Finding]:
    slow = _slow_parts(cells)
    found = []
    for member, value, verb in _members(slow):
        text = (
            f"worker {names[member]} on {hosts[member]} {verb} slowly: {value:.3g} GB/s with "
            f"workers {where}, {slow.usual:.3g} is usual"
        )
        found.append(Finding("worker", (names[member],), text, value, slow.usual))
    for (i, j), value in slow.cells.items():
        there = hosts[i] if hosts[i] == hosts[j] else f"{hosts[i]} -> {hosts[j]}"
        text = (
            f"pair {names[i]} -> {names[j]} on {there}: {value:.3g} GB/s over {transport[i][j]}, "
            f"{slow.usual:.3g} is usual"
        )
        found.append(Finding("pair", (names[i], names[j]), text, value, slow.usual))
    return found


def hints(
    bandwidth: Matrix,
    hosts: Sequence[str],
    transport: Sequence[Sequence[str | None]],
    nvlink: Iterable[tuple[int, int]],
    nbytes: int,
) -> list[Finding]:
    """Say where GPUs of one node do not use what joins them, such as NVLink between these pairs."""
    found = []
    joined = {(*pair,) for a, b in nvlink for pair in ((a, b), (b, a))}
    for host in dict.fromkeys(hosts):
        members = [i for i, other in enumerate(hosts) if other == host]
        pairs = [(i, j) for i in members for j in members if i != j]
        by_ucx = [bandwidth[i][j] or 0.0 for i, j in pairs if transport[i][j] == "ucx"]
        if by_ucx and nbytes >= HINT_NBYTES and (value := _median(by_ucx)) < IPC_LEAST:
            text = (
                f"node {host}: {value:.3g} GB/s between its GPUs over ucx, so CUDA IPC is not "
                f"active; one job for the whole node, or --gpu-bind=none, lets GPUs share memory"
            )
            found.append(Finding("hint", (host,), text, value, IPC_LEAST))
        idle = [pair for pair in pairs if pair in joined and transport[pair[0]][pair[1]] in NETWORK]
        if idle:
            value = _median(bandwidth[i][j] or 0.0 for i, j in idle)
            text = (
                f"node {host}: {len(idle)} pairs of GPUs that NVLink joins exchange over "
                f"{transport[idle[0][0]][idle[0][1]]}, {value:.3g} GB/s: start with --protocol ucx"
            )
            found.append(Finding("hint", (host,), text, value, IPC_LEAST))
    return found


def summary(bandwidth: Matrix, hosts: Sequence[str]) -> dict[str, dict[str, float]]:
    """Give the median, least and greatest of the pairs within nodes and of those between."""
    groups: dict[str, list[float]] = {"same node": [], "different nodes": []}
    for i, row in enumerate(bandwidth):
        for j, value in enumerate(row):
            if value is not None:
                groups["same node" if hosts[i] == hosts[j] else "different nodes"].append(value)
    return {
        name: {
            "pairs": len(values),
            "median": statistics.median(values),
            "min": min(values),
            "max": max(values),
        }
        for name, values in groups.items()
        if values
    }


def table(result: Mapping[str, Any]) -> str:
    """Write the matrices as text; of more than 16 workers, those between nodes and a summary."""
    names, hosts = result["names"], result["hosts"]
    parts = []
    for key, title in (("GB/s", "GB/s"), ("latency_ms", "ms for 8 bytes")):
        matrix = result[key]
        if len(names) <= MAX_COLUMNS:
            parts.append(_grid(matrix, names, f"{title}, from row to column"))
        elif 1 < len(set(hosts)) <= MAX_COLUMNS:
            nodes, medians = _between_nodes(matrix, hosts)
            parts.append(_grid(medians, nodes, f"{title}, medians, from row to column"))
        for name, numbers in summary(matrix, hosts).items():
            parts.append(
                f"{name}, {numbers['pairs']} pairs: median {short(numbers['median'])}, "
                f"{short(numbers['min'])} to {short(numbers['max'])} {title}"
            )
    return "\n".join(parts)


def _between_nodes(matrix: Matrix, hosts: Sequence[str]) -> tuple[list[str], Matrix]:
    nodes = list(dict.fromkeys(hosts))
    values: dict[tuple[str, str], list[float]] = {}
    for i, row in enumerate(matrix):
        for j, value in enumerate(row):
            if value is not None:
                values.setdefault((hosts[i], hosts[j]), []).append(value)
    return nodes, [
        [_median(values[a, b]) if (a, b) in values else None for b in nodes] for a in nodes
    ]


def _grid(matrix: Matrix, labels: Sequence[str], title: str) -> str:
    numbers = [[short(value) for value in row] for row in matrix]
    # Columns have numbers rather than names, which are long.
    heads = [f"{i}" for i in range(len(labels))]
    width = max(len(text) for row in [*numbers, heads] for text in row) + 2
    names = [f"{i} {label}" for i, label in enumerate(labels)]
    left = max(map(len, names))
    lines = [title, " " * left + "".join(head.rjust(width) for head in heads)]
    for name, row in zip(names, numbers, strict=True):
        lines.append(name.ljust(left) + "".join(text.rjust(width) for text in row))
    return "\n".join(lines)


def short(value: float | None) -> str:
    """Write a bandwidth or latency with three digits, and ``-`` for what was not measured."""
    if value is None:
        return "-"
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:.{digits}f}" if value >= 1 else f"{value:.3g}"
