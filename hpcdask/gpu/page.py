"""The page "GPUs" of the dashboard: all nodes, over the last minutes.

Importing it imports Bokeh. It is made as distributed makes its own pages (2026.7).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from bokeh.layouts import gridplot
from bokeh.models import (
    AdaptiveTicker,
    ColumnDataSource,
    DataRange1d,
    FixedTicker,
    NumeralTickFormatter,
    Range1d,
)
from bokeh.palettes import Category20
from bokeh.plotting import figure
from distributed.dashboard.components import DashboardComponent, add_periodic_callback
from distributed.dashboard.components.scheduler import BOKEH_THEME, env
from distributed.metrics import time

from .monitor import Moment
from .reporting import monitor_of

#: More GPUs than these are shown as one line for each node.
MOST_LINES = 32
SHOWN_S, EVERY_MS = 300.0, 2000
#: Seconds between two points of a node: the scheduler, in whose event loop this is, has other work.
APART_S = 5
Series = Mapping[str, Sequence[Moment]]


class Chart(NamedTuple):
    """What one of the charts shows."""

    field: str
    title: str
    form: str


#: With titles that fit half of a narrow screen.
CHARTS = (
    Chart("memory", "Memory in use", "0.0 b"),
    Chart("utilisation", "Utilisation, %", "0"),
    Chart("nvlink", "NVLink, bytes/s", "0.0 b"),
    Chart("power", "Power, watts", "0"),
)


def lines(past: Series, field: str, now: float) -> dict[str, list[Any]]:
    """Names, seconds before now and values of the lines of a chart."""
    found: dict[str, list[Any]] = {"name": [], "x": [], "y": [], "color": []}
    palette = Category20[20]
    for number, (label, moments) in enumerate(sorted(past.items())):
        known = [one for one in moments if getattr(one, field) is not None]
        found["name"].append(label)
        found["x"].append([one.time - now for one in known])
        found["y"].append([getattr(one, field) for one in known])
        found["color"].append(palette[number % len(palette)])
    return found


def of_nodes(past: Series) -> Series:
    """The means of the GPUs of each node, where there are too many for a line each."""
    if len(past) <= MOST_LINES:
        return past
    nodes: dict[str, list[Moment]] = {}
    for label, moments in past.items():
        some = [one for one in moments if not round(one.time) % APART_S]
        nodes.setdefault(label.partition(" GPU ")[0], []).extend(some)
    return {node: _means(moments) for node, moments in nodes.items()}


def _means(moments: Iterable[Moment]) -> list[Moment]:
    """One moment for each second, of GPUs that are sampled at the same time."""
    seconds: dict[int, list[Moment]] = {}
    for one in moments:
        seconds.setdefault(round(one.time), []).append(one)
    return [
        Moment(float(second), *map(_mean, list(zip(*same, strict=True))[1:]))
        for second, same in sorted(seconds.items())
    ]


def _mean(values: Iterable[float | None]) -> Any:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


class GpuTimeSeries(DashboardComponent):
    """Four charts of all GPUs."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self.sources = {chart.field: ColumnDataSource(lines({}, "", 0.0)) for chart in CHARTS}
        figures = [self._figure(chart) for chart in CHARTS]
        for one in figures[1:]:
            one.x_range = figures[0].x_range
        self.root = gridplot(
            [figures[:2], figures[2:]], sizing_mode="stretch_both", toolbar_location=None
        )

    def _figure(self, chart: Chart) -> Any:
        plot = figure(
            title=chart.title,
            x_range=Range1d(start=-SHOWN_S, end=0),
            y_range=DataRange1d(start=0),
            tools="hover",
            tooltips=[("", "@name")],
            min_height=200,
            name=f"gpus_{chart.field}",
            x_axis_label="seconds from now",
        )
        plot.xaxis.ticker = FixedTicker(ticks=[-SHOWN_S, -200, -100, 0])  # few, on a narrow screen
        if chart.form.endswith("b"):
            plot.yaxis.ticker = AdaptiveTicker(base=1024, mantissas=[2**n for n in range(10)])
        plot.yaxis.formatter = NumeralTickFormatter(format=chart.form)
        plot.multi_line("x", "y", color="color", line_width=2, source=self.sources[chart.field])
        return plot

    def update(self, messages: Any = None) -> None:
        """Show what came since."""
        monitor, now = monitor_of(self._scheduler), time()
        past = of_nodes({} if monitor is None else monitor.past(now - SHOWN_S))
        for chart in CHARTS:
            self.sources[chart.field].data = lines(past, chart.field, now)


def document(scheduler: Any, extra: Mapping[str, Any], doc: Any) -> None:
    """The page for one who looks at it."""
    series = GpuTimeSeries(scheduler)
    series.update()
    doc.title = "Dask: GPUs"
    add_periodic_callback(doc, series, EVERY_MS)
    doc.add_root(series.root)
    doc.template = env.get_template("simple.html")
    doc.template_variables.update(extra)
    doc.theme = BOKEH_THEME
