"""Compare the results of two runs of the bench: what got slower, what faster."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dask.utils import format_bytes
from rich.table import Table

from hpcdask.bench.measurement import VERSION, Measurement, console
from hpcdask.errors import UsageError

#: Ratio from which on a time is another one, and that of transfers and of single times.
TOLERANCE, LOOSE = 1.15, 1.2
UNCLEAR = (
    "unclear: the times scatter as much as they differ. Measure again with more --repeats, or "
    "append several runs to each file, before and after in turn"
)


class Part(NamedTuple):
    """Part of a workload, and the ratio and the seconds from which on its time is another one."""

    name: str
    tolerance: float = TOLERANCE
    least_s: float = 0.0


WHOLE = Part("")
#: The time of 8 bytes is that of event loops.
LATENCY = Part("8 bytes", 1.5, 0.5e-3)


class Change(NamedTuple):
    """Workload, or part of one, in two runs: all seconds of each; none where it is not."""

    name: str
    before: Sequence[float]
    after: Sequence[float]
    verdict: str


def load(path: str | Path) -> list[Measurement]:
    """Read what ``hpcdask bench --json`` wrote, one measurement a line."""
    found: list[Measurement] = []
    try:
        lines = filter(str.strip, Path(path).read_text(encoding="utf-8").splitlines())
        found.extend(_parse(json.loads(line)) for line in lines)
    except (AttributeError, KeyError, OSError, TypeError, ValueError, RecursionError) as exc:
        raise UsageError(
            f"{path}, result {len(found) + 1} is none that `hpcdask bench --json` of this version "
            f"wrote ({type(exc).__name__}: {exc})"
        ) from exc
    if not found:
        raise UsageError(f"{path} is empty: `hpcdask bench all --json {path}` writes it")
    return found


def _parse(told: dict[str, object]) -> Measurement:
    if told["version"] != VERSION:
        raise ValueError(f"its version is {told['version']}, not {VERSION}")
    found = Measurement.from_json(told)
    if not found.seconds or not all(0 < one < math.inf for one in found.seconds):
        raise ValueError(f"seconds are {list(found.seconds)}")
    return found


def compare(before: Sequence[Measurement], after: Sequence[Measurement]) -> list[Change]:
    """Compare two runs, workload by workload, in the order of the first.

    All times of equal workloads count, so a file may hold several runs. Parts of a workload are
    told unless they are the same. If nothing is in both, that is a UsageError.
    """
    keys = dict.fromkeys(one.key for one in [*before, *after])
    sides = [[[one for one in run if one.key == key] for run in (before, after)] for key in keys]
    if not any(old and new for old, new in sides):
        names = (", ".join(map(_name, run)) for run in (before, after))
        raise UsageError(
            "the two runs have no workload in common: before there are {}; after, {}. Sizes, forms "
            "and devices have to be the same".format(*names)
        )
    return [change for old, new in sides for change in _changes(old, new)]


def _name(one: Measurement) -> str:
    size = format_bytes(one.nbytes) if one.nbytes else ""
    asked = [
        " ".join(filter(None, [one.label, size, "on", one.where])),
        f"k = {one.k}" if one.k and one.k != 10 else "",
        f"chunks of {format_bytes(one.chunk_nbytes)}" if one.chunk_nbytes else "",
        f"blocks of {format_bytes(one.block_nbytes)}" if one.block_nbytes else "",
        f"{one.workers} workers" if one.workers != sum(one.devices.values()) else "",
    ]
    return ", ".join(filter(None, asked))


def _changes(old: list[Measurement], new: list[Measurement]) -> Iterator[Change]:
    """Yield the change of a workload, and those of its parts that are not the same."""
    name, before, after = _name((old or new)[0]), _times(old), _times(new)
    for part in before | after:
        was, now = before.get(part, []), after.get(part, [])
        verdict = _verdict(part, was, now)
        if part == WHOLE:
            wrong = any(one.failed for one in new)
            yield Change(name, was, now, "wrong" if wrong else verdict)
        elif verdict in ("slower", "faster", "unclear"):
            yield Change(f"{name.partition(',')[0]}: {part.name}", was, now, verdict)


def _times(group: Sequence[Measurement]) -> dict[Part, list[float]]:
    """Return all seconds of equal measurements."""
    found: dict[Part, list[float]] = {}
    for one in group:
        found.setdefault(WHOLE, []).extend(one.seconds)
        if one.exchange:
            found.setdefault(LATENCY, []).extend(one.exchange.latencies())
            for pair in one.exchange.pairs:
                ends = (one.exchange.names[end] for end in (pair.sender, pair.receiver))
                found.setdefault(Part(" -> ".join(ends), LOOSE), []).extend(pair.seconds)
    return found


def _verdict(part: Part, before: Sequence[float], after: Sequence[float]) -> str:
    """Judge by the best times and the medians: the worst may be somebody else's doing.

    A change is unclear within twice the standard error, estimated by the better half of each side.
    """
    if not before or not after:
        return "only before" if before else "only after"
    ratios = [of(after) / of(before) for of in (min, statistics.median)]

    def judge(bound: float) -> str:
        if min(ratios) > bound:
            return "slower"
        return "faster" if max(ratios) < 1 / bound else "same"

    errors = (
        (statistics.median(side) / min(side) - 1) / math.sqrt(len(side)) for side in (before, after)
    )
    single = min(len(before), len(after)) == 1
    verdict = judge(max(part.tolerance, LOOSE) if single else part.tolerance)
    if abs(min(after) - min(before)) < part.least_s:
        return "same"
    return verdict if verdict in ("same", judge(1 + 2 * sum(errors))) else "unclear"


def _text(seconds: Sequence[float]) -> str:
    if not seconds:
        return "-"
    return f"{statistics.median(seconds):.3g} s ({min(seconds):.3g} to {max(seconds):.3g})"


def compare_files(before: str | Path, after: str | Path) -> int:
    """Print a comparison of two files of ``hpcdask bench --json``; return 1 if it is for the worse.

    Below the table are the versions, and the hardware's rates, that differ.
    """
    old, new = load(before), load(after)
    changes, out = compare(old, new), console()
    made = Table(box=None, header_style="bold", pad_edge=False)
    made.add_column("workload", overflow="fold")
    for head in ("before", "after", "ratio"):
        made.add_column(head, justify="right")
    made.add_column("")
    for name, *sides, verdict in changes:
        was, now = (statistics.median(side or [math.nan]) for side in sides)
        ratio = f"{now / was:.3f}" if all(sides) else "-"  # above 1 is slower
        made.add_row(name, *map(_text, sides), ratio, verdict)
    out.print(made)
    if any(one.verdict == "unclear" for one in changes):
        out.print(UNCLEAR)
    versions = [
        f"{name} {was or 'none'} -> {now or 'none'}"
        for name, was, now in _pairs(*(run[-1].versions for run in (old, new)))
        if was != now
    ]
    if versions:
        out.print(f"versions: {', '.join(versions)}")
    rates = ({k: v for one in run for k, v in one.rates.items()} for run in (old, new))
    limits = [
        f"{name} {was:.3g} -> {now:.3g}"
        for name, was, now in _pairs(*rates)
        if was and now and not 1 / TOLERANCE <= now / was <= TOLERANCE
    ]
    if limits:
        out.print(f"limits of the hardware, per second: {', '.join(limits)}")
    return int(any(one.verdict in ("slower", "wrong") for one in changes))


def _pairs(before: dict[str, Any], after: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return each name with its value on either side, or None."""
    return [(name, before.get(name), after.get(name)) for name in sorted({**before, **after})]
