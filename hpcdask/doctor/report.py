"""Report of the doctor: text for people, JSON for programs; differences between nodes."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from dask.utils import format_bytes
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hpcdask.logs import numbered, plural, some

from .findings import EXIT_CODES, SLOW, Finding, Status
from .nodes import Node

#: Columns where neither a terminal nor the variable COLUMNS tells.
PLAIN_WIDTH = 160
STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "bold red"}
#: More nodes or topics than these are counted, not named.
NAMED = 4
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


def _counted(things: Iterable[str]) -> str:
    counts = sorted(Counter(things).items())
    return ", ".join(f"{count} x {thing}" for thing, count in counts) or "none"


def _rows(node: Node) -> Iterator[tuple[str, Status, str]]:
    """Yield the properties that are compared: name, severity of a difference, and value."""
    facts, processes = node.facts, node.processes.values()
    if facts.software:
        yield "Python", "error", facts.software.python
        yield "kernel", "ok", facts.software.kernel
    if facts.gpus:
        yield "driver", "warning", facts.gpus.driver or "none"
        yield "GPUs", "warning", _counted(gpu.name for gpu in node.gpus)
    if fabric := facts.fabric:
        yield "InfiniBand ports", "warning", _counted(port.state for port in fabric.infiniband)
        yield "UCX modules", "warning", " ".join(fabric.ucx.transports) or "none"
        yield "interfaces", "ok", " ".join(one.name for one in fabric.interfaces) or "none"
    if facts.scratch:
        yield "scratch", "ok", f"{facts.scratch.path} ({facts.scratch.type})"
    if processes:
        yield "host memory", "ok", format_bytes(min(one.memory for one in processes))
        yield "cores", "ok", str(len(node.cores))
        yield "open files", "warning", str(min(one.nofile[0] for one in processes))
        yield "locked memory", "ok", str(min(one.memlock[0] for one in processes))
        environ = sorted(next(iter(processes)).env.items())
        known = [f"{name}={value}" for name, value in environ if name.startswith(("UCX_", "DASK_"))]
        yield "settings", "warning", " ".join(known) or "none"


def differences(nodes: Sequence[Node]) -> list[Difference]:
    """Return the properties that are not the same on all nodes that reported them."""
    found: dict[str, Difference] = {}
    for node in nodes:
        for what, status, value in _rows(node):
            found.setdefault(what, Difference(what, status, {})).values[node.name] = value
    packages = {node.name: node.facts.software.packages for node in nodes if node.facts.software}
    for name in sorted({name for known in packages.values() for name in known}):
        values = {host: known.get(name, "missing") for host, known in packages.items() if known}
        found[name] = Difference(name, "error" if name in ALIKE else "warning", values)
    return [one for one in found.values() if len(set(one.values.values())) > 1]


@dataclass(frozen=True)
class Report:
    """Findings of each node, and of the launch; `ranks` is how many the launcher started."""

    nodes: Sequence[tuple[Node, Sequence[Finding]]]
    launch: Sequence[Finding]
    differences: Sequence[Difference]
    ranks: int

    def every(self) -> list[Finding]:
        """Return the findings of the nodes, of the launch and of the comparison."""
        found = [finding for _, findings in self.nodes for finding in findings]
        return [*found, *self.launch, *(one.to_finding() for one in self.differences)]

    @property
    def exit_code(self) -> int:
        """0: all ok; 1: warnings; 2: errors."""
        return max((EXIT_CODES[finding.status] for finding in self.every()), default=0)

    @property
    def verdict(self) -> str:
        """Verdict of all findings, in one line."""

        def topics(status: Status, start: str = "") -> str:
            found = (one for one in self.every() if one.status == status)
            return some((one.topic for one in found if one.value.startswith(start)), NAMED)

        if errors := topics("error"):
            return f"error: Dask will not run as it should ({errors})"
        if slow := topics("warning", SLOW):
            return f"slow: Dask runs, but not at full speed ({slow})"
        if warnings := topics("warning"):
            return f"warning: Dask runs. Read the warnings above: {warnings}"
        if any(node.gpus for node, _ in self.nodes):
            return "ok: nothing keeps Dask from running at full speed on these GPUs"
        return "ok: Dask runs here, on the CPU"


def to_json(report: Report) -> str:
    """Return the report as a JSON object."""
    nodes = [
        {"host": node.name, "ranks": list(node.ranks), "findings": list(map(asdict, findings))}
        for node, findings in report.nodes
    ]
    whole = {
        "verdict": report.verdict,
        "exit_code": report.exit_code,
        "ranks": report.ranks,
        "nodes": nodes,
        "between_nodes": list(map(asdict, report.launch)),
        "differences": list(map(asdict, report.differences)),
    }
    return json.dumps(whole, indent=2)


def print_text(report: Report) -> None:
    """Write the report to standard output: in colour on a terminal, else without."""
    if sys.stdout is None:  # closed
        return
    # Open MPI gives rank 0 a terminal, whatever mpirun writes to
    if sys.stdout.isatty() and report.ranks == 1:
        _render(report, Console(highlight=False))
        return
    plain = io.StringIO()
    width = shutil.get_terminal_size((PLAIN_WIDTH, 0)).columns
    _render(report, Console(file=plain, width=width, highlight=False, no_color=True))
    text = "\n".join(map(str.rstrip, plain.getvalue().splitlines()))
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)


def _render(report: Report, console: Console) -> None:
    names = _hosts([node.name for node, _ in report.nodes])
    console.print(Text(f"hpcdask doctor: {names}, {plural(report.ranks, 'rank')}"))
    console.print(_finding_table(report))
    if report.differences:
        console.print(Text("\n        differences between nodes", style="bold"))
        console.print(_difference_table(report.differences))
    worst = ("ok", "warning", "error")[report.exit_code]
    console.print("", Text(report.verdict, style=STYLES[worst]), sep="\n")


def _finding_table(report: Report) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(width=7)
    table.add_column(max_width=27, overflow="fold")
    table.add_column(overflow="fold")
    groups: dict[str, list[tuple[Finding, str]]] = {}
    for finding, where in [*_together(report.nodes), *((one, "") for one in report.launch)]:
        groups.setdefault(finding.group, []).append((finding, where))
    for group, findings in groups.items():
        table.add_row("", "", "")
        table.add_row("", Text(group, style="bold"), "")
        for finding, where in findings:
            status, value = finding.status, Text(finding.value)
            if where:
                value.append(f" [{where}]", style="cyan")
            if finding.advice:
                value.append(f"\n-> {finding.advice}", style="dim" if status == "ok" else "")
            table.add_row(Text(status, style=STYLES[status]), Text(f"  {finding.topic}"), value)
    return table


def _together(nodes: Sequence[tuple[Node, Sequence[Finding]]]) -> list[tuple[Finding, str]]:
    """Return the findings of all nodes, equal ones once, each with the nodes and ranks."""
    merged: dict[Finding, list[tuple[str, tuple[int, ...]]]] = {}
    for node, findings in nodes:
        for finding in findings:
            merged.setdefault(replace(finding, ranks=()), []).append((node.name, finding.ranks))
    order = list(dict.fromkeys((one.group, one.topic) for one in merged))
    result = []
    for finding, places in merged.items():
        ranks = [rank for _, some in places for rank in some]
        words = [_hosts([host for host, _ in places])] if len(places) < len(nodes) else []
        words += [numbered("rank", ranks)] if ranks else []
        result.append((finding, ", ".join(words)))
    return sorted(result, key=lambda pair: order.index((pair[0].group, pair[0].topic)))


def _hosts(hosts: Sequence[str]) -> str:
    if len(hosts) > NAMED:
        return f"{len(hosts)} nodes ({', '.join(hosts[:2])} ... {hosts[-1]})"
    return ", ".join(hosts)


def _difference_table(rows: Sequence[Difference]) -> Table:
    """Return a table with a column for each group of nodes that are alike in everything."""
    columns: dict[tuple[str, ...], list[str]] = {}
    for host in dict.fromkeys(host for row in rows for host in row.values):
        key = tuple(row.values.get(host, "") for row in rows)
        columns.setdefault(key, []).append(host)
    table = Table("", "", box=None, pad_edge=False, header_style="bold")
    for group in columns.values():
        table.add_column(Text(_hosts(group)), overflow="fold")
    for number, row in enumerate(rows):
        mark = Text(row.status, style=STYLES[row.status])
        table.add_row(mark, row.what, *(Text(key[number]) for key in columns))
    return table
