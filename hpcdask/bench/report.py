"""The report: results of the bench as one page that opens anywhere, without a network.

What Bokeh needs for the charts is in the file. The tables and the heat map need no JavaScript.
Importing this imports Bokeh, which takes half a second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from bokeh.embed import components
from bokeh.resources import Resources

from hpcdask.bench import page
from hpcdask.bench.chart_times import failed, published, reached, times
from hpcdask.bench.charts import Chart, duration, number, phases, timeline
from hpcdask.bench.exchange import heat_map
from hpcdask.bench.limits import LIMITS
from hpcdask.bench.page import Cell
from hpcdask.bench.records import decimal_bytes
from hpcdask.errors import UsageError

__all__ = ["html", "write"]

Record = Mapping[str, Any]

#: Name of a rate to what it is, and its unit.
RATES = {
    "memory": ("memory, read and written", "B/s"),
    "random": ("random float64 normals", "/s"),
    "matrix_float64": ("matrix products, float64", "FLOP/s"),
    "matrix_float32": ("matrix products, float32", "FLOP/s"),
    "link": ("between workers, each to the next", "B/s"),
}


def write(records: Sequence[Record], path: str | Path) -> None:
    """Write the report of records to a file, which is replaced."""
    text = html(records)
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as exc:
        raise UsageError(f"{path} cannot be written: {exc.strerror or exc}") from exc


def html(records: Sequence[Record]) -> str:
    """Return the report as HTML: one page, which loads nothing from anywhere.

    Records are what the bench writes as JSON. Some have ``label``, ``limit`` (of `limits.against`),
    ``published``, ``phases``, ``timeline`` or, if the workload is ``"limits"``, ``rates`` (of
    `limits.measure`); what has no data has no section. No records are a UsageError.
    """
    if not records:
        raise UsageError("a report needs one result at least, and there is none")
    rates = _rates(records)
    shown = [record for record in records if record["workload"] != LIMITS]
    labels = _labels(shown)
    charts = _charts(shown, labels)
    script = ""
    places: dict[str, Any] = {}
    if charts:
        script, places = components({name: chart.figure for name, chart in charts.items()})
        script = Resources(mode="inline", components=["bokeh"]).render() + script
    drawn = {
        name: f"{page.legend(chart.legend)}<div class='wide'>{places[name]}</div>"
        for name, chart in charts.items()
    }
    parts = [
        _header(records, rates),
        _alarm(shown, labels),
        _times(shown, labels, drawn),
        _published(shown, labels),
        _exchange(shown, labels),
        _phases(drawn),
        *(_timeline(shown[i], labels[i], drawn[f"timeline{i}"]) for i in _with_timeline(shown)),
    ]
    return page.document("hpcdask bench", script, "\n".join(filter(None, parts)))


def _rates(records: Sequence[Record]) -> Mapping[str, float]:
    """Return what the hardware allows, unless that was measured on several clusters."""
    found: list[Mapping[str, float]] = [r["rates"] for r in records if r.get("rates")]
    return found[0] if found and all(rates == found[0] for rates in found) else {}


def _labels(records: Sequence[Record]) -> list[str]:
    """Name the records: by what differs, if a shorter name would be that of several."""
    names = [
        str(r.get("label") or f"{r['workload']} {r.get('form') or ''}".strip()) for r in records
    ]
    for more in (_size, _devices):
        again = {name for name in names if names.count(name) > 1}
        names = [
            f"{name}, {more(record)}" if name in again and more(record) else name
            for name, record in zip(names, records, strict=True)
        ]
    return names


def _charts(records: Sequence[Record], labels: Sequence[str]) -> dict[str, Chart]:
    charts: dict[str, Chart] = {}
    for name, key, draw in (("times", "seconds_median", times), ("phases", "phases", phases)):
        if found := [(r, label) for r, label in zip(records, labels, strict=True) if r.get(key)]:
            charts[name] = draw([r for r, _ in found], [label for _, label in found])
    for i in _with_timeline(records):
        charts[f"timeline{i}"] = timeline(records[i]["timeline"]["entries"])
    return charts


def _with_timeline(records: Sequence[Record]) -> list[int]:
    return [i for i, r in enumerate(records) if (r.get("timeline") or {}).get("entries")]


# --- the top --------------------------------------------------------------------------------------


def _header(records: Sequence[Record], rates: Mapping[str, float]) -> str:
    devices = "; ".join(_different(_devices(record) for record in records))
    counts = _different(
        f"{_count(r['workers'], 'worker')}, {_count(r['threads'], 'thread')}"
        for r in records
        if "workers" in r and "threads" in r
    )
    dates = sorted(_different(record.get("date") for record in records))
    when = dict.fromkeys(date.replace("T", " ").replace("+00:00", " UTC") for date in dates)
    ends = list(when)[:1] + list(when)[1:][-1:]
    versions: dict[str, dict[str, None]] = {}
    for record in records:
        for name, version in (record.get("versions") or {}).items():
            if version:
                versions.setdefault(name, {})[str(version)] = None
    told = ", ".join(f"{name} {' and '.join(found)}" for name, found in versions.items())
    lines = ["; ".join(counts), f"measured {' to '.join(ends)}" if ends else "", told]
    title = f"hpcdask bench: {devices}" if devices else "hpcdask bench"
    cards = "".join(
        f"<div class='rate'><b>{escape(value)}</b><span>{escape(what)}</span></div>"
        for what, value in (_rate(name, rate) for name, rate in rates.items())
    )
    note = "What the hardware allows, in total, measured on all workers at once."
    return "\n".join(
        [
            f"<h1>{escape(title)}</h1>",
            *(f"<div class='meta'>{escape(line)}</div>" for line in lines if line),
            f"<div class='rates'>{cards}</div><div class='meta'>{note}</div>" if cards else "",
        ]
    )


def _rate(name: str, rate: float) -> tuple[str, str]:
    what, unit = RATES.get(name, (name, "/s"))
    for power, prefix in ((15, "P"), (12, "T"), (9, "G"), (6, "M")):
        if rate >= 10**power:
            return what, f"{number(rate / 10**power)} {prefix}{unit}"
    return what, f"{number(rate)} {unit}"


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def _different(values: Any) -> list[str]:
    return list(dict.fromkeys(str(value) for value in values if value))


def _devices(record: Record) -> str:
    return ", ".join(f"{n} x {name}" for name, n in (record.get("devices") or {}).items())


def _size(record: Record) -> str:
    return decimal_bytes(int(record["bytes"])) if record.get("bytes") else ""


def _alarm(records: Sequence[Record], labels: Sequence[str]) -> str:
    lines = [
        f"<li><b>{escape(label)}</b>: {escape(_complaint(check))}</li>"
        for record, label in zip(records, labels, strict=True)
        for check in failed(record)
    ]
    if not lines:
        return ""
    title = "A result is wrong" if len(lines) == 1 else f"{len(lines)} checks failed"
    return f"<div class='alarm'><h2>{title}</h2><ul>{''.join(lines)}</ul></div>"


def _complaint(check: Mapping[str, Any]) -> str:
    return (
        f"{check['name']} is {check['value']}, "
        f"expected {check['expected']} within {check['tolerance']}"
    )


# --- times ----------------------------------------------------------------------------------------


def _times(records: Sequence[Record], labels: Sequence[str], drawn: Mapping[str, str]) -> str:
    if "times" not in drawn:
        return ""
    note = "From the call that computes a graph to the result in the client."
    if any(record["workload"] == "startup" for record in records):
        note += " Start-up counts from the launch to the last worker."
    if any(record.get("limit") for record in records):
        note += (
            " The limit is the time of the largest of its parts (memory, random numbers, matrix "
            "products, exchange) at the rate that these workers reach when they do nothing else."
        )
    several = len(_different(_devices(record) for record in records)) > 1
    rows = [
        _row(record, label, several)
        for record, label in zip(records, labels, strict=True)
        if record.get("seconds_median")
    ]
    heads = ("", "devices", "array", "size", "median", "least to greatest", "GB/s", "limit")
    more = ("of the limit", "Dask tasks", "checks")
    return page.section("Times", note, drawn["times"], page.table([*heads, *more], rows))


def _row(record: Record, label: str, several: bool) -> list[Cell]:
    limit, checks, wrong = record.get("limit"), record.get("checks") or (), failed(record)
    shape = " x ".join(f"{n:,}" for n in record.get("shape") or ())
    runs = len(record.get("seconds") or ())
    spread = f"{duration(record['seconds_min'])} to {duration(record['seconds_max'])}"
    told = f"{len(wrong)} of {len(checks)} failed" if wrong else f"{len(checks)} passed"
    return [
        Cell(label, bad=bool(wrong)),
        Cell(_devices(record) if several else ""),
        Cell(f"{shape} {record.get('dtype') or ''}".strip()),
        Cell(_size(record), number=True),
        Cell(duration(record["seconds_median"]), number=True),
        Cell(f"{spread} ({runs})" if runs else spread, number=True),
        Cell(number(record["GB/s"]) if record.get("GB/s") else "", number=True),
        Cell(duration(limit["seconds"]) if limit else "", number=True),
        Cell(reached(record), fraction=limit["fraction"] if limit else None),
        Cell(f"{record['dask_tasks']:,}" if "dask_tasks" in record else "", number=True),
        Cell(told if checks else "none", bad=bool(wrong)),
    ]


def _published(records: Sequence[Record], labels: Sequence[str]) -> str:
    rows = [
        [
            Cell(label),
            Cell(one["what"]),
            Cell(duration(one["seconds"]), number=True),
            Cell(f"{duration(one['here'])}, {one['scaled']}" if one["scaled"] else "the same"),
            Cell(duration(record["seconds_median"]), number=True),
            Cell(number(one["here"] / record["seconds_median"]), number=True),
        ]
        for record, label in zip(records, labels, strict=True)
        if record.get("seconds_median")
        for one in published(record)
    ]
    if not rows:
        return ""
    note = "On other hardware. Where sizes differ, the published time is scaled by the bytes."
    heads = ("", "published", "time", "at this size", "here", "times faster")
    return page.section("Published figures", note, page.table(heads, rows))


# --- the rest -------------------------------------------------------------------------------------


def _exchange(records: Sequence[Record], labels: Sequence[str]) -> str:
    parts = []
    for record, label in zip(records, labels, strict=True):
        result = record.get("result") or {}
        if record["workload"] == "exchange" and "transport" in result:
            warnings = "".join(f"<li>{escape(one['text'])}</li>" for one in result["slow"])
            parts.append(
                f"<h3>{escape(label)}</h3><div class='wide'>{heat_map(dict(record))}</div>"
            )
            parts.append(f"<ul>{warnings}</ul>" if warnings else "<p>No worker is slow.</p>")
    note = "Rows send, columns receive; what is below half of what is usual is marked."
    return page.section("Exchange between workers", note, *parts) if parts else ""


def _phases(drawn: Mapping[str, str]) -> str:
    if "phases" not in drawn:
        return ""
    return page.section("Where the time goes", "One phase after the other.", drawn["phases"])


def _timeline(record: Record, label: str, chart: str) -> str:
    entries, left_out = record["timeline"]["entries"], record["timeline"].get("left_out", 0)
    note = (
        "What each worker thread did during one more run, which is not timed. Point at something "
        "to see its name; zoom with the tools at the right."
    )
    if left_out:
        note += f" The {len(entries):,} longest are shown, {left_out:,} shorter ones left out."
    return page.section(f"Timeline of {label}", note, chart)
