"""Errors where a private part of a dependency has moved."""

from __future__ import annotations

import inspect

from hpcdask.errors import UsageError


def require(seen: str, holder: object, *names: str) -> None:
    """Refuse what lacks one of these attributes: to set it would do nothing, and say nothing.

    ``seen`` is the package with the versions that have them.
    """
    if moved := [name for name in names if not hasattr(holder, name)]:
        where = holder if inspect.ismodule(holder) else type(holder)
        refuse(seen, f"{where.__name__}.{', '.join(moved)}")


def refuse(seen: str, what: str) -> None:
    """Raise the UsageError."""
    raise UsageError(
        f"hpcdask uses private parts of {seen.partition(' ')[0]}, and what is installed has moved "
        f"or changed {what}. Use {seen}, or a newer hpcdask"
    )
