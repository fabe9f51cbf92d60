"""TLS of distributed, in which the end of one connection does not end others.

OpenSSL keeps a list of errors for each thread, and looks into it when a connection has nothing to
read. Python leaves a broken pipe there (CPython's issue 148594), so the next connection of the
thread, healthy and idle, is told of a broken pipe and closed, which breaks the pipe of its peer,
and so on: with OpenSSL 3.5, one connection that was closed early could end a cluster.
"""

from __future__ import annotations

import functools
import ssl
from collections.abc import Callable
from typing import Any, TypeVar

from distributed.comm import registry, tcp

from .distributed import SEEN
from .parts import require

Result = TypeVar("Result")


def serve_tls_by(connector: type[tcp.TLSConnector], listener: type[tcp.TLSListener]) -> None:
    """Make the comms of this process whose addresses begin with tls:// by these classes."""
    require(SEEN, tcp.TLSBackend, "_connector_class", "_listener_class")

    class Backend(tcp.TLSBackend):
        _connector_class, _listener_class = connector, listener

    registry.backends["tls"] = Backend()


def _without_traces(method: Callable[..., Result]) -> Callable[..., Result]:
    """Take the method's errors out of OpenSSL's list; of an `ssl.SSLError` Python does that."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Result:
        try:
            return method(*args, **kwargs)
        except ssl.SSLError:
            raise
        except OSError:
            # a new connection empties the list
            spare = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            spare.wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO(), server_side=True)
            raise

    return call


class Socket(ssl.SSLSocket):
    """TLS connection that takes its errors back out of OpenSSL's list."""

    read = _without_traces(ssl.SSLSocket.read)
    send = _without_traces(ssl.SSLSocket.send)
    do_handshake = _without_traces(ssl.SSLSocket.do_handshake)
