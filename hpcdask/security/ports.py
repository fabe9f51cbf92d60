"""Ports from a range, where a firewall lets no others through.

All that this process listens on takes its port from there, unless a port was named.
"""

from __future__ import annotations

import contextlib
import errno
import random
import socket
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TypeVar

from hpcdask.errors import ClusterError, UsageError
from hpcdask.upstream import tornado as upstream

T = TypeVar("T")
KEY = "hpcdask.port-range"
#: Ports of a worker: its nanny's, its own, its http server's; with ucx also that of its listener,
#: and one of UCX's own on each network.
PER_WORKER, PER_UCX_WORKER = 3, 5
#: Where the ranks meet, the scheduler's, the dashboard's.
PER_SCHEDULER = 3
NEEDS = f"Each worker needs {PER_WORKER}, with ucx {PER_UCX_WORKER} or more"

_current: ContextVar[str | None] = ContextVar("port_range", default=None)


def use(port_range: str | None) -> None:
    """Take ports from a range such as ``"20000-20999"`` from here on; None changes nothing."""
    if port_range is not None:
        upstream.choose_ports_by(choose)
        _current.set(port_range)


@contextlib.contextmanager
def within(port_range: str | None) -> Iterator[None]:
    """The same, inside of the block and for what is started there."""
    before = _current.set(_current.get())
    try:
        use(port_range)
        yield
    finally:
        _current.reset(before)


def current() -> str | None:
    """The range in use here."""
    return _current.get()


def ports_of(port_range: str) -> range:
    """The ports of ``"20000-20999"``."""
    first, last = map(int, port_range.split("-"))
    return range(first, last + 1)


def choose(bind: Callable[[int], T], port_range: str | None = None) -> T:
    """Call `bind` with ports of the range in random order until one is free; without one, with 0.

    The range is the one in use, unless another is given. Raises ClusterError if all are taken.
    """
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
        f"give a wider range with {_named(port_range, '--port-range')}"
    )


def _named(port_range: str, option: str) -> str:
    """By what the user gave a range: the option, or a key of Dask's configuration."""
    import dask.config

    from hpcdask.upstream import configuration

    configured = "".join(str(dask.config.get(KEY, None)).split()).replace(":", "-")
    return configuration.named(KEY) if configured == port_range else option


def check_free(port: int) -> None:
    """Raise OSError if a port is taken, for who does not say so itself."""
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
    """Raise UsageError if so many workers, and `more` ports beside theirs, are too many.

    `option` is how a user gives the range who does not configure it.
    """
    needed = workers * (PER_UCX_WORKER if ucx else PER_WORKER) + more
    if port_range is not None and needed > (size := len(ports_of(port_range))):
        raise UsageError(
            f"{_named(port_range, option)}: {port_range} has {size} ports, and {workers} "
            f"worker{'s' * (workers > 1)} {where} need at least {needed}. {NEEDS}, and the "
            f"scheduler's node {PER_SCHEDULER} besides: give a wider range"
        )
