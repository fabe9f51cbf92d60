"""A matrix between workers as a picture: an SVG with nothing in it but shapes and text."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from itertools import groupby
from typing import Any

from bokeh.palettes import cividis
from jinja2 import Environment, PackageLoader, StrictUndefined

from hpcdask.bench.exchange_report import short

TEMPLATES = Environment(
    loader=PackageLoader("hpcdask.bench"),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=StrictUndefined,
)
#: From low to high, dark blue over grey to yellow: told apart by colour-blind people, and in grey.
COLOURS = cividis(256)
#: Paper and ink of its own, so that it can be read on a dark page too.
PAINT = {"paper": "#fbfbf9", "ink": "#222222", "faint": "#6b6b6b", "mark": "#c8102e"}
MISSING = "#e4e4e0"
#: More workers than this have no numbers in the cells, and more than that no names.
MAX_NUMBERED, MAX_NAMED = 16, 32
#: Values that span more than this are coloured by their logarithm.
LOG_RATIO = 10.0
CHARACTER = 0.58  # mean width of one, in units of the font's size
STEPS = 40  # of the legend


def svg(
    matrix: Sequence[Sequence[float | None]],
    names: Sequence[str],
    hosts: Sequence[str],
    *,
    title: str,
    unit: str,
    slow: Collection[tuple[int, ...]] = (),
) -> str:
    """Draw a matrix between workers: rows send, columns receive, None where nothing was measured.

    ``slow`` says what to mark: the row and column of a cell, or the one number of a worker.
    """
    n, several = len(names), len(set(hosts)) > 1
    cell = 56 if n <= 8 else 44 if n <= MAX_NUMBERED else 20 if n <= MAX_NAMED else 12
    size = 12 if n <= MAX_NUMBERED else 11
    # The bracket of a node has its name already.
    labels = [
        name.removeprefix(f"{host}-") if several else name
        for name, host in zip(names, hosts, strict=True)
    ]
    widths = [CHARACTER * size * len(label) for label in labels]
    room = (max(widths) if n <= MAX_NAMED else 0) + 8
    slanted = max(room * math.sin(math.radians(50)), size + 6)
    # Nodes stand outside the names.
    host_room = size + 10 if several else 0
    left, top = 34 + host_room + room, 68 + host_room + slanted
    right, bottom = left + n * cell, top + n * cell
    values = [value for row in matrix for value in row if value is not None] or [0.0]
    low, high = min(values), max(values) or 1.0
    is_log = low > 0 and high / low > LOG_RATIO

    def place(value: float) -> float:
        return math.log(value / low) / math.log(high / low) if is_log else value / high

    cells = [
        _cell(i, j, value, place(value or low), numbered=n <= MAX_NUMBERED)
        for i, row in enumerate(matrix)
        for j, value in enumerate(row)
    ]
    blamed = {who[0] for who in slow if len(who) == 1}
    named = zip(labels, [width < cell for width in widths], range(n), strict=True)
    quarters = [part / 4 for part in range(5)]
    places = {"n": n, "cell": cell, "size": size, "left": left, "top": top}
    words = {"title": title, "unit": unit, "is_log": is_log, "has_slow": bool(slow)}
    return TEMPLATES.get_template("heatmap.svg.j2").render(
        **PAINT,
        **places,
        **words,
        bracket_x=left - room - 6,
        bracket_y=top - slanted - 6,
        width=max(right + 106, CHARACTER * 16 * len(title) + 48, right + room + 12),
        height=max(bottom, top + 120) + (48 if slow else 28),
        cells=cells,
        labels=[(label, flat, i in blamed) for label, flat, i in named] if n <= MAX_NAMED else [],
        nodes=_nodes(hosts, cell / (CHARACTER * size)) if several else [],
        slow_cells=[who for who in slow if len(who) == 2],
        scale=[COLOURS[round((1 - (i + 0.5) / STEPS) * 255)] for i in range(STEPS)],
        ticks=[short(low * (high / low) ** q if is_log else q * high) for q in quarters],
    )


def _cell(i: int, j: int, value: float | None, place: float, *, numbered: bool) -> tuple[Any, ...]:
    """Return row, column, colour, number and the number's colour."""
    if value is None:
        return i, j, MISSING, "", ""
    fill = COLOURS[round(place * (len(COLOURS) - 1))]
    return i, j, fill, short(value) if numbered else "", "#ffffff" if place < 0.5 else "#000000"


def _nodes(hosts: Sequence[str], characters: float) -> list[tuple[str, int, int]]:
    """Return nodes, their first and last worker; each has room for so many characters a worker."""
    nodes = []
    for host, group in groupby(range(len(hosts)), key=lambda i: hosts[i]):
        members = list(group)
        fits = max(2, int(len(members) * characters))
        told = host if len(host) <= fits else f"{host[: fits - 1]}…"
        nodes.append((told, members[0], members[-1]))
    return nodes
