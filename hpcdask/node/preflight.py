"""Preloads and packages, before anything starts, and what will be slow."""

from __future__ import annotations

import os
import socket
import sys
from importlib.util import find_spec

from hpcdask.comm.transport import Choice
from hpcdask.errors import MissingExtra, UsageError
from hpcdask.gpu import memory_plan
from hpcdask.gpu.driver import cuda_extra
from hpcdask.logs import say
from hpcdask.spec.specs import WorkerSpec

from . import profiling


def check_extras(*, cuda: bool) -> None:
    """Raise MissingExtra if workers on GPUs lack the package that makes their context."""
    try:
        found = find_spec("cuda.bindings") if cuda else True
    except ModuleNotFoundError:
        found = None
    if not found:
        raise MissingExtra("cuda-bindings", cuda_extra(), "a worker on a GPU")


def check_parts(spec: WorkerSpec) -> None:
    """Find here what workers are to load, and the tool that profiles them."""
    check_preloads(spec)
    profiling.check(spec)


def check_preloads(spec: WorkerSpec) -> None:
    """Find what workers and nannies are to load, before any of them starts; imports no package."""
    for option, names in (("--preload", spec.preload), ("--preload-nanny", spec.preload_nanny)):
        for name in names:
            top = name.partition(".")[0]
            if " " in name or "://" in name:  # a program's text, or on the web
                break  # which may make importable what comes after it
            if name.endswith(".py"):
                if os.path.exists(name):
                    break
                what = f"the file {name} is not there (looked in {os.getcwd()})"
            elif top and (top in sys.modules or find_spec(top)):
                continue
            else:
                what = f"there is no module {top or name} (a file's name ends in .py)"
            raise UsageError(
                f"{option} {name}: {what}, on {socket.gethostname()}. Name what all nodes have"
            )


def tell_warnings(spec: WorkerSpec, choice: Choice, *, on_device: bool) -> None:
    """Say what will be slow."""
    lacks = memory_plan.missing(spec) if on_device else None
    for warning in filter(None, (*choice.warnings, lacks)):
        say(f"warning: {warning}")
