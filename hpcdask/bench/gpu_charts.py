"""The report's chart of GPUs: what each did during a workload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bokeh.layouts import column
from bokeh.models import ColumnDataSource, DataRange1d, NumeralTickFormatter
from bokeh.plotting import figure

from hpcdask.bench.charts import FONT, GRID, LEAST_WIDTH, NAMES, Chart, Mark

#: Field of a moment: what it is, and how its axis writes it.
FIELDS = {
    "utilisation": ("utilisation, %", "0"),
    "memory": ("memory, bytes", "0.0 b"),
    "power": ("power, W", "0"),
    "nvlink": ("NVLink, bytes/s", "0.0 b"),
}
HEIGHT = 130
Series = Mapping[str, Sequence[Mapping[str, Any]]]


def gpu_lines(series: Series) -> Chart:
    """Draw a line for each GPU, one picture below the other; what is not known is left out."""
    colours = {label: NAMES[index % len(NAMES)] for index, label in enumerate(sorted(series))}
    plots = [
        _plot(series, field, colours)
        for field in FIELDS
        if any(one[field] is not None for moments in series.values() for one in moments)
    ]
    for plot in plots[1:]:
        plot.x_range = plots[0].x_range
    if plots:
        plots[-1].xaxis.axis_label = "seconds from the start"
    marks = [Mark(colour, "bar", label) for label, colour in colours.items()]
    return Chart(column(plots, sizing_mode="stretch_width"), marks[: len(NAMES)])


def _plot(series: Series, field: str, colours: Mapping[str, str]) -> Any:
    title, form = FIELDS[field]
    plot = figure(
        height=HEIGHT,
        min_width=LEAST_WIDTH,
        sizing_mode="stretch_width",
        tools="hover",
        tooltips=[("", "@name")],
        toolbar_location=None,
        y_range=DataRange1d(start=0),
        y_axis_label=title,
    )
    known = {
        label: [(one["time"], one[field]) for one in moments if one[field] is not None]
        for label, moments in sorted(series.items())
    }
    source = ColumnDataSource(
        {
            "name": list(known),
            "x": [[time for time, _ in points] for points in known.values()],
            "y": [[value for _, value in points] for points in known.values()],
            "colour": [colours[label] for label in known],
        }
    )
    plot.multi_line("x", "y", color="colour", line_width=1.5, source=source)
    plot.yaxis.formatter = NumeralTickFormatter(format=form)
    plot.grid.grid_line_color = GRID
    plot.axis.axis_label_text_font = FONT
    return plot
