"""The charts of the report that show what happened when, and what all its charts share.

Legends are no part of the figures: the page writes them above, where they have room.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bokeh.models import ColumnDataSource, FixedTicker, HoverTool, Range1d
from bokeh.plotting import figure

__all__ = ["Chart", "Mark", "phases", "timeline"]

#: Okabe and Ito's colours, which colour-blind people tell apart ("Color universal design", 2008).
BLUE, GREEN, SKY, ORANGE, PURPLE = "#0072b2", "#009e73", "#56b4e9", "#e69f00", "#cc79a7"
YELLOW, RED, INK = "#f0e442", "#d55e00", "#222222"
FAINT, REST, GRID = "#b9b9b4", "#9a9a94", "#e4e4e0"
NAMES = (BLUE, ORANGE, GREEN, PURPLE, SKY, YELLOW)
#: On these, white is easier to read than black.
DARK = (BLUE, GREEN, RED, INK)
FONT = "Helvetica, Arial, sans-serif"
# A bare string would be the name of a column.
TEXT = {"text_font": {"value": FONT}, "text_font_size": "12px"}
#: Pixels of a row, and of the axis below.
ROW, ROOM = 46, 70
TIMELINE_HEIGHT = 768
#: Pixels in which all labels have room; on narrower pages a chart can be moved sideways.
LEAST_WIDTH = 640
LABEL_CHARACTERS = 44


@dataclass(frozen=True)
class Mark:
    """A line of a legend; the shape is a dot, bar, tick, diamond or hollow."""

    colour: str
    shape: str
    meaning: str


@dataclass(frozen=True)
class Chart:
    """A figure of Bokeh, and what its colours and shapes mean."""

    figure: Any
    legend: list[Mark]


# --- phases ---------------------------------------------------------------------------------------


def phases(records: Sequence[Mapping[str, Any]], labels: Sequence[str]) -> Chart:
    """Draw the phases of each record, one behind the other, as parts of a bar."""
    names = list(dict.fromkeys(str(p["name"]) for r in records for p in r["phases"]))
    fills = (*NAMES, RED, INK)
    colours = {name: fills[i] if i < len(fills) else REST for i, name in enumerate(names)}
    total = max(sum(p["seconds"] for p in r["phases"]) for r in records) or 1.0
    plot = rows_figure(labels, x_range=Range1d(start=0, end=1.12 * total))
    plot.xaxis.axis_label = "seconds"
    parts = []
    for y, record in enumerate(records):
        left = 0.0
        for phase in record["phases"]:
            right = left + phase["seconds"]
            colour, time = colours[str(phase["name"])], duration(phase["seconds"])
            parts.append(
                {
                    "y": y,
                    "left": left,
                    "right": right,
                    "middle": (left + right) / 2,
                    "colour": colour,
                    "ink": "#ffffff" if colour in DARK else INK,
                    "name": str(phase["name"]),
                    "time": time,
                    "spread": " to ".join(map(duration, phase.get("spread") or ())) or "not known",
                    "text": time if right - left > 0.07 * total else "",
                }
            )
            left = right
        plot.text(
            left, y, [duration(left)], x_offset=8, text_baseline="middle", text_color=INK, **TEXT
        )
    data = source(parts)
    bars = plot.hbar(
        "y", 0.55, "right", "left", source=data, fill_color="colour", line_color="white"
    )
    hover(plot, bars, [("", "@name"), ("time", "@time"), ("over workers", "@spread")])
    how = {"text_align": "center", "text_baseline": "middle", "text_color": "ink", **TEXT}
    plot.text("middle", "y", "text", source=data, **how)
    return Chart(plot, [Mark(colours[name], "bar", name) for name in names])


# --- timeline -------------------------------------------------------------------------------------


def timeline(entries: Sequence[Mapping[str, Any]]) -> Chart:
    """Draw what each thread did when, of at least one entry of `hpcdask.bench.timeline.recorded`.

    A row for each thread, what came to it below what it computed.
    """
    threads = sorted({(str(e["worker"]), int(e["thread"])) for e in entries}, key=_natural)
    several = len({worker for worker, _ in threads}) < len(threads)
    plot = rows_figure(
        [f"{worker}, thread {thread}" if several else worker for worker, thread in threads],
        row=max(5, min(28, TIMELINE_HEIGHT // len(threads))),
        x_range=Range1d(start=0, end=1.01 * max(entry["stop"] for entry in entries)),
        tools="xpan,xwheel_zoom,xbox_zoom,reset,save",
    )
    plot.xaxis.axis_label = "seconds from the start of the run"
    colours, legend = _timeline_colours(entries)
    place = {thread: y for y, thread in enumerate(threads)}
    # Transfers come last, on top: they go on while the thread computes for another Dask task.
    parts = [
        {
            "left": entry["start"],
            "right": entry["stop"],
            "top": place[str(entry["worker"]), int(entry["thread"])] + (0.12 if late else -0.42),
            "bottom": place[str(entry["worker"]), int(entry["thread"])] + 0.42,
            "colour": colours[str(entry["action"]), str(entry["name"])],
            "name": str(entry["name"]),
            "action": str(entry["action"]),
            "where": f"{entry['worker']}, thread {entry['thread']}",
            "time": duration(max(entry["stop"] - entry["start"], 0)),
        }
        for late in (False, True)
        for entry in entries
        if (entry["action"] != "compute") == late
    ]
    bars = plot.quad(
        "left",
        "right",
        "top",
        "bottom",
        source=source(parts),
        fill_color="colour",
        line_color="white",
        line_width=0.4,
    )
    tips = [("", "@name"), ("", "@action"), ("time", "@time"), ("from", "@left{0.000} s")]
    hover(plot, bars, [*tips, ("worker", "@where")])
    return Chart(plot, legend)


def _timeline_colours(
    entries: Sequence[Mapping[str, Any]],
) -> tuple[dict[tuple[str, str], str], list[Mark]]:
    """Choose colours for actions and names; of names those that took longest have their own."""
    busy: Counter[str] = Counter()
    for entry in entries:
        if entry["action"] == "compute":
            busy[str(entry["name"])] += entry["stop"] - entry["start"]
    names = [name for name, _ in busy.most_common()]
    first, n_more = names[: len(NAMES)], len(names) - len(NAMES)
    colours = {("compute", name): REST for name in names}
    colours.update({("compute", name): c for name, c in zip(first, NAMES, strict=False)})
    legend = [Mark(colours["compute", name], "bar", name) for name in first]
    if n_more > 0:
        legend.append(Mark(REST, "bar", f"{n_more} other names" if n_more > 1 else names[-1]))
    for action in sorted({str(entry["action"]) for entry in entries} - {"compute"}):
        colour = RED if action == "transfer" else INK
        legend.append(Mark(colour, "bar", action.replace("-", " ")))
        colours.update({(action, str(e["name"])): colour for e in entries if e["action"] == action})
    return colours, legend


def _natural(thread: tuple[str, int]) -> tuple[Any, ...]:
    """Sort w2 before w10."""
    parts = re.split(r"(\d+)", thread[0])
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in parts), thread[1]


# --- common ---------------------------------------------------------------------------------------


def rows_figure(labels: Sequence[str], *, row: int = ROW, tools: str = "save", **how: Any) -> Any:
    """Make an empty figure with a row of so many pixels for each label, the first at the top.

    Too long labels are cut, and some left out where rows are narrow. The rest is for Bokeh's
    figure.
    """
    size = 12 if row >= 16 else 10
    plot = figure(
        y_range=Range1d(start=len(labels) - 0.3, end=-0.7),
        height=ROOM + row * len(labels),
        sizing_mode="stretch_width",
        min_width=LEAST_WIDTH,
        tools=tools,
        active_scroll=None,  # a page that scrolls must not get stuck in a chart
        min_border_right=20,
        **how,
    )
    shown = range(0, len(labels), math.ceil((size + 2) / row))
    plot.yaxis.ticker = FixedTicker(ticks=list(shown))
    plot.yaxis.major_label_overrides = {y: _short(labels[y]) for y in shown}
    plot.toolbar.logo = None
    plot.toolbar.autohide = True
    plot.outline_line_color = plot.background_fill_color = plot.border_fill_color = None
    plot.ygrid.grid_line_color = None
    plot.xgrid.grid_line_color = GRID
    for axis in (plot.xaxis, plot.yaxis):
        axis.axis_line_color = axis.major_tick_line_color = FAINT
        axis.minor_tick_line_color = None
        axis.major_label_text_font = axis.axis_label_text_font = FONT
        axis.major_label_text_font_size = axis.axis_label_text_font_size = "12px"
        axis.major_label_text_color = axis.axis_label_text_color = INK
        axis.axis_label_text_font_style = "normal"
    plot.yaxis.major_label_text_font_size = f"{size}px"
    plot.yaxis.major_tick_line_color = None
    return plot


def hover(plot: Any, renderer: Any, tooltips: list[tuple[str, str]]) -> None:
    """Show columns of what is below the pointer."""
    plot.add_tools(HoverTool(renderers=[renderer], tooltips=tooltips, visible=False))


def source(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Turn rows, of one at least, into columns for Bokeh."""
    return ColumnDataSource({name: [row[name] for row in rows] for name in rows[0]})


def number(value: float) -> str:
    """Write a number with three digits, or all digits before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """Write a time with the unit that suits it."""
    if seconds >= 600:
        return f"{number(seconds / 60)} min"
    if seconds >= 0.1:
        return f"{number(seconds)} s"
    return f"{number(1e3 * seconds)} ms" if seconds >= 1e-4 else f"{number(1e6 * seconds)} µs"


def plain(text: str) -> str:
    """Keep Bokeh from reading TeX in a text, for which it would fetch MathJax from the network."""
    return re.sub(r"([$\\])(?=[$\[\]()])", "\\1\u200b", text)


def _short(label: str) -> str:
    cut = label if len(label) <= LABEL_CHARACTERS else label[: LABEL_CHARACTERS - 1] + "…"
    return plain(cut)
