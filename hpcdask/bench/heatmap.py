"""A matrix between workers as a picture: an SVG with nothing in it but shapes and text."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from itertools import groupby
from xml.sax.saxutils import escape

__all__ = ["svg"]

#: From low to high, dark blue over grey to yellow: told apart by colour-blind people, and in grey.
COLOURS = ((0, 34, 78), (61, 78, 107), (124, 123, 120), (187, 173, 104), (254, 232, 56))
#: Paper and ink of its own, so that it can be read on a dark page too.
PAPER, INK, FAINT, MISSING, MARK = "#fbfbf9", "#222222", "#6b6b6b", "#e4e4e0", "#c8102e"
#: More workers than this have no numbers in the cells, and more than that no names.
MAX_NUMBERED, MAX_NAMED = 16, 32
#: Values that span more than this are coloured by their logarithm.
LOG_RATIO = 10.0
FONT = "font-family='Helvetica, Arial, sans-serif'"
CHARACTER = 0.58  # mean width of one, in units of the font's size


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

    Workers of one host stand together. ``slow`` says what to mark: the row and column of a cell, or
    the one number of a worker.
    """
    n = len(names)
    cell = 56 if n <= 8 else 44 if n <= MAX_NUMBERED else 20 if n <= MAX_NAMED else 12
    size = 12 if n <= MAX_NUMBERED else 11
    several = len(set(hosts)) > 1
    labels = [
        # The bracket of a node has its name already.
        name.removeprefix(f"{host}-") if several else name
        for name, host in zip(names, hosts, strict=True)
    ]
    if n > MAX_NAMED:
        labels = [""] * n
    label_room = max(_width(label, size) for label in labels) + 8
    # Nodes stand outside the names.
    host_room = size + 10 if several else 0
    left, top = 34 + host_room + label_room, 68 + host_room + _slanted(label_room)
    right, bottom = left + n * cell, top + n * cell
    low, high = _range(matrix)
    scale = _Scale(low, high)
    legend = right + 28
    width = max(legend + 78, 24 + _width(title, 16) + 24, right + label_room + 12)
    height = max(bottom, top + 120) + (48 if slow else 28)
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' {FONT} font-size='{size}'",
        f"width='{width:.0f}' height='{height:.0f}' viewBox='0 0 {width:.0f} {height:.0f}'>",
        f"<title>{escape(title)}</title>",
        f"<rect width='100%' height='100%' rx='6' fill='{PAPER}'/>",
        _text(24, 30, title, size=16, weight="bold"),
        _text(left, 50, "receives", fill=FAINT),
        _text(22, bottom, "sends", fill=FAINT, turn=-90),
    ]
    parts += _cells(matrix, scale, left, top, cell, numbers=n <= MAX_NUMBERED)
    blamed = {who[0] for who in slow if len(who) == 1}
    parts += _labels(labels, blamed, left, top, cell, size)
    if several:
        parts += _hosts(hosts, left, top, cell, label_room, size)
    for row, column in (who for who in slow if len(who) == 2):
        parts.append(
            f"<rect x='{left + column * cell + 1:g}' y='{top + row * cell + 1:g}' "
            f"width='{cell - 3:g}' height='{cell - 3:g}' fill='none' stroke='{MARK}' "
            f"stroke-width='{2.5 if cell > 20 else 2}'/>"
        )
    if slow:
        note = "red: slow, below half of what is usual"
        parts.append(_text(left, bottom + 29, note, fill=MARK))
    parts += _legend(scale, legend, top, min(max(n * cell, 120), 320), unit)
    return "\n".join([*parts, "</svg>\n"])


class _Scale:
    """Values to colours, and the values to name in the legend."""

    def __init__(self, low: float, high: float) -> None:
        self.log = low > 0 and high / low > LOG_RATIO
        self.low, self.high = (low, high) if self.log else (0.0, high or 1.0)

    def place(self, value: float) -> float:
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return value / self.high

    def value(self, place: float) -> float:
        if self.log:
            return float(self.low * (self.high / self.low) ** place)
        return place * self.high

    def colour(self, place: float) -> tuple[int, int, int]:
        position = min(max(place, 0.0), 1.0) * (len(COLOURS) - 1)
        index = min(int(position), len(COLOURS) - 2)
        part = position - index
        red, green, blue = (
            round(a + (b - a) * part)
            for a, b in zip(COLOURS[index], COLOURS[index + 1], strict=True)
        )
        return red, green, blue


def _range(matrix: Sequence[Sequence[float | None]]) -> tuple[float, float]:
    values = [value for row in matrix for value in row if value is not None]
    return (min(values), max(values)) if values else (0.0, 1.0)


def _cells(
    matrix: Sequence[Sequence[float | None]],
    scale: _Scale,
    left: float,
    top: float,
    cell: int,
    *,
    numbers: bool,
) -> list[str]:
    parts = []
    for i, row in enumerate(matrix):
        for j, value in enumerate(row):
            x, y = left + j * cell, top + i * cell
            colour = scale.colour(scale.place(value)) if value is not None else None
            fill = f"rgb{colour}".replace(" ", "") if colour else MISSING
            side = cell - 1
            parts.append(
                f"<rect x='{x:g}' y='{y:g}' width='{side}' height='{side}' fill='{fill}'/>"
            )
            if numbers and value is not None and colour:
                ink = "#ffffff" if sum(colour) < 3 * 118 else "#000000"
                parts.append(
                    _text(x + side / 2, y + side / 2 + 4, _short(value), fill=ink, anchor="middle")
                )
    return parts


def _labels(
    labels: Sequence[str], blamed: Collection[int], left: float, top: float, cell: int, size: int
) -> list[str]:
    parts = []
    for i, label in enumerate(labels):
        if label:
            middle = i * cell + cell / 2
            fill, weight = (MARK, "bold") if i in blamed else (INK, None)
            flat = _width(label, size) < cell
            for x, y, anchor, turn in (
                (left - 8, top + middle + size / 3, "end", None),
                (left + middle, top - 8, "middle" if flat else "start", None if flat else -50),
            ):
                parts.append(_text(x, y, label, fill=fill, weight=weight, anchor=anchor, turn=turn))
    return parts


def _hosts(
    hosts: Sequence[str], left: float, top: float, cell: int, label_room: float, size: int
) -> list[str]:
    """Brackets with the names of the nodes, and lines between their cells."""
    parts = []
    x, y = left - label_room - 6, top - _slanted(label_room) - 6
    end = len(hosts) * cell
    for host, group in groupby(range(len(hosts)), key=lambda i: hosts[i]):
        members = list(group)
        start, stop = members[0] * cell, (members[-1] + 1) * cell
        short = _clip(host, (stop - start) / (CHARACTER * size))
        parts += [
            _line(f"M {x:g} {top + start + 2:g} V {top + stop - 3:g}", FAINT, 2),
            _line(f"M {left + start + 2:g} {y:g} H {left + stop - 3:g}", FAINT, 2),
        ]
        middle = (start + stop) / 2
        parts.append(_text(x - 6, top + middle, short, anchor="middle", turn=-90))
        parts.append(_text(left + middle, y - 6, short, anchor="middle"))
        if start:
            parts += [
                _line(f"M {left + start - 0.5:g} {top:g} v {end}", PAPER, 3),
                _line(f"M {left:g} {top + start - 0.5:g} h {end}", PAPER, 3),
            ]
    return parts


def _legend(scale: _Scale, x: float, top: float, height: float, unit: str) -> list[str]:
    steps = 40
    parts = [_text(x, top - 10, unit, weight="bold")]
    for step in range(steps):
        red, green, blue = scale.colour(1 - (step + 0.5) / steps)
        y = top + height * step / steps
        parts.append(
            f"<rect x='{x:g}' y='{y:.1f}' width='16' height='{height / steps + 0.6:.1f}' "
            f"fill='rgb({red},{green},{blue})'/>"
        )
    for tick in range(5):
        place = tick / 4
        y = top + height * (1 - place)
        parts.append(_text(x + 22, y + 4, _short(scale.value(place))))
    if scale.log:
        parts.append(_text(x, top + height + 20, "logarithmic", fill=FAINT))
    return parts


def _line(path: str, colour: str, width: int) -> str:
    return f"<path d='{path}' stroke='{colour}' stroke-width='{width}' fill='none'/>"


def _text(
    x: float,
    y: float,
    text: str,
    *,
    fill: str = INK,
    anchor: str = "start",
    size: int | None = None,
    weight: str | None = None,
    turn: int | None = None,
) -> str:
    more = f" text-anchor='{anchor}'" if anchor != "start" else ""
    more += f" font-size='{size}'" if size else ""
    more += f" font-weight='{weight}'" if weight else ""
    more += f" transform='rotate({turn} {x:g} {y:g})'" if turn else ""
    return f"<text x='{x:g}' y='{y:g}' fill='{fill}'{more}>{escape(text)}</text>"


def _width(text: str, size: int) -> float:
    return CHARACTER * size * len(text)


def _slanted(width: float) -> float:
    return width * math.sin(math.radians(50))


def _clip(text: str, room: float) -> str:
    return text if len(text) <= room else text[: max(1, int(room) - 1)] + "…"


def _short(value: float) -> str:
    digits = 0 if value >= 100 or not value else 1 if value >= 10 else 2
    return f"{value:.{digits}f}" if value >= 1 or not value else f"{value:.3g}"
