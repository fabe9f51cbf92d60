"""Kinds of a node's ranks, as ``--groups`` says. The standard library only."""

from __future__ import annotations

import re
from collections.abc import Iterable

#: Each rank is what it sees: on the GPU where there is one, else on the CPU.
AUTO = ("auto",)


def kinds(groups: str | Iterable[str]) -> list[str]:
    """Return ``gpu`` or ``cpu`` for each rank of a node; nothing where each is what it sees."""
    text = groups if isinstance(groups, str) else " ".join(groups)
    found = re.findall(r"\b(gpu|cpu):(\d{1,4})\b", text)
    return [kind for kind, count in found for _ in range(int(count))]
