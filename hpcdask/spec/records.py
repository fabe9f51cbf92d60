"""Dataclasses that go from process to process as JSON."""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
import typing
from collections.abc import Mapping
from typing import Any, Self

COLLECTIONS = (tuple, list, frozenset)


class Record:
    """Base of such dataclasses. Fields may be records, enums, `COLLECTIONS` of them, or None."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields for `from_json`."""
        return dataclasses.asdict(self)  # type: ignore[call-overload, no-any-return]

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Read what `to_json` and JSON made of one."""
        types = _types(cls)  # type: ignore[arg-type]
        return cls(**{name: _read(value, types.get(name)) for name, value in data.items()})


_types = functools.cache(typing.get_type_hints)


def _read(value: Any, kind: Any) -> Any:
    """Return a value of a field of this type, of which JSON may have made something else."""
    if isinstance(kind, enum.EnumType):
        return kind(value)
    if not isinstance(value, dict | list | tuple):
        return value
    parts = typing.get_args(kind)
    if types.NoneType in parts:
        return _read(value, parts[0])
    if isinstance(kind, type) and issubclass(kind, Record):
        return kind.from_json(value)  # type: ignore[arg-type]
    origin = typing.get_origin(kind)
    return origin(_read(one, parts[0]) for one in value) if origin in COLLECTIONS else value
