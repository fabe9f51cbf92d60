"""The charts of the report: how long each workload took, what happened when in it.

Legends are no part of the figures: the page writes them above, where they have room.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bokeh.models import ColumnDataSource, FixedTicker, HoverTool, Range1d
from bokeh.plotting import figure

from hpcdask.bench.records import (
    decimal_bytes,
    duration,
    failed,
    limit_name,
    number,
    reached,
)
from hpcdask.logs import natural

Record = Mapping[str, Any]

#: The part of the chart's width that the text beside a median may take.
TEXT_PART = 0.36
#: Sizes within one percent are the same.
SAME_SIZE = 1.01
#: Beyond this ratio of sizes, times are not in proportion: what is small waits for other things.
SCALABLE = 100.0

#: Okabe and Ito's colours, which colour-blind people tell apart ("Color universal design", 2008).
BLUE, GREEN, SKY, ORANGE, PURPLE = "#0072b2", "#009e73", "#56b4e9", "#e69f00", "#cc79a7"
YELLOW, RED, INK = "#f0e442", "#d55e00", "#222222"
FAINT, REST, GRID = "#b9b9b4", "#9a9a94", "#e4e4e0"
NAMES = (BLUE, ORANGE, GREEN, PURPLE, SKY, YELLOW)
#: On these, white is easier to read than black.
DARK = (BLUE, GREEN, RED, INK)
#: Colours of the two forms of a workload, and what these are.
FORMS = {"stock": GREEN, "tuned": BLUE}
FORM_MEANINGS = {
    "stock": "stock: the program as Dask's documentation writes it",
    "tuned": "tuned: the same computation, laid out by hpcdask",
}
FONT = "Helvetica, Arial, sans-serif"
# A bare string would be the name of a column.
TEXT = {"text_font": {"value": FONT}, "text_font_size": "12px"}
#: Pixels of a row, and of the axis below.
ROW, ROOM = 46, 70
TIMELINE_HEIGHT = 768
#: Pixels in which all labels have room; on narrower pages a chart can be moved sideways.
LEAST_WIDTH = 720
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


# --- times ----------------------------------------------------------------------------------------


def published(record: Record) -> list[dict[str, Any]]:
    """Return the published figures of a record, and the time that its own size would take.

    ``here`` are the seconds times the ratio of the sizes, and ``scaled`` says from what size, or is
    ``""`` where that is the same or not known. Of sizes too far away there are none.
    """
    found = []
    for one in record.get("published") or ():
        known = bool(one.get("bytes")) and bool(record.get("bytes"))
        ratio = record["bytes"] / one["bytes"] if known else 1.0
        if not 1 / SCALABLE <= ratio <= SCALABLE:
            continue
        is_scaled = not 1 / SAME_SIZE <= ratio <= SAME_SIZE
        here = one["seconds"] * (ratio if is_scaled else 1)
        scaled = f"scaled from {decimal_bytes(int(one['bytes']))}" if is_scaled else ""
        found.append(
            {"what": str(one["what"]), "seconds": one["seconds"], "here": here, "scaled": scaled}
        )
    return found


def times(records: Sequence[Record], labels: Sequence[str]) -> Chart:
    """Draw the time of each record, its limit and what was published, on a logarithmic axis."""
    plot = _rows_figure(labels, x_axis_type="log", x_range=_log_range(records))
    _name_ticks(plot)
    forms = [str(record.get("form")) for record in records if not failed(record)]
    legend = [Mark(FORMS[form], "dot", FORM_MEANINGS[form]) for form in FORMS if form in forms]
    if not set(forms) <= set(FORMS):
        legend.append(Mark(PURPLE, "dot", "neither"))
    legend.append(Mark(FAINT, "dot", "large: median; line: least to greatest; small: single runs"))
    if limits := [(y, record) for y, record in enumerate(records) if record.get("limit")]:
        _draw_limits(plot, limits)
        legend.append(Mark(INK, "tick", "limit of the hardware, measured on the same workers"))
    _draw_runs(plot, records)
    if any(map(failed, records)):
        legend.append(Mark(RED, "dot", "a check failed: the result is wrong"))
    found = [{"y": y, **one} for y, record in enumerate(records) for one in published(record)]
    for fill, shape, meaning, some in (
        (ORANGE, "diamond", "published", [one for one in found if not one["scaled"]]),
        ("white", "hollow", "published, scaled to this size", [f for f in found if f["scaled"]]),
    ):
        if some:
            _draw_published(plot, some, fill=fill)
            legend.append(Mark(ORANGE, shape, meaning))
    return Chart(plot, legend)


def _draw_limits(plot: Any, limits: Sequence[tuple[int, Record]]) -> None:
    data = _source(
        {
            "y": y,
            "x": record["limit"]["seconds"],
            "median": record["seconds_median"],
            "time": duration(record["limit"]["seconds"]),
            "by": limit_name(record["limit"]["by"]),
        }
        for y, record in limits
    )
    plot.segment("x", "y", "median", "y", source=data, color=FAINT, line_width=2)
    how = {"marker": "dash", "angle": math.pi / 2, "size": 20, "color": INK, "line_width": 4}
    marks = plot.scatter("x", "y", source=data, **how)
    _hover(plot, marks, [("limit", "@time"), ("by", "@by")])


def _draw_runs(plot: Any, records: Sequence[Record]) -> None:
    data = _source(
        {
            "y": y,
            "median": record["seconds_median"],
            "least": record["seconds_min"],
            "greatest": record["seconds_max"],
            "colour": _colour(record),
            "time": duration(record["seconds_median"]),
            "spread": f"{duration(record['seconds_min'])} to {duration(record['seconds_max'])}",
            "text": _beside(record),
        }
        for y, record in enumerate(records)
    )
    plot.segment("least", "y", "greatest", "y", source=data, color="colour", line_width=4)
    runs = [
        {"x": seconds, "y": y, "colour": _colour(record)}
        for y, record in enumerate(records)
        for seconds in record.get("seconds") or ()
    ]
    how = {"fill_color": "colour", "line_color": "white"}
    if runs:
        plot.scatter("x", "y", source=_source(runs), size=7, **how)
    marks = plot.scatter("median", "y", source=data, size=13, **how)
    _hover(plot, marks, [("median", "@time"), ("runs", "@spread")])
    above = {"x_offset": -4, "y_offset": -11, "text_baseline": "bottom", "text_color": "colour"}
    plot.text("median", "y", "text", source=data, **above, **TEXT)


def _draw_published(plot: Any, found: Sequence[Record], *, fill: str) -> None:
    data = _source(
        {
            "y": one["y"],
            "x": one["here"],
            "what": one["what"],
            "here": duration(one["here"]),
            "told": ", ".join(filter(None, (duration(one["seconds"]), one["scaled"]))),
        }
        for one in found
    )
    how = {"marker": "diamond", "size": 15, "line_color": ORANGE, "line_width": 2}
    marks = plot.scatter("x", "y", source=data, fill_color=fill, **how)
    _hover(plot, marks, [("", "@what"), ("here", "@here"), ("published", "@told")])


def _colour(record: Record) -> str:
    return RED if failed(record) else FORMS.get(str(record.get("form")), PURPLE)


def _beside(record: Record) -> str:
    beside = "check failed" if failed(record) else reached(record)
    return plain(", ".join(filter(None, (duration(record["seconds_median"]), beside))))


def _log_range(records: Sequence[Record]) -> Any:
    """Leave room for all marks and the text beside the medians; a factor of ten at least."""
    marks = [record[name] for record in records for name in ("seconds_min", "seconds_max")]
    marks += [record["limit"]["seconds"] for record in records if record.get("limit")]
    marks += [one["here"] for record in records for one in published(record)]
    low, high = math.log10(min(marks)) - 0.15, math.log10(max(marks)) + 0.15
    if high - low < 1:
        low, high = (low + high - 1) / 2, (low + high + 1) / 2
    last = max(math.log10(record["seconds_median"]) for record in records)
    high = max(high, low + (last - low) / (1 - TEXT_PART))
    return Range1d(start=10**low, end=10**high)


def _name_ticks(plot: Any) -> None:
    # Bokeh's own ticks are those of a linear axis where a logarithmic one is short.
    low, high = math.log10(plot.x_range.start), math.log10(plot.x_range.end)
    mantissas = [1] if high - low > 4 else [1, 3] if high - low > 2.5 else [1, 2, 5]
    powers = range(math.floor(low), math.ceil(high))
    ticks = [m * 10.0**power for power in powers for m in mantissas]
    plot.xaxis.ticker = FixedTicker(ticks=ticks)
    plot.xaxis.major_label_overrides = {tick: f"{number(tick)} s" for tick in ticks}


# --- phases ---------------------------------------------------------------------------------------


def phases(records: Sequence[Record], labels: Sequence[str]) -> Chart:
    """Draw the phases of each record, one behind the other, as parts of a bar."""
    names = list(dict.fromkeys(str(p["name"]) for r in records for p in r["phases"]))
    fills = (*NAMES, RED, INK)
    colours = {name: fills[i] if i < len(fills) else REST for i, name in enumerate(names)}
    total = max(sum(p["seconds"] for p in r["phases"]) for r in records) or 1.0
    plot = _rows_figure(labels, x_range=Range1d(start=0, end=1.12 * total))
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
        how = {"x_offset": 8, "text_baseline": "middle", "text_color": INK}
        plot.text(left, y, [duration(left)], **how, **TEXT)
    data = _source(parts)
    how = {"fill_color": "colour", "line_color": "white"}
    bars = plot.hbar("y", 0.55, "right", "left", source=data, **how)
    _hover(plot, bars, [("", "@name"), ("time", "@time"), ("over workers", "@spread")])
    inside = {"text_align": "center", "text_baseline": "middle", "text_color": "ink"}
    plot.text("middle", "y", "text", source=data, **inside, **TEXT)
    return Chart(plot, [Mark(colours[name], "bar", name) for name in names])


# --- timeline -------------------------------------------------------------------------------------


def timeline(entries: Sequence[Record]) -> Chart:
    """Draw what each thread did when, of at least one entry of `hpcdask.bench.timeline.recorded`.

    A row for each thread, what came to it below what it computed.
    """
    found = {(str(e["worker"]), int(e["thread"])) for e in entries}
    threads = sorted(found, key=lambda one: (natural(one[0]), one[1]))
    several = len({worker for worker, _ in threads}) < len(threads)
    plot = _rows_figure(
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
            "top": y + (0.12 if late else -0.42),
            "bottom": y + 0.42,
            "colour": colours[str(entry["action"]), str(entry["name"])],
            "name": str(entry["name"]),
            "action": str(entry["action"]),
            "where": f"{entry['worker']}, thread {entry['thread']}",
            "time": duration(max(entry["stop"] - entry["start"], 0)),
        }
        for late in (False, True)
        for entry in entries
        if (entry["action"] != "compute") == late
        for y in [place[str(entry["worker"]), int(entry["thread"])]]
    ]
    how = {"fill_color": "colour", "line_color": "white", "line_width": 0.4}
    bars = plot.quad("left", "right", "top", "bottom", source=_source(parts), **how)
    tips = [("", "@name"), ("", "@action"), ("time", "@time"), ("from", "@left{0.000} s")]
    _hover(plot, bars, [*tips, ("worker", "@where")])
    return Chart(plot, legend)


def _timeline_colours(
    entries: Sequence[Record],
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


# --- common ---------------------------------------------------------------------------------------


def _rows_figure(labels: Sequence[str], *, row: int = ROW, tools: str = "save", **how: Any) -> Any:
    """Make an empty figure with a row of so many pixels for each label, the first at the top.

    Too long labels are cut, and some left out where rows are narrow.
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


def _hover(plot: Any, renderer: Any, tooltips: list[tuple[str, str]]) -> None:
    """Show columns of what is below the pointer."""
    plot.add_tools(HoverTool(renderers=[renderer], tooltips=tooltips, visible=False))


def _source(rows: Iterable[Record]) -> Any:
    """Turn rows, of one at least, into columns for Bokeh."""
    found = list(rows)
    return ColumnDataSource({name: [row[name] for row in found] for name in found[0]})


def plain(text: str) -> str:
    """Keep Bokeh from reading TeX in a text, for which it would fetch MathJax from the network."""
    return re.sub(r"([$\\])(?=[$\[\]()])", "\\1\u200b", text)


def _short(label: str) -> str:
    cut = label if len(label) <= LABEL_CHARACTERS else label[: LABEL_CHARACTERS - 1] + "…"
    return plain(cut)
