"""Tables of `benchmarks/scale.md`, from the results of `scale.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent / "scale.md"
BEGIN, END = "<!-- written by benchmarks/scale.py -->\n", "<!-- end -->\n"
MILLI, MICRO, MEGA, PERCENT = 1e3, 1e6, 1e-6, 100
Record = dict[str, float]


@dataclass(frozen=True)
class Row:
    """Cost: its name in the results, in words, its unit, and whether it is per worker or job."""

    name: str
    words: str
    factor: float
    unit: str
    each: bool = True

    def values(self, records: Sequence[Record], by: str) -> list[float | None]:
        """Return the cost at each number; None where it was not measured."""
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
    Row("survey_s", "survey, as in `hpcdask list`", MICRO, "µs"),
    Row("join_steps_s", "job control, while workers connect", MILLI, "ms"),
    Row("join_s", "job control and scheduler, while workers connect", MILLI, "ms"),
    Row("closable_s", "choice of jobs to end", MICRO, "µs"),
    Row("shrink_s", "half of the jobs retire", MILLI, "ms"),
    Row("close_s", "close", MICRO, "µs"),
)


def number(value: float | None) -> str:
    """Write two digits or more."""
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.2g}"


def table(
    records: Sequence[Record], rows: Sequence[Row], by: str, exponents: dict[str, float]
) -> str:
    """Return the costs, a column for each number; the last one is the exponent of the whole."""
    head = ["", *(f"{one[by]:,.0f}" for one in records), "exponent"]
    lines = [head, ["---"] * len(head)]
    for row in rows:
        words = f"{row.words}, {row.unit}" if row.unit else row.words
        power = exponents.get(row.name)
        shown = "" if power is None else f"{power:.2f}"
        lines.append([words, *map(number, row.values(records, by)), shown])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def page(results: dict[str, Any]) -> str:
    """Return the text of the page, with the tables in their place."""
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
