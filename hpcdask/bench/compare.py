"""Compare the results of two runs of the bench: what got slower, what faster."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import click
from dask.utils import format_bytes

from hpcdask.bench.measurement import VERSION, Measurement, hardware_rate
from hpcdask.errors import UsageError
from hpcdask.logs import text_table

#: Ratio from which on a time is another one; that of transfers and of single times; and that of 8
#: bytes, which is event loops' time, with the least difference in seconds.
TOLERANCE, LOOSE, OF_LATENCY, LEAST_S = 1.15, 1.2, 1.5, 0.5e-3
#: Names of the parts of a workload: the whole, and the transfers of 8 bytes. Others are pairs.
WHOLE, LATENCY = "", "8 bytes"
UNCLEAR = (
    "unclear: the times scatter as much as they differ. Measure again with more --repeats, or "
    "append several runs to each file, before and after in turn"
)


class Change(NamedTuple):
    """Workload, or part of one, in two runs: all seconds of each; none where it is not."""

    name: str
    before: Sequence[float]
    after: Sequence[float]
    verdict: str

    def cells(self) -> list[str]:
        """Return the texts of a table's row; a ratio above 1 is slower."""
        ratio = "-"
        if self.before and self.after:
            ratio = f"{statistics.median(self.after) / statistics.median(self.before):.3f}"
        return [self.name, _text(self.before), _text(self.after), ratio, self.verdict]


def load(path: str | Path) -> list[Measurement]:
    """Read what ``hpcdask bench --json`` wrote, one measurement a line."""
    found: list[Measurement] = []
    try:
        for line in filter(str.strip, Path(path).read_text(encoding="utf-8").splitlines()):
            told = json.loads(line)
            if told["version"] != VERSION:
                raise ValueError(f"its version is {told['version']}, not {VERSION}")
            found.append(Measurement.from_json(told))
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as exc:
        raise UsageError(
            f"{path}, result {len(found) + 1} is none that `hpcdask bench --json` of this version "
            f"wrote ({type(exc).__name__}: {exc})"
        ) from exc
    return found


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
            yield Change(f"{name.partition(',')[0]}: {part}", was, now, verdict)


def _times(group: Sequence[Measurement]) -> dict[str, list[float]]:
    """Return all seconds of equal measurements, by part."""
    found: dict[str, list[float]] = {}
    for one in group:
        found.setdefault(WHOLE, []).extend(one.seconds)
        if one.exchange:
            names = one.exchange.names
            found.setdefault(LATENCY, []).extend(one.exchange.latencies())
            for pair in one.exchange.pairs:
                part = f"{names[pair.sender]} -> {names[pair.receiver]}"
                found.setdefault(part, []).extend(pair.seconds)
    return found


def _verdict(part: str, before: Sequence[float], after: Sequence[float]) -> str:
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
    tolerance = {WHOLE: LOOSE if single else TOLERANCE, LATENCY: OF_LATENCY}.get(part, LOOSE)
    verdict = judge(tolerance)
    if part == LATENCY and abs(min(after) - min(before)) < LEAST_S:
        return "same"
    return verdict if verdict in ("same", judge(1 + 2 * sum(errors))) else "unclear"


def _text(seconds: Sequence[float]) -> str:
    if not seconds:
        return "-"
    return f"{statistics.median(seconds):.3g} s ({min(seconds):.3g} to {max(seconds):.3g})"


def compare_files(before: str | Path, after: str | Path) -> int:
    """Print a comparison of two files of ``hpcdask bench --json``; return 1 if it is for the worse.

    All times of equal workloads count, so a file may hold several runs. Parts of a workload are
    told unless they are the same. Below the table are versions and rates that differ.
    """
    old, new = load(before), load(after)
    keys = dict.fromkeys(one.key for one in [*old, *new])
    sides = [[[one for one in run if one.key == key] for run in (old, new)] for key in keys]
    if not any(earlier and later for earlier, later in sides):
        names = (", ".join(map(_name, run)) for run in (old, new))
        raise UsageError(
            "the two runs have no workload in common: before there are {}; after, {}. Sizes, forms "
            "and devices have to be the same".format(*names)
        )
    changes = [change for earlier, later in sides for change in _changes(earlier, later)]
    heads = ["workload", "before", "after", "ratio", ""]
    click.echo(text_table([heads, *(change.cells() for change in changes)]))
    if any(one.verdict == "unclear" for one in changes):
        click.echo(UNCLEAR)
    was, now = old[-1].versions, new[-1].versions
    versions = [
        f"{name} {was[name] or 'none'} -> {now.get(name) or 'none'}"
        for name in was
        if was[name] != now.get(name)
    ]
    if versions:
        click.echo(f"versions: {', '.join(versions)}")
    rates = [next((one.rates for one in run if one.rates), {}) for run in (old, new)]
    limits = [
        f"{name} {hardware_rate(name, rates[0][name])} -> {hardware_rate(name, rates[1][name])}"
        for name in rates[0]
        if name in rates[1] and not 1 / TOLERANCE <= rates[1][name] / rates[0][name] <= TOLERANCE
    ]
    if limits:
        click.echo(f"limits of the hardware: {', '.join(limits)}")
    return int(any(one.verdict in ("slower", "wrong") for one in changes))
