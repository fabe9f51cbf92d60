"""Compare the results of two runs of the bench: what got slower, what faster."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from hpcdask.bench.limits import LIMITS
from hpcdask.bench.records import counts, decimal_bytes, failed, name_of
from hpcdask.bench.summary import console
from hpcdask.errors import UsageError

Record = Mapping[str, Any]

#: A median may be this many times the other without being called slower.
TOLERANCE = 1.05
#: Runs that a verdict needs.
LEAST_RUNS = 2
NUMBERS = ("seconds_median", "seconds_min", "seconds_max")
SAME_WORKLOAD = ("workload", "form", "shape", "dtype", "devices", "workers", "label")


@dataclass(frozen=True)
class Change:
    """A workload in two runs: least, median and greatest seconds of each; None where it is not.

    ``verdict`` is one of those that docs/report.md explains.
    """

    name: str
    before: tuple[float, float, float] | None
    after: tuple[float, float, float] | None
    verdict: str

    @property
    def ratio(self) -> float | None:
        """The median after over the one before: above 1 is slower."""
        return self.after[1] / self.before[1] if self.before and self.after else None


def load(path: str | Path) -> list[dict[str, Any]]:
    """Read what ``hpcdask bench --json`` wrote, one record a line; empty lines do not count."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise UsageError(f"{path} cannot be read: {type(exc).__name__}: {exc}") from exc
    records = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            records.append(_parse(line, f"{path}, line {number}"))
    if not records:
        raise UsageError(f"{path} is empty: `hpcdask bench all --json {path}` writes it")
    return records


def _parse(line: str, where: str) -> dict[str, Any]:
    written = "each line has to be one that `hpcdask bench --json` wrote"
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as exc:
        raise UsageError(f"{where}: not JSON ({exc}); {written}") from exc
    if not isinstance(found, dict) or not isinstance(found.get("workload"), str):
        raise UsageError(f"{where}: not a result, it names no workload; {written}")
    for name in NUMBERS if found["workload"] != LIMITS else ():
        value: Any = found.get(name)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise UsageError(f"{where}: {name} is {value!r}, not a time in seconds; {written}")
    return found


def compare(before: Sequence[Record], after: Sequence[Record]) -> list[Change]:
    """Compare two runs, workload by workload, in the order of the first; of several lines the last.

    What is only after comes last; if nothing is in both, that is a UsageError.
    """
    old, new = _by_workload(before), _by_workload(after)
    if not old.keys() & new.keys():
        raise UsageError(
            "the two runs have no workload in common: before there are "
            f"{_names(old)}; after, {_names(new)}. Sizes, forms and devices have to be the same"
        )
    return [_change(old.get(key), new.get(key)) for key in {**old, **new}]


def _by_workload(records: Sequence[Record]) -> dict[str, Record]:
    return {
        json.dumps([record.get(name) for name in SAME_WORKLOAD], sort_keys=True): record
        for record in records
        if record["workload"] != LIMITS
    }


def _names(records: Mapping[str, Record]) -> str:
    return ", ".join(map(_name, records.values())) or "none"


def _name(record: Record) -> str:
    size = f" {decimal_bytes(record['bytes'])}" if record.get("bytes") else ""
    on = counts(record)
    return f"{name_of(record)}{size}{on and f' on {on}'}"


def _change(old: Record | None, new: Record | None) -> Change:
    name = _name(new or old or {})
    before, after = _times(old), _times(new)
    verdict = "same"
    if failed(new or {}):
        verdict = "wrong"
    elif before is None or after is None:
        verdict = "only after" if before is None else "only before"
    elif min(map(_runs, (old, new))) < LEAST_RUNS:
        verdict = "one run"
    elif after[1] > TOLERANCE * before[1] and after[0] > before[2]:
        verdict = "slower"
    elif before[1] > TOLERANCE * after[1] and before[0] > after[2]:
        verdict = "faster"
    return Change(name, before, after, verdict)


def _runs(record: Record | None) -> int:
    """Return the number of timings; least and greatest of start-up are over workers."""
    return len((record or {}).get("seconds") or range(LEAST_RUNS))


def _times(record: Record | None) -> tuple[float, float, float] | None:
    if record is None:
        return None
    return record["seconds_min"], record["seconds_median"], record["seconds_max"]


def exit_code(changes: Sequence[Change]) -> int:
    """Return 1 if anything got slower or wrong, otherwise 0."""
    return int(any(change.verdict in ("slower", "wrong") for change in changes))


def table(changes: Sequence[Change]) -> Table:
    """Return changes as a table, times in seconds; a ratio above 1 is slower."""
    made = Table(box=None, header_style="bold", pad_edge=False)
    made.add_column("workload", overflow="fold")
    for head in ("before", "after", "ratio"):
        made.add_column(head, justify="right")
    made.add_column("")
    for one in changes:
        ratio = "-" if one.ratio is None else f"{one.ratio:.3f}"
        made.add_row(one.name, _cell(one.before), _cell(one.after), ratio, one.verdict)
    return made


def _cell(times: tuple[float, float, float] | None) -> str:
    if times is None:
        return "-"
    least, median, greatest = (f"{seconds:.3g}" for seconds in times)
    return f"{median} s ({least} to {greatest})"


def compare_files(before: str | Path, after: str | Path) -> int:
    """Print a comparison of two files of ``hpcdask bench --json``, and return the exit code.

    Below the table stand the versions that differ, and the limits that differ by more than 5 %.
    """
    old, new = load(before), load(after)
    changes = compare(old, new)
    out = console()
    out.print(table(changes))
    if versions := _versions(_by_workload(old), _by_workload(new)):
        out.print(f"versions: {versions}")
    if limits := _limits(old, new):
        out.print(f"limits of the hardware, per second: {limits}")
    return exit_code(changes)


def _versions(old: Mapping[str, Record], new: Mapping[str, Record]) -> str:
    found: dict[str, None] = {}
    for key in old.keys() & new.keys():
        was, is_now = (run[key].get("versions") or {} for run in (old, new))
        for name in {**was, **is_now}:
            if was.get(name) != is_now.get(name):
                found[f"{name} {was.get(name) or 'none'} -> {is_now.get(name) or 'none'}"] = None
    return ", ".join(sorted(found))


def _limits(old: Sequence[Record], new: Sequence[Record]) -> str:
    was, is_now = (
        {name: rate for r in run for name, rate in (r.get("rates") or {}).items()}
        for run in (old, new)
    )
    return ", ".join(
        f"{name} {was[name]:.3g} -> {is_now[name]:.3g}"
        for name in was
        if name in is_now and not was[name] / TOLERANCE <= is_now[name] <= was[name] * TOLERANCE
    )
