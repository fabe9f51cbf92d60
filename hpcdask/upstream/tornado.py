"""Parts of tornado, as in 6.6: its servers know no limit of connections, and no range of ports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tornado import netutil, tcpserver

from .parts import require

SEEN = "tornado 6.6"


def accept_by(server: Any, acceptor: Callable[[Any, Callable[..., object]], Any]) -> None:
    """Accept a server's connections by another: of a socket, and with what handles them."""
    require(SEEN, server, "_sockets", "_handlers", "_handle_connection")
    for number, sock in server._sockets.items():
        server._handlers[number]()
        server._handlers[number] = acceptor(sock, server._handle_connection).stop


def choose_ports_by(choose: Callable[[Callable[[int], Any]], Any]) -> None:
    """Have `choose` call, with the port that it likes, what listens where no port was named.

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
