"""The chart of the report that people look at first: how long each workload took.

Each against its limit and what was published of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from bokeh.models import FixedTicker, Range1d

from hpcdask.bench.charts import (
    BLUE,
    FAINT,
    INK,
    ORANGE,
    RED,
    TEXT,
    Chart,
    Mark,
    duration,
    hover,
    number,
    plain,
    rows_figure,
    source,
)
from hpcdask.bench.records import decimal_bytes, failed

__all__ = ["published", "reached", "times"]

#: Name of a rate to what a workload has to wait for.
LIMIT_NAMES = {
    "memory": "memory speed",
    "random": "generator speed",
    "matrix_float64": "float64 matrix speed",
    "matrix_float32": "float32 matrix speed",
    "link": "exchange speed",
}
#: The part of the chart's width that the text beside a median may take.
TEXT_PART = 0.3
#: Sizes within one percent are the same.
SAME_SIZE = 1.01
#: Beyond this ratio of sizes, times are not in proportion: what is small waits for other things.
SCALABLE = 100.0


def reached(record: Mapping[str, Any]) -> str:
    """Return what part of its limit a record reached, and what that limit is; "" without one."""
    limit = record.get("limit")
    if not limit:
        return ""
    percent = 100 * limit["fraction"]
    return f"{percent:.{0 if percent >= 1 else 1}f} % of {limit_name(limit['by'])}"


def limit_name(name: str) -> str:
    """Write the name of a rate as words."""
    return LIMIT_NAMES.get(name, str(name))


def published(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the published figures of a record, and the time that its own size would take.

    To ``what`` and ``seconds`` come ``here``, the seconds times the ratio of the sizes, and
    ``scaled``, from what size; ``""`` where the sizes are the same or one is not known. Figures of
    more than a hundred times the size, or less than a hundredth, are left out.
    """
    found = []
    for one in record.get("published") or ():
        known = bool(one.get("bytes")) and bool(record.get("bytes"))
        ratio = record["bytes"] / one["bytes"] if known else 1.0
        if not 1 / SCALABLE <= ratio <= SCALABLE:
            continue
        scaled = not 1 / SAME_SIZE <= ratio <= SAME_SIZE
        found.append(
            {
                "what": str(one["what"]),
                "seconds": one["seconds"],
                "here": one["seconds"] * (ratio if scaled else 1),
                "scaled": f"scaled from {decimal_bytes(int(one['bytes']))}" if scaled else "",
            }
        )
    return found


def times(records: Sequence[Mapping[str, Any]], labels: Sequence[str]) -> Chart:
    """Draw the time of each record, its limit and what was published, on a logarithmic axis."""
    plot = rows_figure(labels, x_axis_type="log", x_range=_log_range(records))
    _name_ticks(plot)
    legend = [Mark(BLUE, "dot", "median; line: least to greatest; small dots: single runs")]
    if limits := [(y, record) for y, record in enumerate(records) if record.get("limit")]:
        _draw_limits(plot, limits)
        legend.append(Mark(INK, "tick", "limit of the hardware, measured on the same workers"))
    _draw_runs(plot, records)
    if any(map(failed, records)):
        legend.append(Mark(RED, "dot", "a check failed: the result is wrong"))
    found = [{"y": y, **one} for y, record in enumerate(records) for one in published(record)]
    if own := [one for one in found if not one["scaled"]]:
        _draw_published(plot, own, fill=ORANGE)
        legend.append(Mark(ORANGE, "diamond", "published"))
    if scaled := [one for one in found if one["scaled"]]:
        _draw_published(plot, scaled, fill="white")
        legend.append(Mark(ORANGE, "hollow", "published, scaled to this size"))
    return Chart(plot, legend)


def _draw_limits(plot: Any, limits: Sequence[tuple[int, Mapping[str, Any]]]) -> None:
    data = source(
        [
            {
                "y": y,
                "x": record["limit"]["seconds"],
                "median": record["seconds_median"],
                "time": duration(record["limit"]["seconds"]),
                "by": limit_name(record["limit"]["by"]),
            }
            for y, record in limits
        ]
    )
    plot.segment("x", "y", "median", "y", source=data, color=FAINT, line_width=2)
    how = {"marker": "dash", "angle": math.pi / 2, "size": 20, "color": INK, "line_width": 4}
    marks = plot.scatter("x", "y", source=data, **how)
    hover(plot, marks, [("limit", "@time"), ("by", "@by")])


def _draw_runs(plot: Any, records: Sequence[Mapping[str, Any]]) -> None:
    rows = [
        {
            "y": y,
            "median": record["seconds_median"],
            "least": record["seconds_min"],
            "greatest": record["seconds_max"],
            "colour": RED if failed(record) else BLUE,
            "time": duration(record["seconds_median"]),
            "spread": f"{duration(record['seconds_min'])} to {duration(record['seconds_max'])}",
            "text": _beside(record),
        }
        for y, record in enumerate(records)
    ]
    data = source(rows)
    plot.segment("least", "y", "greatest", "y", source=data, color="colour", line_width=4)
    runs = [
        {"x": seconds, "y": row["y"], "colour": row["colour"]}
        for row, record in zip(rows, records, strict=True)
        for seconds in record.get("seconds") or ()
    ]
    if runs:
        how = {"size": 7, "fill_color": "colour", "line_color": "white"}
        plot.scatter("x", "y", source=source(runs), **how)
    marks = plot.scatter(
        "median", "y", source=data, size=13, fill_color="colour", line_color="white"
    )
    hover(plot, marks, [("median", "@time"), ("runs", "@spread")])
    above = {"x_offset": -4, "y_offset": -11, "text_baseline": "bottom", "text_color": "colour"}
    plot.text("median", "y", "text", source=data, **above, **TEXT)


def _draw_published(plot: Any, found: Sequence[Mapping[str, Any]], *, fill: str) -> None:
    data = source(
        [
            {
                "y": one["y"],
                "x": one["here"],
                "what": one["what"],
                "here": duration(one["here"]),
                "told": ", ".join(filter(None, (duration(one["seconds"]), one["scaled"]))),
            }
            for one in found
        ]
    )
    how = {"marker": "diamond", "size": 15, "line_color": ORANGE, "line_width": 2}
    marks = plot.scatter("x", "y", source=data, fill_color=fill, **how)
    hover(plot, marks, [("", "@what"), ("here", "@here"), ("published", "@told")])


def _beside(record: Mapping[str, Any]) -> str:
    beside = "check failed" if failed(record) else reached(record)
    return plain(", ".join(filter(None, (duration(record["seconds_median"]), beside))))


def _log_range(records: Sequence[Mapping[str, Any]]) -> Any:
    """Leave room for all marks and the text beside the medians; a factor of ten at least."""
    marks = [
        value
        for record in records
        for value in (
            record["seconds_min"],
            record["seconds_max"],
            *([record["limit"]["seconds"]] if record.get("limit") else []),
            *(one["here"] for one in published(record)),
        )
    ]
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
