"""Errors where a private part of a dependency has moved, and parts of those that have few."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from hpcdask.errors import UsageError

DASK_CUDA, DASK_JOBQUEUE, TORNADO = "dask-cuda 26.10", "dask-jobqueue 0.9", "tornado 6.6"


def require(seen: str, holder: object, *names: str) -> None:
    """Raise UsageError if a holder lacks an attribute that the package `seen` has."""
    if moved := [name for name in names if not hasattr(holder, name)]:
        where = holder if inspect.ismodule(holder) else type(holder)
        refuse(seen, f"{where.__name__}.{', '.join(moved)}")


def refuse(seen: str, what: str) -> None:
    raise UsageError(
        f"hpcdask uses private parts of {seen.partition(' ')[0]}, and what is installed has moved "
        f"or changed {what}. Use {seen}, or a newer hpcdask"
    )


def results_on_device(store: Any) -> Any:
    """Return the zict buffer of results that are on the device; None where the store is another."""
    fast = getattr(getattr(store, "device_buffer", None), "fast", None)
    if fast is not None:
        require(DASK_CUDA, fast, "total_weight", "evict_until_below_target")
    return fast


def prologue(job: Any) -> Sequence[str]:
    """Return the lines that the user wants before the command of a dask-jobqueue job."""
    require(DASK_JOBQUEUE, job, "_job_script_prologue")
    return job._job_script_prologue or ()


@functools.cache
def choose_ports_by(choose: Callable[[Callable[[int], Any]], Any]) -> None:
    """Pick the port with `choose` whenever tornado binds to port 0."""
    from tornado import netutil, tcpserver

    holders: tuple[Any, ...] = (netutil, tcpserver)
    for holder in holders:
        require(TORNADO, holder, "bind_sockets")
    known = netutil.bind_sockets

    def bind_sockets(port: int, *args: Any, **kwargs: Any) -> Any:
        if port:
            return known(port, *args, **kwargs)
        return choose(lambda chosen: known(chosen, *args, **kwargs))

    for holder in holders:
        holder.bind_sockets = bind_sockets
