"""The report: results of the bench as one page that opens anywhere, without a network.

What Bokeh needs for the charts is in the file. Importing this imports Bokeh, which takes half a
second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bokeh.embed import components
from bokeh.resources import Resources
from dask.utils import format_bytes
from jinja2 import Environment, PackageLoader, StrictUndefined

from hpcdask.bench import charts
from hpcdask.bench.exchange_report import all_reduce_line
from hpcdask.bench.limits import LIMITS
from hpcdask.bench.records import complaint, counts, decimal, failed, name_of, reached
from hpcdask.bench.summary import cells
from hpcdask.errors import UsageError
from hpcdask.logs import plural, some

Record = Mapping[str, Any]

#: Name of a rate to what it is, and its unit.
RATES = {
    "memory": ("memory, read and written", "B/s"),
    "random": ("random float64 normals", "/s"),
    "matrix_float64": ("matrix products, float64", "FLOP/s"),
    "matrix_float32": ("matrix products, float32", "FLOP/s"),
    "link": ("between workers, each to the next", "B/s"),
}
#: Names of the protocols of addresses.
PROTOCOLS = {"tls": "tcp with TLS", "tcp": "tcp without TLS", "ucx": "ucx between workers"}
#: Hosts that are named.
MOST_HOSTS = 4
#: A workload below this part of its limit is worth a look; so many things to look at are shown.
WORTH_A_LOOK, MOST = 0.5, 3


def write(records: Sequence[Record], path: str | Path) -> None:
    """Write the report of records to a file, which is replaced."""
    text = html(records)
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as exc:
        raise UsageError(f"{path} cannot be written: {exc.strerror or exc}") from exc


def html(records: Sequence[Record]) -> str:
    """Return the report of one run as HTML: one page, which loads nothing from anywhere.

    Records are what the bench writes as JSON; what has no data has no section.
    """
    if not records:
        raise UsageError("nothing to report: no workload has finished")
    timed = [record for record in records if record["workload"] != LIMITS]
    phased = [record for record in timed if record.get("phases")]
    exchange = next((one["result"] for one in timed if one["workload"] == "exchange"), None)
    plots = {"times": charts.times(timed)} if timed else {}
    if phased:
        plots["phases"] = charts.phases(phased)
    if exchange is not None:
        plots["exchange"] = charts.heat_map(exchange)
    script, places = components(plots) if plots else ("", {})
    environment = Environment(
        loader=PackageLoader("hpcdask.bench"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    rates: Mapping[str, float] = next((one["rates"] for one in records if one.get("rates")), {})
    return environment.get_template("report.html.j2").render(
        script=Resources(mode="inline", components=["bokeh"]).render() + script,
        places=places,
        devices=counts(records[0]),
        facts=_facts(records[0]),
        failures=[(name_of(one), complaint(check)) for one in timed for check in failed(one)],
        sentence=_sentence(timed),
        look_at=_look_at(timed),
        rates=[{"rate": RATES[name][0], "of all workers": _rate(name, rates)} for name in rates],
        times=[cells(record) for record in timed],
        exchange=exchange,
        all_reduce=all_reduce_line(exchange or {}),
        gpus=[_gpus(record) for record in timed if record.get("gpus")],
    )


def _rate(name: str, rates: Mapping[str, float]) -> str:
    return decimal(rates[name], RATES[name][1])


def _facts(record: Record) -> list[str]:
    """Return lines on workers, hosts and protocols, the date, and versions."""
    workers = f"{plural(record['workers'], 'worker')}, {plural(record['threads'], 'thread')}"
    protocols = " and ".join(PROTOCOLS.get(one, one) for one in record["protocols"])
    versions = record["versions"].items()
    return [
        f"{workers} on {some(record['hosts'], MOST_HOSTS)} over {protocols}",
        f"measured {record['date'].replace('T', ' ').replace('+00:00', ' UTC')}",
        ", ".join(f"{name} {version}" for name, version in versions if version),
    ]


def _sentence(timed: Sequence[Record]) -> str:
    """Return how near the workloads come to their limits, or "" without limits."""
    limited = [record for record in timed if record.get("limit")]
    if not limited:
        return ""
    best = max(limited, key=lambda record: record["limit"]["fraction"])
    if len(limited) == 1:
        return f"{name_of(best)} runs at {reached(best)}."
    near = sum(record["limit"]["fraction"] >= WORTH_A_LOOK for record in limited)
    return (
        f"{near} of {len(limited)} workloads {'reaches' if near == 1 else 'reach'} half of what "
        f"this hardware allows, or more. Nearest is {name_of(best)}, at {reached(best)}."
    )


def _look_at(timed: Sequence[Record]) -> list[str]:
    """Return what to look at: slow pairs, problems of GPUs, workloads far from their limits."""
    slow = [found["text"] for one in timed for found in one["result"].get("slow", ())]
    problems = [
        f"{name_of(one)}: {problem}"
        for one in timed
        for problem in one.get("gpus", {}).get("problems", ())
    ]
    far = [
        one
        for one in timed
        if one.get("limit") and one["limit"]["fraction"] < WORTH_A_LOOK and not failed(one)
    ]
    far.sort(key=lambda one: one["limit"]["fraction"])
    return [*slow, *problems, *(f"{name_of(one)} runs at {reached(one)}" for one in far)][:MOST]


def _gpus(record: Record) -> dict[str, str]:
    """Return a row of what the GPUs did during a workload."""
    usage = record["gpus"]

    def known(name: str, write: str = "{:.3g}") -> str:
        return "unknown" if usage[name] is None else write.format(usage[name])

    peak, nvlink = usage["peak_memory"], usage["nvlink_bytes"]
    return {
        "workload": name_of(record),
        "GPU hours": known("gpu_hours"),
        "mean utilisation": known("utilisation", "{:.0f} %"),
        "peak memory": "unknown" if peak is None else format_bytes(peak),
        "energy, kWh": known("energy_kwh"),
        "over NVLink": "" if nvlink is None else format_bytes(int(nvlink)),
        "problems": "; ".join(usage["problems"]),
    }
