"""Who is slow: a verdict on a matrix of bandwidths, and the matrix as text.

Only numbers go in, so recorded cases are enough to test it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from hpcdask.bench.records import decimal_bytes

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


class Finding(NamedTuple):
    """Something slower than it should be, in GB/s: nodes, workers, a pair, or a hint at why.

    ``text`` is one line for the user.
    """

    kind: Kind
    who: tuple[str, ...]
    text: str
    value: float
    usual: float


class _Slow(NamedTuple):
    """Members of a matrix that are slow, with their verb, its slow cells, and what is usual."""

    members: dict[int, tuple[float, str]]
    cells: dict[tuple[int, int], float]
    usual: float
    explained: set[tuple[int, int]]


Cells = dict[tuple[int, int], float]


def _cells_of(matrix: Matrix) -> Cells:
    return {
        (i, j): value
        for i, row in enumerate(matrix)
        for j, value in enumerate(row)
        if value is not None
    }


def _median(values: Iterable[float]) -> float:
    return statistics.median(list(values) or [0.0])


def _grouped(cells: Cells, key: Callable[[int, int], Any]) -> dict[Any, list[float]]:
    groups: dict[Any, list[float]] = {}
    for pair, value in cells.items():
        groups.setdefault(key(*pair), []).append(value)
    return groups


def _slow_members(lines: Mapping[int, list[float]]) -> dict[int, float]:
    # Compared with the median member, not the median cell: of three members, one that is slow
    # touches two thirds of the cells. With two, nobody can tell which is to blame.
    medians = {member: _median(line) for member, line in lines.items() if len(line) > 1}
    usual = _median(medians.values())
    return {member: value for member, value in medians.items() if value < SLOW * usual}


def _slow_parts(cells: Cells) -> _Slow:
    senders = _slow_members(_grouped(cells, lambda i, _: i))
    receivers = _slow_members(_grouped(cells, lambda _, j: j))
    rest = {
        (i, j): value for (i, j), value in cells.items() if i not in senders and j not in receivers
    }
    usual = _median(rest.values())
    slow = {pair: value for pair, value in rest.items() if value < SLOW * usual}
    members = {}
    for member in sorted({*senders, *receivers}):
        values = [side[member] for side in (senders, receivers) if member in side]
        verb = "exchanges" if len(values) == 2 else "sends" if member in senders else "receives"
        members[member] = min(values), verb
    return _Slow(members, slow, usual, {pair for pair in cells if pair not in rest or pair in slow})


def judge(
    bandwidth: Matrix,
    names: Sequence[str],
    hosts: Sequence[str],
    transport: Sequence[Sequence[str | None]],
) -> list[Finding]:
    """Name the slow nodes, then workers, then pairs, each cause once, the slowest first.

    Pairs within a node are compared with such pairs, and those between nodes with those. Slow is
    less than half of their median; a worker or a node is slow by the median of its pairs.
    """
    pairs = _cells_of(bandwidth)
    inside = {pair: v for pair, v in pairs.items() if hosts[pair[0]] == hosts[pair[1]]}
    between = {pair: v for pair, v in pairs.items() if pair not in inside}
    found = [*_judge_inside(inside, hosts), *_judge_nodes(between, hosts)]
    for cells, where in ((inside, "of its node"), (between, "of other nodes")):
        found += _judge_workers(cells, where, names, hosts, transport)
    order: list[Kind] = ["node", "nodes", "worker", "pair"]
    return sorted(found, key=lambda one: (order.index(one.kind), one.value / one.usual))


def _judge_inside(inside: Cells, hosts: Sequence[str]) -> list[Finding]:
    """Find nodes within which exchange is slow, and take their pairs away."""
    nodes = _grouped(inside, lambda i, _: hosts[i])
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


def _judge_nodes(between: Cells, hosts: Sequence[str]) -> list[Finding]:
    """Find nodes that exchange slowly with others, and take their pairs away."""
    nodes = list(dict.fromkeys(hosts))
    if len(nodes) == len(hosts):
        return []  # one worker per node: as well said of the worker
    number = [nodes.index(host) for host in hosts]
    values = _grouped(between, lambda i, j: (number[i], number[j]))
    slow = _slow_parts({pair: _median(several) for pair, several in values.items()})
    usual, found = f"{slow.usual:.3g} is usual", []
    for node, (value, verb) in slow.members.items():
        text = f"node {nodes[node]} {verb} slowly: {value:.3g} GB/s with other nodes, {usual}"
        found.append(Finding("node", (nodes[node],), text, value, slow.usual))
    for (a, b), value in slow.cells.items():
        text = f"node {nodes[a]} -> node {nodes[b]}: {value:.3g} GB/s, {usual}"
        found.append(Finding("nodes", (nodes[a], nodes[b]), text, value, slow.usual))
    for i, j in list(between):
        if (number[i], number[j]) in slow.explained:
            del between[i, j]
    return found


def _judge_workers(
    cells: Cells,
    where: str,
    names: Sequence[str],
    hosts: Sequence[str],
    transport: Sequence[Sequence[str | None]],
) -> list[Finding]:
    slow = _slow_parts(cells)
    usual, found = f"{slow.usual:.3g} is usual", []
    for member, (value, verb) in slow.members.items():
        text = (
            f"worker {names[member]} on {hosts[member]} {verb} slowly: {value:.3g} GB/s with "
            f"workers {where}, {usual}"
        )
        found.append(Finding("worker", (names[member],), text, value, slow.usual))
    for (i, j), value in slow.cells.items():
        there = hosts[i] if hosts[i] == hosts[j] else f"{hosts[i]} -> {hosts[j]}"
        over = f"{value:.3g} GB/s over {transport[i][j]}"
        text = f"pair {names[i]} -> {names[j]} on {there}: {over}, {usual}"
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
    groups = _grouped(_cells_of(bandwidth), lambda i, j: hosts[i] == hosts[j])
    return {
        name: {
            "pairs": len(groups[same]),
            "median": statistics.median(groups[same]),
            "min": min(groups[same]),
            "max": max(groups[same]),
        }
        for name, same in (("same node", True), ("different nodes", False))
        if same in groups
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


def all_reduce_line(result: Mapping[str, Any]) -> str:
    """Say what NCCL reached, or why it was left out; empty without GPUs."""
    found = result.get("all_reduce") or {}
    if "missing" in found:
        return f"all-reduce left out: {found['missing']}"
    if not found:
        return ""
    block = decimal_bytes(found["bytes"])
    rate = f"{found['GB/s']:.3g} GB/s bus bandwidth"
    return f"all-reduce over NCCL {found['nccl']}: {rate}, {block} on each worker"


def _between_nodes(matrix: Matrix, hosts: Sequence[str]) -> tuple[list[str], Matrix]:
    nodes = list(dict.fromkeys(hosts))
    values = _grouped(_cells_of(matrix), lambda i, j: (hosts[i], hosts[j]))
    return nodes, [
        [_median(values[a, b]) if (a, b) in values else None for b in nodes] for a in nodes
    ]


def _grid(matrix: Matrix, labels: Sequence[str], title: str) -> str:
    # Columns have numbers rather than names, which are long.
    rows = [[str(i) for i in range(len(labels))], *([short(v) for v in row] for row in matrix)]
    names = ["", *(f"{i} {label}" for i, label in enumerate(labels))]
    width, left = max(len(text) for row in rows for text in row) + 2, max(map(len, names))
    lines = [
        name.ljust(left) + "".join(text.rjust(width) for text in row)
        for name, row in zip(names, rows, strict=True)
    ]
    return "\n".join([title, *lines])


def short(value: float | None) -> str:
    """Write a bandwidth or latency with three digits, and ``-`` for what was not measured."""
    if value is None:
        return "-"
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:.{digits}f}" if value >= 1 else f"{value:.3g}"
