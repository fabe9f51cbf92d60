"""What a reader of a report should know first: how near the limits, and what to look at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpcdask.bench.records import failed, reached

Record = Mapping[str, Any]
#: A workload below this part of its limit is worth a look.
WORTH_A_LOOK = 0.5
#: Things to look at that are shown.
MOST = 3


@dataclass(frozen=True)
class Verdict:
    """A sentence about the limits, which may be empty, and what to look at, the worst first."""

    sentence: str
    look_at: list[str]


def verdict(shown: Sequence[tuple[str, Record]]) -> Verdict:
    """Judge records by slow pairs, GPUs and the part of their limits; checks have a frame apart."""
    limited = [(one["limit"]["fraction"], label, one) for label, one in shown if one.get("limit")]
    limited.sort(key=lambda one: one[0])
    slow = [said["text"] for _, one in shown for said in (one.get("result") or {}).get("slow", ())]
    told = [
        f"{label}: {problem}"
        for label, one in shown
        for problem in one.get("gpus", {}).get("usage", {}).get("problems", ())
    ]
    far = [
        f"{label} runs at {reached(one)}" + (": see its timeline" if one.get("timeline") else "")
        for fraction, label, one in limited
        if fraction < WORTH_A_LOOK and not failed(one)
    ]
    return Verdict(_sentence(limited), [*slow, *told, *far][:MOST])


def _sentence(limited: Sequence[tuple[float, str, Record]]) -> str:
    if not limited:
        return ""
    _, label, best = limited[-1]
    if len(limited) == 1:
        return f"{label} runs at {reached(best)}."
    near = sum(fraction >= WORTH_A_LOOK for fraction, _, _ in limited)
    return (
        f"{near} of {len(limited)} workloads {'reaches' if near == 1 else 'reach'} half of what "
        f"this hardware allows, or more. "
        f"Nearest is {label}, at {reached(best)}."
    )
