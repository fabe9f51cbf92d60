"""Findings, and their report: text for people, JSON for programs."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Literal, TypeVar

import click

from hpcdask.logs import numbered, plural, some
from hpcdask.spec.records import Record

if TYPE_CHECKING:
    from .nodes import Node

K = TypeVar("K")
T = TypeVar("T")
#: ``ok``; ``note``: it does not work, and may not be needed; ``warning``: it works, but slowly or
#: not always; ``error``: it does not work.
Status = Literal["ok", "note", "warning", "error"]
EXIT_CODES: dict[Status, int] = {"ok": 0, "note": 0, "warning": 1, "error": 2}
COLOURS = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "red"}
#: Beginning of the value of a warning of lost speed.
SLOW = "slow: "
#: Columns where neither a terminal nor the variable COLUMNS tells; fewest for the values.
PLAIN_WIDTH, LEAST_WIDTH = 160, 20
#: More nodes or topics than these are counted, not named.
NAMED = 4


@dataclass(frozen=True)
class Finding(Record):
    """Finding on one thing that was looked at.

    `group` is its place in the report, such as ``GPUs``. `advice` is only empty for ``ok``, where
    it may say what would be better still. `ranks` are those of the node that it holds for; empty
    for all of them.
    """

    group: str
    topic: str
    status: Status
    value: str
    advice: str = ""
    ranks: tuple[int, ...] = ()


def slow(group: str, topic: str, value: str, advice: str) -> Finding:
    """Return a warning of lost speed."""
    return Finding(group, topic, "warning", f"{SLOW}{value}", advice)


def together(found: Iterable[tuple[K, T]]) -> dict[K, list[T]]:
    """Return each finding, or other thing, once, with all that it was found of."""
    merged: dict[K, list[T]] = {}
    for thing, source in found:
        merged.setdefault(thing, []).append(source)
    return merged


@dataclass(frozen=True)
class Report:
    """Findings of each node, and of the launch; `ranks` is how many the launcher started."""

    nodes: Sequence[tuple[Node, Sequence[Finding]]]
    between_nodes: Sequence[Finding]
    ranks: int

    def every(self) -> list[Finding]:
        """Return the findings of the nodes and of the launch."""
        return [*chain.from_iterable(findings for _, findings in self.nodes), *self.between_nodes]

    @property
    def exit_code(self) -> int:
        """Exit code: 0 all is well, 1 with warnings, 2 with errors."""
        return max((EXIT_CODES[finding.status] for finding in self.every()), default=0)

    @property
    def verdict(self) -> str:
        """Verdict of all findings, in one line."""

        def topics(status: Status, start: str = "") -> str:
            found = (one for one in self.every() if one.status == status)
            return some((one.topic for one in found if one.value.startswith(start)), NAMED)

        if errors := topics("error"):
            return f"error: Dask will not run as it should ({errors})"
        if losses := topics("warning", SLOW):
            return f"slow: Dask runs, but not at full speed ({losses})"
        if warnings := topics("warning"):
            return f"warning: Dask runs. Read the warnings above: {warnings}"
        if any(node.gpus for node, _ in self.nodes):
            return "ok: nothing keeps Dask from running at full speed on these GPUs"
        return "ok: Dask runs here, on the CPU"


def to_json(report: Report) -> str:
    """Return the report as a JSON object."""
    whole = {
        "verdict": report.verdict,
        "exit_code": report.exit_code,
        "ranks": report.ranks,
        "nodes": [
            {"host": node.name, "ranks": [*node.reports], "findings": findings}
            for node, findings in report.nodes
        ],
        "between_nodes": report.between_nodes,
    }
    return json.dumps(whole, indent=2, default=asdict)


def to_text(report: Report) -> str:
    """Return the report as text for people, as wide as the terminal, in its colours."""
    places = {**_places(report.nodes), **dict.fromkeys(report.between_nodes, "")}
    topics = max((len(finding.topic) for finding in places), default=0)
    indent = " " * (topics + 11)
    width = max(shutil.get_terminal_size((PLAIN_WIDTH, 0)).columns, len(indent) + LEAST_WIDTH)
    wrapper = textwrap.TextWrapper(width, indent, indent, break_on_hyphens=False)
    hosts = some((node.name for node, _ in report.nodes), NAMED)
    lines = [f"hpcdask doctor: {hosts}, {plural(report.ranks, 'rank')}"]
    for group, found in together((one.group, one) for one in places).items():
        lines += ["", f"        {click.style(group, bold=True)}"]
        for one in chain.from_iterable(together((one.topic, one) for one in found).values()):
            value = f"{one.value} [{places[one]}]" if places[one] else one.value
            status = click.style(f"{one.status:9}", fg=COLOURS[one.status])
            lines.append(f"{status} {one.topic:{topics}} {wrapper.fill(value).lstrip()}")
            lines += [wrapper.fill(f"-> {one.advice}")] if one.advice else []
    worst: Status = ("ok", "warning", "error")[report.exit_code]
    return "\n".join([*lines, "", click.style(report.verdict, fg=COLOURS[worst])])


def _places(nodes: Sequence[tuple[Node, Sequence[Finding]]]) -> dict[Finding, str]:
    """Return the findings, equal ones once, each with its nodes and ranks unless it is of all."""
    sources = (
        (replace(finding, ranks=()), (node.name, finding.ranks))
        for node, findings in nodes
        for finding in findings
    )
    places = {}
    for finding, found in together(sources).items():
        hosts, ranks = zip(*found, strict=True)
        words = [some(hosts, NAMED)] if len(hosts) < len(nodes) else []
        words += [numbered("rank", some_ranks)] if (some_ranks := sum(ranks, ())) else []
        places[finding] = ", ".join(words)
    return places
