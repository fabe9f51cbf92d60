"""Preloads and packages, before anything starts."""

from __future__ import annotations

import os
import socket

from hpcdask.errors import MissingExtra
from hpcdask.gpu.driver import cuda_extra
from hpcdask.spec.specs import WorkerSpec


def check_extras(*, cuda: bool) -> None:
    """Refuse to start workers on GPUs without the package that makes their context."""
    from importlib.util import find_spec

    try:
        found = find_spec("cuda.bindings") if cuda else True
    except ModuleNotFoundError:
        found = None
    if not found:
        raise MissingExtra("cuda-bindings", cuda_extra(), "a worker on a GPU")


def check_preloads(spec: WorkerSpec) -> None:
    """Find what workers and nannies are to load, before any of them starts; imports no package."""
    import importlib.util
    import sys

    from hpcdask.errors import UsageError

    for option, names in (("--preload", spec.preload), ("--preload-nanny", spec.preload_nanny)):
        for name in names:
            top = name.partition(".")[0]
            if " " in name or "://" in name:  # a program's text, or on the web
                break  # which may make importable what comes after it
            if name.endswith(".py"):
                if os.path.exists(name):
                    break
                what = f"the file {name} is not there (looked in {os.getcwd()})"
            elif top and (top in sys.modules or importlib.util.find_spec(top)):
                continue
            else:
                what = f"there is no module {top or name} (a file's name ends in .py)"
            raise UsageError(f"{option} {name}: {what}, on {socket.gethostname()}")
