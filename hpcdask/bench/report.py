"""The report: results of the bench as one page that opens anywhere, without a network.

What Bokeh needs for the charts is in the file. The tables and the heat map need no JavaScript.
Importing this imports Bokeh, which takes half a second.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bokeh.embed import components
from bokeh.resources import Resources

from hpcdask.bench.charts import Chart, phases, published, timeline, times
from hpcdask.bench.exchange import heat_map
from hpcdask.bench.exchange_report import all_reduce_line
from hpcdask.bench.gpu_charts import gpu_lines
from hpcdask.bench.heatmap import TEMPLATES
from hpcdask.bench.limits import LIMITS
from hpcdask.bench.records import (
    complaint,
    counts,
    decimal_bytes,
    duration,
    failed,
    name_of,
    number,
    reached,
)
from hpcdask.bench.verdict import verdict
from hpcdask.errors import UsageError
from hpcdask.logs import plural, some

Record = Mapping[str, Any]
Named = Sequence[tuple[str, Record]]

#: Name of a rate to what it is, and its unit.
RATES = {
    "memory": ("memory, read and written", "B/s"),
    "random": ("random float64 normals", "/s"),
    "matrix_float64": ("matrix products, float64", "FLOP/s"),
    "matrix_float32": ("matrix products, float32", "FLOP/s"),
    "link": ("between workers, each to the next", "B/s"),
}

#: What the protocols of addresses are called.
PROTOCOLS = {"tls": "tcp with TLS", "tcp": "tcp without TLS", "ucx": "ucx between workers"}
#: Hosts that are named.
MOST_HOSTS = 4


class Cell(NamedTuple):
    """A cell of a table, and a bar of a fraction of its width below."""

    text: str
    number: bool = False
    bad: bool = False
    fraction: float | None = None


def write(records: Sequence[Record], path: str | Path) -> None:
    """Write the report of records to a file, which is replaced."""
    text = html(records)
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as exc:
        raise UsageError(f"{path} cannot be written: {exc.strerror or exc}") from exc


def html(records: Sequence[Record]) -> str:
    """Return the report as HTML: one page, which loads nothing from anywhere.

    Records are what the bench writes as JSON; what has no data has no section. None is a
    UsageError.
    """
    if not records:
        raise UsageError("a report needs one result at least, and there is none")
    shown = _named([record for record in records if record["workload"] != LIMITS])
    timed = [(label, record) for label, record in shown if record.get("seconds_median")]
    timelines = [
        (f"timeline{i}", label, record["timeline"])
        for i, (label, record) in enumerate(shown)
        if (record.get("timeline") or {}).get("entries")
    ]
    charts: dict[str, Chart] = {}
    for name, draw, found in (
        ("times", times, timed),
        ("phases", phases, [one for one in shown if one[1].get("phases")]),
    ):
        if found:
            charts[name] = draw([record for _, record in found], [label for label, _ in found])
    charts |= {name: timeline(told["entries"]) for name, _, told in timelines}
    gpus = [
        (f"gpus{i}", label, one["gpus"]) for i, (label, one) in enumerate(shown) if "gpus" in one
    ]
    charts |= {name: gpu_lines(told["series"]) for name, _, told in gpus if told.get("series")}
    script, places = "", dict[str, Any]()
    if charts:
        script, places = components({name: chart.figure for name, chart in charts.items()})
        script = Resources(mode="inline", components=["bokeh"]).render() + script
    several = len(_different(counts(record) for record in records)) > 1
    return TEMPLATES.get_template("report.html.j2").render(
        script=script,
        places=places,
        charts=charts,
        devices=_different(counts(record) for record in records),
        facts=_facts(records),
        verdict=verdict(shown),
        rates=[_rate(name, rate) for name, rate in _rates(records).items()],
        failures=[(label, complaint(check)) for label, one in shown for check in failed(one)],
        has_startup=any(record["workload"] == "startup" for _, record in shown),
        has_limits=any(record.get("limit") for _, record in shown),
        times=_table(_TIMES, [_times_row(label, record, several) for label, record in timed]),
        published=_table(_PUBLISHED, _published_rows(timed)),
        exchanges=_exchanges(shown),
        timelines=timelines,
        gpus=gpus,
    )


def _rates(records: Sequence[Record]) -> Mapping[str, float]:
    """Return what the hardware allows, unless that was measured on several clusters."""
    found: list[Mapping[str, float]] = [r["rates"] for r in records if r.get("rates")]
    return found[0] if found and all(rates == found[0] for rates in found) else {}


def _named(records: Sequence[Record]) -> Named:
    """Name the records: by what differs, if a shorter name would be that of several."""
    names = list(map(name_of, records))
    for more in (_size, counts):
        again = {name for name in names if names.count(name) > 1}
        names = [
            f"{name}, {more(record)}" if name in again and more(record) else name
            for name, record in zip(names, records, strict=True)
        ]
    return list(zip(names, records, strict=True))


def _facts(records: Sequence[Record]) -> list[str]:
    """Workers, hosts and protocols, dates and versions."""
    workers = _different(
        f"{plural(r['workers'], 'worker')}, {plural(r['threads'], 'thread')}"
        for r in records
        if "workers" in r and "threads" in r
    )
    hosts = _different(host for record in records for host in record.get("hosts") or ())
    protocols = _different(one for record in records for one in record.get("protocols") or ())
    where = [f"on {some(hosts, MOST_HOSTS)}"] if hosts else []
    where += [f"over {' and '.join(PROTOCOLS.get(one, one) for one in protocols)}"] * bool(
        protocols
    )
    dates = sorted(_different(record.get("date") for record in records))
    when = _different(date.replace("T", " ").replace("+00:00", " UTC") for date in dates)
    versions: dict[str, list[str]] = {}
    for record in records:
        for name, version in (record.get("versions") or {}).items():
            if version:
                versions[name] = _different([*versions.get(name, ()), version])
    return [
        " ".join(["; ".join(workers), *where]).strip(),
        f"measured {' to '.join([*when[:1], *when[1:][-1:]])}" if when else "",
        ", ".join(f"{name} {' and '.join(found)}" for name, found in versions.items()),
    ]


def _rate(name: str, rate: float) -> tuple[str, str]:
    what, unit = RATES.get(name, (name, "/s"))
    for power, prefix in ((15, "P"), (12, "T"), (9, "G"), (6, "M")):
        if rate >= 10**power:
            return what, f"{number(rate / 10**power)} {prefix}{unit}"
    return what, f"{number(rate)} {unit}"


def _different(values: Iterable[Any]) -> list[str]:
    return list(dict.fromkeys(str(value) for value in values if value))


def _size(record: Record) -> str:
    return decimal_bytes(int(record["bytes"])) if record.get("bytes") else ""


# --- tables ---------------------------------------------------------------------------------------

#: Head of each column; "#" is for numbers.
_TIMES = (
    *("", "devices", "array", "#size", "#median", "#least to greatest", "#GB/s", "#limit"),
    *("of the limit", "#Dask tasks", "checks"),
)
_PUBLISHED = ("", "published", "#time", "at this size", "#here", "#times faster")


def _table(heads: Sequence[str], rows: Sequence[Sequence[str | Cell]]) -> dict[str, Any] | None:
    """Return what the template shows, without the columns that have no text in any row."""
    cells = [
        [
            Cell(one, number=head.startswith("#")) if isinstance(one, str) else one
            for head, one in zip(heads, row, strict=True)
        ]
        for row in rows
    ]
    shown = [i for i in range(len(heads)) if any(row[i].text for row in cells)]
    titles = [Cell(heads[i].removeprefix("#"), number=heads[i].startswith("#")) for i in shown]
    return {"heads": titles, "rows": [[row[i] for i in shown] for row in cells]} if rows else None


def _times_row(label: str, record: Record, several: bool) -> list[str | Cell]:
    limit, checks, wrong = record.get("limit"), record.get("checks") or (), failed(record)
    shape = " x ".join(f"{n:,}" for n in record.get("shape") or ())
    runs = len(record.get("seconds") or ())
    spread = f"{duration(record['seconds_min'])} to {duration(record['seconds_max'])}"
    told = f"{len(wrong)} of {len(checks)} failed" if wrong else f"{len(checks)} passed"
    return [
        Cell(label, bad=bool(wrong)),
        counts(record) if several else "",
        f"{shape} {record.get('dtype') or ''}".strip(),
        _size(record),
        duration(record["seconds_median"]),
        f"{spread} ({runs})" if runs else spread,
        number(record["GB/s"]) if record.get("GB/s") else "",
        duration(limit["seconds"]) if limit else "",
        Cell(reached(record), fraction=limit["fraction"] if limit else None),
        f"{record['dask_tasks']:,}" if "dask_tasks" in record else "",
        Cell(told if checks else "none", bad=bool(wrong)),
    ]


def _published_rows(timed: Named) -> list[list[str]]:
    return [
        [
            label,
            one["what"],
            duration(one["seconds"]),
            f"{duration(one['here'])}, {one['scaled']}" if one["scaled"] else "the same",
            duration(record["seconds_median"]),
            number(one["here"] / record["seconds_median"]),
        ]
        for label, record in timed
        for one in published(record)
    ]


# --- the rest -------------------------------------------------------------------------------------


def _exchanges(shown: Named) -> list[tuple[str, str, list[str], str]]:
    found = []
    for label, record in shown:
        result = record.get("result") or {}
        if record["workload"] == "exchange" and "transport" in result:
            warnings = [one["text"] for one in result["slow"]]
            found.append((label, heat_map(record), warnings, all_reduce_line(result)))
    return found
