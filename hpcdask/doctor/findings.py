"""Findings of the doctor: one `Finding` for each thing that was looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hpcdask.spec.records import Record

#: ``ok``; ``note``: it does not work, and may not be needed; ``warning``: it works, but slowly or
#: not always; ``error``: it does not work.
Status = Literal["ok", "note", "warning", "error"]
#: Beginning of the value of a warning of lost speed.
SLOW = "slow: "
EXIT_CODES: dict[Status, int] = {"ok": 0, "note": 0, "warning": 1, "error": 2}
GIB = 2**30


@dataclass(frozen=True)
class Finding(Record):
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
    """Maker of the findings of one group; a ``slow`` one is a warning of lost speed."""

    group: str

    def ok(self, topic: str, value: str, hint: str = "") -> Finding:
        """Return a good finding; the hint may say what would be better still."""
        return Finding(self.group, topic, "ok", value, hint)

    def note(self, topic: str, value: str, advice: str) -> Finding:
        """Return a finding on something that does not work, and may not be needed here."""
        return Finding(self.group, topic, "note", value, advice)

    def warning(self, topic: str, value: str, advice: str) -> Finding:
        """Return a finding on something that works, but not always."""
        return Finding(self.group, topic, "warning", value, advice)

    def slow(self, topic: str, value: str, advice: str) -> Finding:
        """Return a warning of lost speed."""
        return self.warning(topic, f"{SLOW}{value}", advice)

    def error(self, topic: str, value: str, advice: str) -> Finding:
        """Return a finding on something that does not work."""
        return Finding(self.group, topic, "error", value, advice)
