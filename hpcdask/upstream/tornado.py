"""Parts of tornado, as in 6.6: its servers know no range of ports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tornado import netutil, tcpserver

from .parts import require

SEEN = "tornado 6.6"


def choose_ports_by(choose: Callable[[Callable[[int], Any]], Any]) -> None:
    """Pick the port with `choose` whenever a caller binds to port 0.

    distributed has ranges for nannies and workers only, not for schedulers and http servers.
    """
    holders: tuple[Any, ...] = (netutil, tcpserver)
    for holder in holders:
        require(SEEN, holder, "bind_sockets")
    known = netutil.bind_sockets
    if getattr(known, "chooses", None) is choose:
        return

    def bind_sockets(port: int, *args: Any, **kwargs: Any) -> Any:
        if port:
            return known(port, *args, **kwargs)
        return choose(lambda chosen: known(chosen, *args, **kwargs))

    bind_sockets.chooses = choose  # type: ignore[attr-defined]
    for holder in holders:
        holder.bind_sockets = bind_sockets
