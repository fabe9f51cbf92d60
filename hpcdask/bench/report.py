"""Report: results of the bench as one page that opens anywhere, without a network."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from bokeh.embed import components
from bokeh.models import ColumnDataSource, PrintfTickFormatter
from bokeh.palettes import Category20, Cividis256
from bokeh.plotting import figure
from bokeh.resources import Resources
from bokeh.transform import log_cmap
from dask.utils import format_time
from jinja2 import Environment, PackageLoader

from hpcdask.bench.exchange import kinds_of_pairs
from hpcdask.bench.measurement import RATES, Exchange, Measurement, hardware_rate
from hpcdask.logs import plural, some

#: A workload below this part of its limit is worth a look; so many things to look at are shown.
WORTH_A_LOOK, MOST = 0.5, 3
#: Okabe and Ito's colours, which colour-blind people tell apart ("Color universal design", 2008).
COLOURS = {"tuned": "#0072b2", "stock": "#009e73", "wrong": "#d55e00"}
OTHER = "#cc79a7"
PALETTE = Cividis256[120:]  # on which black numbers can be read
#: Pixels of a row, of a line of a legend, and of the axis.
ROW, LINE, ROOM = 30, 25, 70
#: Heat maps of more workers have small cells without numbers.
MAX_NUMBERED = 16


def html(found: Sequence[Measurement], command: str = "") -> str:
    """Return the report of one run as HTML: one page, which loads nothing from anywhere."""
    first, rows = found[0], [one.cells() for one in found]
    phased = [one for one in found if one.phases]
    exchange = next((one.exchange for one in found if one.exchange), None)
    rates = next((one.rates for one in found if one.rates), {})
    plots = {"times": times(found)}
    plots |= {"phases": phases(phased)} if phased else {}
    plots |= {"exchange": heat_map(exchange)} if exchange else {}
    script, places = components(plots)
    sentence, look_at = _verdict(found)
    environment = Environment(loader=PackageLoader("hpcdask.bench"), autoescape=True)
    return environment.get_template("report.html.j2").render(
        script=Resources(mode="inline", components=["bokeh"]).render() + script,
        places=places,
        devices=first.where,
        command=command,
        facts=[
            f"{plural(first.workers, 'worker')}, {plural(first.threads, 'thread')}",
            f"on {some(first.hosts)} over {' and '.join(first.protocols)}",
            some(first.processors),
            f"measured {first.date}",
            ", ".join(f"{name} {version}" for name, version in first.versions.items() if version),
        ],
        failures=[(one.label, complaint) for one in found for complaint in one.failed],
        sentence=sentence,
        look_at=look_at,
        rates=[f"{RATES[name][1]}: {hardware_rate(name, rates[name])}" for name in rates],
        heads=list(dict.fromkeys(head for one in rows for head, text in one.items() if text)),
        times=rows,
        parts=[
            {"workload": one.label, **{name: format_time(s) for name, s in one.phases.items()}}
            for one in phased
        ],
        exchange=exchange,
        kinds_of_pairs=kinds_of_pairs(exchange) if exchange else "",
    )


def _verdict(found: Sequence[Measurement]) -> tuple[str, list[str]]:
    """Return how many workloads come near their limits, or "", and what to look at.

    Plain forms, which are there for comparison, count only if there are no others.
    """
    limited = [(one, one.limit) for one in found if one.limit]
    judged = [(one, limit) for one, limit in limited if one.form != "stock"] or limited
    judged.sort(key=lambda pair: pair[1].fraction)
    slow = [text for one in found if one.exchange for text in one.exchange.slow]
    problems = [f"{one.label}: {text}" for one in found if one.gpus for text in one.gpus.problems]
    far = [f"{one.label} runs at {by}" for one, by in judged if by.fraction < WORTH_A_LOOK]
    near = f"{len(judged) - len(far)} of {plural(len(judged), 'workload')}"
    sentence = f"At least half of what this hardware allows: {near}" if judged else ""
    return sentence, [*slow, *problems, *far][:MOST]


# --- charts ---------------------------------------------------------------------------------------


def times(found: Sequence[Measurement]) -> Any:
    """Draw the median, least and greatest time of each measurement, and its limit."""
    tooltips = [("", "@name"), ("median", "@time"), ("", "@reached")]
    plot = _rows_figure((one.label for one in found), tooltips, x_axis_type="log")
    kinds = ["wrong" if one.failed else one.form or one.workload for one in found]
    columns = {
        "name": [one.label for one in found],
        "least": [min(one.seconds) for one in found],
        "greatest": [max(one.seconds) for one in found],
        "median": [one.median for one in found],
        "time": [format_time(one.median) for one in found],
        "limit": [one.limit.seconds if one.limit else math.nan for one in found],
        "reached": [str(one.limit or "") for one in found],
        "kind": [f"{kind}: median, range" for kind in kinds],
        "colour": [COLOURS.get(kind, OTHER) for kind in kinds],
    }
    how: dict[str, Any] = {"source": ColumnDataSource(columns), "color": "colour"}
    plot.segment("least", "name", "greatest", "name", line_width=4, **how)
    plot.scatter("median", "name", size=12, legend_group="kind", **how)
    if any(one.limit for one in found):
        how |= {"color": "#222222", "marker": "dash", "angle": math.pi / 2, "line_width": 3}
        plot.scatter("limit", "name", size=20, legend_label="limit of the hardware", **how)
    # Bokeh's own ticks are those of a linear axis where a logarithmic one is short.
    plot.xaxis.ticker = [digit * 10.0**power for power in range(-6, 6) for digit in (1, 2, 5)]
    plot.xaxis.formatter = PrintfTickFormatter(format="%g")
    return _with_legend(plot)


def phases(found: Sequence[Measurement]) -> Any:
    """Draw the phases of each measurement, one behind the other, as parts of a bar."""
    tooltips = [("", "$name"), ("seconds", "@$name{0.000}")]
    labels, names = [one.label for one in found], list({n: 0 for one in found for n in one.phases})
    columns = {"label": labels, **{n: [one.phases.get(n, 0) for one in found] for n in names}}
    plot = _rows_figure(labels, tooltips)
    how: dict[str, Any] = {"color": Category20[20][: len(names)], "legend_label": names}
    plot.hbar_stack(names, y="label", height=0.6, source=ColumnDataSource(columns), **how)
    return _with_legend(plot)


def heat_map(found: Exchange) -> Any:
    """Draw the rates between all pairs of workers as a heat map."""
    names, rates = list(found.names), found.rates()
    numbered = len(names) <= MAX_NUMBERED
    side = (48 if numbered else 14) * len(names)
    plot = _figure(
        [("", "@sends to @receives"), ("GB/s", "@rate"), ("over", "@over")],
        x_range=names,
        y_range=names[::-1],
        x_axis_location="above",
        x_axis_label="receives",
        y_axis_label="sends",
        width=max(240, side) + 200,
        height=max(160, side) + 100,
    )
    columns = {
        "sends": [names[pair.sender] for pair in found.pairs],
        "receives": [names[pair.receiver] for pair in found.pairs],
        "over": [pair.over for pair in found.pairs],
        "rate": list(rates.values()),
        "text": [f"{rate:.3g}" for rate in rates.values()],
    }
    source = ColumnDataSource(columns)
    # Between nodes, a slow pair would not be seen on a linear scale.
    colour = log_cmap("rate", PALETTE, min(rates.values()), max(rates.values()))
    cells = plot.rect("receives", "sends", 1, 1, source=source, color=colour)
    if numbered:
        how: dict[str, Any] = {"text_align": "center", "text_baseline": "middle"}
        plot.text("receives", "sends", "text", source=source, **how)
    plot.add_layout(cells.construct_color_bar(title="GB/s"), "right")
    plot.xaxis.major_label_orientation = math.pi / 4
    plot.hover.renderers = [cells]
    return plot


def _rows_figure(labels: Iterable[str], tooltips: list[tuple[str, str]], **how: Any) -> Any:
    """Make an empty figure with a row for each label, the first at the top."""
    rows = list(dict.fromkeys(labels))[::-1]
    how |= {"sizing_mode": "stretch_width", "min_width": 320}
    plot = _figure(tooltips, y_range=rows, x_axis_label="seconds", **how)
    plot.ygrid.grid_line_color = None
    return plot


def _with_legend(plot: Any) -> Any:
    """Move the legend below the rows, as small screens want it, and make room for both."""
    legend = plot.legend[0]
    plot.add_layout(legend, "below")
    legend.border_line_color = None
    plot.height = ROOM + ROW * len(plot.y_range.factors) + LINE * len(legend.items)
    return plot


def _figure(tooltips: list[tuple[str, str]], **how: Any) -> Any:
    how |= {"toolbar_location": "right", "outline_line_color": None}
    plot = figure(tools="hover,save", tooltips=tooltips, **how)
    plot.toolbar.logo = None
    return plot
