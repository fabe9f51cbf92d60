"""The tables and the picture of `docs/scale.md`, from the results of `scale.py`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Template

#: Okabe and Ito's, which colour-blind people tell apart ("Color universal design", 2008).
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#f0e442")
HERE = Path(__file__).parent
PAGE, PICTURE = HERE.parent / "docs/scale.md", HERE.parent / "docs/pictures/scale.svg"
BEGIN, END = "<!-- written by benchmarks/scale.py -->\n", "<!-- end -->\n"
MILLI, MICRO, MEGA, PERCENT = 1e3, 1e6, 1e-6, 100
Record = dict[str, float]


@dataclass(frozen=True)
class Row:
    """A cost: its name in the results, in words, its unit, and whether per worker or job."""

    name: str
    words: str
    factor: float
    unit: str
    each: bool = True

    def values(self, records: Sequence[Record], by: str) -> list[float | None]:
        """The cost at each number; None where it was not measured."""
        return [
            None
            if self.name not in one
            else (one[self.name] - one.get(f"{self.name}_alone", 0))
            * self.factor
            / (one[by] if self.each else 1)
            for one in records
        ]


LAUNCHES = (
    Row("dial_rank0_s", "rank 0: TLS handshake on the link", MILLI, "ms"),
    Row("plan_rank0_s", "rank 0: report, plan, order", MILLI, "ms"),
    Row("join_rank0_s", "rank 0: handling a registration", MILLI, "ms"),
    Row("end_rank0_s", "rank 0: the end", MILLI, "ms"),
    Row("plan_gpus_s", "the plan alone, with GPUs", MILLI, "ms"),
    Row("join_scheduler_s", "scheduler: registration", MILLI, "ms"),
    Row("end_scheduler_s", "scheduler: the end", MILLI, "ms"),
    Row("rank0_rss", "rank 0: memory", MEGA, "MB"),
    Row("scheduler_rss", "scheduler: memory", MEGA, "MB"),
    Row("rank0_descriptors", "rank 0: descriptors", 1, ""),
    Row("scheduler_descriptors", "scheduler: descriptors", 1, ""),
    Row("beats_per_s", "heartbeats per second, all", 1, "", each=False),
    Row(
        "beat_scheduler_share", "scheduler: core share of heartbeats, all", PERCENT, "%", each=False
    ),
)
JOBS = (
    Row("submit_s", "submission", MICRO, "µs"),
    Row("query_s", "query of the queue", MICRO, "µs"),
    Row("reconcile_waiting_s", "one reconcile, jobs wait", MICRO, "µs"),
    Row("reconcile_running_s", "one reconcile, jobs run", MICRO, "µs"),
    Row("survey_s", "survey, as in `hpcdask jobs`", MICRO, "µs"),
    Row("join_steps_s", "job control, while workers connect", MILLI, "ms"),
    Row("join_s", "job control and scheduler, while workers connect", MILLI, "ms"),
    Row("closable_s", "choice of jobs to end", MICRO, "µs"),
    Row("shrink_s", "half of the jobs retire", MILLI, "ms"),
    Row("close_s", "close", MICRO, "µs"),
)


def number(value: float | None) -> str:
    """Two digits or more."""
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.2g}"


def table(
    records: Sequence[Record], rows: Sequence[Row], by: str, exponents: dict[str, float]
) -> str:
    """The costs, a column for each number; the last one is the exponent of the whole."""
    head = ["", *(f"{one[by]:,.0f}" for one in records), "exponent"]
    lines = [head, ["---"] * len(head)]
    for row in rows:
        words = f"{row.words}, {row.unit}" if row.unit else row.words
        power = exponents.get(row.name)
        shown = "" if power is None else f"{power:.2f}"
        lines.append([words, *map(number, row.values(records, by)), shown])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def axis(values: Sequence[float], length: float) -> Callable[[float], float]:
    """Where a value stands on a logarithmic axis from the least to the greatest."""
    low, high = math.log(min(values)), math.log(max(values))
    return lambda value: (math.log(value) - low) / ((high - low) or 1) * length


def panel(
    title: str, left: float, records: Sequence[Record], rows: Sequence[Row], by: str
) -> dict[str, Any]:
    """Costs per worker or job against their number: what is level grows in proportion."""
    width, top, bottom = 330.0, 50 + 20 * len(rows), 420 + 20 * len(rows)
    found = {row: row.values(records, by) for row in rows}
    seen = [value for values in found.values() for value in values if value]
    powers = range(math.floor(math.log10(min(seen))), math.ceil(math.log10(max(seen))) + 1)
    x = axis([one[by] for one in records], width)
    height = axis([10.0 ** powers[0], 10.0 ** powers[-1]], bottom - top)
    lines = []
    for place, (row, values) in enumerate(found.items()):
        dots = [
            (round(x(one[by]), 1), round(bottom - height(value), 1))
            for one, value in zip(records, values, strict=True)
            if value
        ]
        lines.append(
            {
                "name": row.words.replace("`", ""),
                "colour": COLOURS[place % len(COLOURS)],
                "dots": dots,
                "points": " ".join(f"{a},{b}" for a, b in dots),
                "legend": 40 + 20 * place,
            }
        )
    return {
        "title": f"{title}, {rows[0].unit} each",
        "left": left,
        "width": width,
        "bottom": bottom,
        "of": f"number of {by}",
        "lines": lines,
        "x_ticks": [(round(x(one[by]), 1), f"{one[by]:,.0f}") for one in records],
        "y_ticks": [
            (round(bottom - height(10.0**power), 1), f"{10.0**power:g}") for power in powers
        ],
    }


def picture(results: dict[str, Any]) -> str:
    """Processor time per worker and per job."""
    launches = [row for row in LAUNCHES if row.unit == "ms" and row.name != "plan_gpus_s"]
    jobs = [row for row in JOBS if row.unit == "µs" and row.name not in ("closable_s", "close_s")]
    panels = [
        panel("A launch", 60, results["launches"], launches, "workers"),
        panel("A cluster of jobs", 470, results["jobs"], jobs, "jobs"),
    ]
    text = (HERE / "scale.svg.in").read_text()
    height = max(one["bottom"] for one in panels) + 50
    return Template(text).render(panels=panels, width=830, height=height) + "\n"


def page(results: dict[str, Any]) -> str:
    """The text of the page, with the tables in their place."""
    found = results["versions"]
    about = (
        f"{found['cores']} CPU cores, no GPU; {found['date']}; hpcdask {found['hpcdask']}, "
        f"distributed {found['distributed']}, Python {found['python']}, Linux {found['kernel']}."
    )
    exponents = results["exponents"]
    parts = [
        f"A launch, per worker ({about})\n\n",
        table(results["launches"], LAUNCHES, "workers", exponents),
        "\nA cluster of jobs, per job\n\n",
        table(results["jobs"], JOBS, "jobs", exponents),
    ]
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{''.join(parts)}\n{END}{after}"
