"""Charts of the report: times beside the limits, phases, and the rates between workers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from bokeh.models import ColumnDataSource, PrintfTickFormatter
from bokeh.palettes import Category20, Cividis256
from bokeh.plotting import figure
from bokeh.transform import linear_cmap, log_cmap
from dask.utils import format_time

from hpcdask.bench.records import failed, name_of, reached

Record = Mapping[str, Any]

#: Okabe and Ito's colours, which colour-blind people tell apart ("Color universal design", 2008).
COLOURS = {"tuned": "#0072b2", "stock": "#009e73", "wrong": "#d55e00"}
OTHER = "#cc79a7"
#: Pixels of a row, of a line of a legend, and of the axis.
ROW, LINE, ROOM = 30, 25, 70
#: Heat maps of more workers have small cells without numbers.
MAX_NUMBERED = 16
#: Rates that span more than this are coloured by their logarithm.
LOG_RATIO = 10.0


def times(records: Sequence[Record]) -> Any:
    """Draw the median, least and greatest time of each record, and its limit."""
    plot = _rows_figure([name_of(record) for record in records], "seconds", x_axis_type="log")
    rows = [
        {
            "name": name_of(record),
            "least": record["seconds_min"],
            "greatest": record["seconds_max"],
            "median": record["seconds_median"],
            "time": format_time(record["seconds_median"]),
            "limit": record["limit"]["seconds"] if record.get("limit") else math.nan,
            "reached": reached(record),
            "kind": "wrong" if failed(record) else str(record["form"]),
        }
        for record in records
    ]
    for kind in dict.fromkeys(row["kind"] for row in rows):
        source = _source([row for row in rows if row["kind"] == kind])
        how: dict[str, Any] = {"source": source, "color": COLOURS.get(kind, OTHER)}
        plot.segment("least", "name", "greatest", "name", line_width=4, **how)
        plot.scatter("median", "name", size=12, legend_label=f"{kind}: median, range", **how)
    if any(record.get("limit") for record in records):
        how = {"marker": "dash", "angle": math.pi / 2, "size": 20, "line_width": 3}
        label = "limit of the hardware"
        plot.scatter(
            "limit", "name", source=_source(rows), color="#222222", legend_label=label, **how
        )
    # Bokeh's own ticks are those of a linear axis where a logarithmic one is short.
    plot.xaxis.ticker = [digit * 10.0**power for power in range(-6, 6) for digit in (1, 2, 5)]
    plot.xaxis.formatter = PrintfTickFormatter(format="%g")
    _finish(plot, len(rows))
    plot.hover.tooltips = [("", "@name"), ("median", "@time"), ("", "@reached")]
    return plot


def phases(records: Sequence[Record]) -> Any:
    """Draw the phases of each record, one behind the other, as parts of a bar."""
    names = list(dict.fromkeys(part["name"] for record in records for part in record["phases"]))
    rows = []
    for record in records:
        seconds = {part["name"]: part["seconds"] for part in record["phases"]}
        rows.append({"label": name_of(record), **{name: seconds.get(name, 0) for name in names}})
    plot = _rows_figure([row["label"] for row in rows], "seconds")
    colours = Category20[20][: len(names)]
    plot.hbar_stack(
        names, y="label", height=0.6, source=_source(rows), color=colours, legend_label=names
    )
    _finish(plot, len(rows))
    plot.hover.tooltips = [("", "$name"), ("seconds", "@$name{0.000}")]
    return plot


def heat_map(result: Mapping[str, Any]) -> Any:
    """Draw the rates between all pairs of workers of a record's result as a heat map."""
    names = result["names"]
    cell = 48 if len(names) <= MAX_NUMBERED else 14
    rows = [
        {
            "sends": sender,
            "receives": receiver,
            "rate": result["GB/s"][i][j],
            "text": f"{result['GB/s'][i][j]:.3g}" if len(names) <= MAX_NUMBERED else "",
            "over": result["transport"][i][j],
        }
        for i, sender in enumerate(names)
        for j, receiver in enumerate(names)
        if i != j
    ]
    low, high = min(row["rate"] for row in rows), max(row["rate"] for row in rows)
    middle = math.sqrt(low * high) if LOG_RATIO * low < high else (low + high) / 2
    for row in rows:
        row["ink"] = "white" if row["rate"] < middle else "black"
    plot = _figure(
        x_range=names,
        y_range=names[::-1],
        x_axis_location="above",
        x_axis_label="receives",
        y_axis_label="sends",
        width=max(240, cell * len(names)) + 200,
        height=max(160, cell * len(names)) + 100,
    )
    source = _source(rows)
    # Between nodes, a slow pair would not be seen on a linear scale.
    scale = log_cmap if 0 < LOG_RATIO * low < high else linear_cmap
    colour = scale("rate", Cividis256, low, high)
    cells = plot.rect("receives", "sends", 1, 1, source=source, color=colour)
    how: dict[str, Any] = {"text_align": "center", "text_baseline": "middle"}
    plot.text("receives", "sends", "text", source=source, text_color="ink", **how)
    plot.add_layout(cells.construct_color_bar(title="GB/s"), "right")
    plot.xaxis.major_label_orientation = math.pi / 4
    plot.hover.renderers = [cells]
    plot.hover.tooltips = [("", "@sends to @receives"), ("GB/s", "@rate"), ("over", "@over")]
    return plot


def _rows_figure(labels: Sequence[str], title: str, **how: Any) -> Any:
    """Make an empty figure with a row for each label, the first at the top."""
    plot = _figure(y_range=labels[::-1], x_axis_label=title, **how)
    plot.sizing_mode, plot.min_width = "stretch_width", 720
    plot.ygrid.grid_line_color = None
    return plot


def _finish(plot: Any, n_rows: int) -> None:
    """Move the legend beside the rows, and make room for both."""
    legend = plot.legend[0]
    plot.add_layout(legend, "right")
    legend.border_line_color = None
    plot.height = ROOM + max(ROW * n_rows, LINE * len(legend.items))


def _figure(**how: Any) -> Any:
    plot = figure(tools="hover,save", toolbar_location="right", **how)
    plot.toolbar.logo = None
    plot.outline_line_color = None
    return plot


def _source(rows: Sequence[Record]) -> ColumnDataSource:
    return ColumnDataSource({name: [row[name] for row in rows] for name in rows[0]})
