"""One queue of events, with deadlines."""

from __future__ import annotations

from typing import Any, NamedTuple


class Event(NamedTuple):
    """Something that happened: what, and the rank, number or code that belongs to it."""

    what: str
    value: Any = None


class _Interrupted(Exception):
    """A signal came while the cluster was coming up."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number
