"""Detached clusters in the panel of JupyterLab's Dask extension; docs/detached.md has the lines.

The extension calls ``labextension.factory``'s class with its ``kwargs`` and ``asynchronous=True``,
for each click on "New" and for each entry of ``labextension.initial``.
"""

from __future__ import annotations

import contextlib
from typing import Any

from hpcdask.clusters.classes import class_of
from hpcdask.errors import UsageError
from hpcdask.jobs import detached
from hpcdask.queues.registry import systems

from .attached import AttachedCluster, attach


def attach_or_make(
    name: str, *, system: str | None = None, asynchronous: bool = False, **keywords: Any
) -> AttachedCluster:
    """Attach to your detached cluster of this name, or make it if it does not run.

    Parameters
    ----------
    name
        Its name.
    system
        Its queueing system, such as ``"slurm"``. Default: it is never made here.
    asynchronous
        Use it with ``await``.
    **keywords
        Those of the system's cluster class, with which it is made.

    Raises
    ------
    UsageError
        It does not run, and no system is given; or the system is unknown.
    """
    with contextlib.suppress(UsageError):  # there is none
        if detached.find(name).ended is None:
            return attach(name, asynchronous=asynchronous)
    if system not in systems():
        raise UsageError(
            f"no detached cluster {name} runs. hpcdask up {name} makes one; and so does the panel "
            f"with a system, one of {', '.join(systems())}, and its keywords in "
            f"labextension.factory.kwargs"
        )
    made: Any = class_of(system)
    found: AttachedCluster = made(name=name, detached=True, asynchronous=asynchronous, **keywords)
    return found
