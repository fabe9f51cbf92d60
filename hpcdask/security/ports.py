"""Ports from a range, where a firewall lets no others through."""

from __future__ import annotations

import contextlib
import errno
import random
import socket
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TypeVar

from hpcdask.errors import ClusterError, UsageError
from hpcdask.upstream import parts as upstream

T = TypeVar("T")
#: Ports of a worker: its nanny's, its own, its http server's; with ucx also that of its listener,
#: and one of UCX's own on each network.
PER_WORKER, PER_UCX_WORKER = 3, 5
#: Where the ranks meet, the scheduler's, the dashboard's.
PER_SCHEDULER = 3
NEEDS = f"Each worker needs {PER_WORKER}, with ucx {PER_UCX_WORKER} or more"
WIDER = "give a wider --port-range (by default hpcdask.port-range of Dask's configuration)"

_current: ContextVar[str | None] = ContextVar("port_range", default=None)
#: Returns the range in use here, or None.
current = _current.get


def use(port_range: str | None) -> None:
    """Take ports from a range such as ``"20000-20999"`` from here on; None changes nothing."""
    if port_range is not None:
        upstream.choose_ports_by(choose)
        _current.set(port_range)


@contextlib.contextmanager
def within(port_range: str | None) -> Iterator[None]:
    """Use a range inside of the block and for what is started there."""
    before = _current.set(current())
    try:
        use(port_range)
        yield
    finally:
        _current.reset(before)


def ports_of(port_range: str) -> range:
    first, last = map(int, port_range.split("-"))
    return range(first, last + 1)


def choose(bind: Callable[[int], T], port_range: str | None = None) -> T:
    """Call `bind` with ports of the range (by default the one in use), or 0, until one is free."""
    if (port_range := port_range or current()) is None:
        return bind(0)
    ports = ports_of(port_range)
    # a generator of its own: the user's may have a seed
    for port in random.Random().sample(ports, len(ports)):
        try:
            return bind(port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise ClusterError(
        f"all {len(ports)} ports of {port_range} are taken on {socket.gethostname()}. {NEEDS}: "
        f"{WIDER}"
    )


def check_free(port: int) -> None:
    """Raise OSError if a port is taken, for those who do not say so themselves."""
    with socket.socket() as probe:
        probe.bind(("", port))


def check_size(
    port_range: str | None,
    workers: int,
    *,
    ucx: bool,
    more: int = 0,
    where: str,
    option: str = "--port-range",
) -> None:
    """Raise UsageError if so many workers, and `more` ports beside theirs, are too many."""
    needed = workers * (PER_UCX_WORKER if ucx else PER_WORKER) + more
    if port_range is not None and needed > (size := len(ports_of(port_range))):
        raise UsageError(
            f"{option}: {port_range} has {size} ports, and {workers} "
            f"worker{'s' * (workers > 1)} {where} need at least {needed}. {NEEDS}, and the "
            f"scheduler's node {PER_SCHEDULER} besides: {WIDER}"
        )
