"""Undocumented parts of CuPy, as in 14.2."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

from .parts import require

SEEN = "CuPy 14.2"


def import_cupy() -> Any:
    """CuPy, whose ``cupyx`` is an ordinary module from now on.

    CuPy makes it a lazy one, which has a lock from Python 3.12 on. Of two threads that use it first
    one holds that lock and waits for an import, and the other, which imports, waits for the lock.
    Imports that wait for each other are an error instead. There is none between those that begin
    with the same module, as dask's and ours do: ``cupyx.scipy.sparse``.
    """
    import cupy

    if type(sys.modules.get("cupyx")).__name__ == "_LazyModule":
        generator: Any = importlib.import_module("cupy.random._generator")
        require(SEEN, generator, "cupyx")
        del sys.modules["cupyx"]
        generator.cupyx = _Cupyx("cupyx")
    return cupy


class _Cupyx(ModuleType):
    """Imports what it stands for when it is used, as an import statement does."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module("cupyx"), name)
