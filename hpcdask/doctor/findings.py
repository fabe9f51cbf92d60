"""Findings of the doctor: one `Finding` for each thing it looked at."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hpcdask.gpu.devices import Gpu
from hpcdask.logs import spans

#: ``ok``; ``note``: it does not work, and may not be needed; ``warning``: it works, but slowly or
#: not always; ``error``: it does not work.
Status = Literal["ok", "note", "warning", "error"]
#: What a process learnt of its machine, as JSON: one entry per group of facts.
Facts = dict[str, Any]
#: How the value of a warning begins that tells of lost speed.
SLOW = "slow: "
EXIT_CODES: dict[Status, int] = {"ok": 0, "note": 0, "warning": 1, "error": 2}
GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """Finding on one thing that was looked at.

    `group` is its place in the report, such as ``GPUs``. `advice` is only empty for ``ok``.
    `ranks` are those of the node that it holds for; empty for all of them.
    """

    group: str
    topic: str
    status: Status
    value: str
    advice: str = ""
    ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.status != "ok" and not self.advice:
            raise ValueError(f"{self.topic}: a {self.status} has to say what to do")


@dataclass(frozen=True)
class Reporter:
    """Makes the findings of one group."""

    group: str

    def ok(self, topic: str, value: str, hint: str = "") -> Finding:
        """A good finding; the hint may say what would be better still."""
        return Finding(self.group, topic, "ok", value, hint)

    def note(self, topic: str, value: str, advice: str) -> Finding:
        """It does not work, and may not be needed here."""
        return Finding(self.group, topic, "note", value, advice)

    def slow(self, topic: str, value: str, advice: str) -> Finding:
        """It works, but not at full speed: a warning whose value begins with that."""
        return self.warning(topic, f"{SLOW}{value}", advice)

    def warning(self, topic: str, value: str, advice: str) -> Finding:
        """It works, but slowly or not always."""
        return Finding(self.group, topic, "warning", value, advice)

    def error(self, topic: str, value: str, advice: str) -> Finding:
        """It does not work."""
        return Finding(self.group, topic, "error", value, advice)


def merge_ranks(found: Mapping[int, list[Finding]]) -> list[Finding]:
    """Merge the findings of a node's ranks: common ones once, the rest with their ranks."""
    merged: dict[Finding, list[int]] = {}
    for rank, findings in sorted(found.items()):
        for finding in findings:
            merged.setdefault(finding, []).append(rank)
    return [
        finding if len(ranks) == len(found) else dataclasses.replace(finding, ranks=tuple(ranks))
        for finding, ranks in merged.items()
    ]


def amount(nbytes: float) -> str:
    """``139.8 GiB``, for people."""
    for unit, size in (("TiB", 2**40), ("GiB", GIB), ("MiB", 2**20)):
        if nbytes >= size:
            return f"{nbytes / size:.4g} {unit}"
    return f"{nbytes / 1024:.3g} KiB"


def known_gpus(facts: Facts) -> tuple[Gpu, ...]:
    """A node's GPUs; none where they could not be looked at."""
    return tuple(
        Gpu(gpu["uuid"], gpu["name"], gpu["memory"], tuple(gpu["cores"]))
        for gpu in facts.get("gpus", {}).get("gpus", ())
    )


def which(gpus: list[dict[str, Any]], chosen: list[dict[str, Any]]) -> str:
    """Name some of the GPUs by their number in nvidia-smi; empty for all."""
    if len(chosen) == len(gpus):
        return ""
    return f"GPU {spans(gpu['index'] for gpu in chosen)}: "
