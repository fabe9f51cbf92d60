"""Dataclasses that go from process to process as JSON."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Callable, Mapping
from typing import Any, Self

Reader = Callable[[Any], Any]


class Record:
    """Base of such dataclasses. Fields may be records, and tuples or lists of them, or None."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields for `from_json`."""
        return dataclasses.asdict(self)  # type: ignore[call-overload, no-any-return]

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Read what `to_json` and JSON made of one."""
        read = _readers(cls)  # type: ignore[arg-type]
        changed = {name: read[name](data[name]) for name in read.keys() & data.keys()}
        return cls(**{**data, **changed})


@functools.cache
def _readers(record: type[Record]) -> dict[str, Reader]:
    """Return readers of the fields of which JSON makes something else."""
    readers = {name: _reader(kind) for name, kind in typing.get_type_hints(record).items()}
    return {name: read for name, read in readers.items() if read is not None}


def _reader(kind: Any) -> Reader | None:
    """Return the reader of values of a type; None for those that JSON leaves as they are."""
    parts = typing.get_args(kind)
    if type(None) in parts:
        read = _reader(parts[0])
        return read and (lambda value: None if value is None else read(value))
    if isinstance(kind, type) and issubclass(kind, Record):
        return kind.from_json
    if (origin := typing.get_origin(kind)) in (tuple, list):
        inner = _reader(parts[0])
        return (lambda values: origin(map(inner, values))) if inner else origin
    return None
