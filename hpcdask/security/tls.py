"""TLS in which the end of one connection does not end others.

OpenSSL keeps a list of errors for each thread, and looks into it when a connection has nothing to
read. Python leaves a broken pipe there (CPython's issue 148594), so the next connection of the
thread, healthy and idle, is told of a broken pipe and closed, which breaks the pipe of its peer,
and so on: with OpenSSL 3.5, one connection that was closed early could end a cluster.
"""

from __future__ import annotations

import contextlib
import functools
import ssl
from typing import Any

from distributed import Security


class ClusterSecurity(Security):
    """Security of distributed, with connections of `Socket`."""

    @classmethod
    def of(cls, other: Security) -> ClusterSecurity:
        """Return the same credentials as `ClusterSecurity`."""
        made = cls()
        for name in Security.__slots__:
            setattr(made, name, getattr(other, name))
        return made

    def get_connection_args(self, role: str) -> dict[str, Any]:
        """Return what a comm that is dialled wants."""
        return _with_our_sockets(Security.get_connection_args(self, role))

    def get_listen_args(self, role: str) -> dict[str, Any]:
        """Return what a listener wants."""
        return _with_our_sockets(Security.get_listen_args(self, role))


def _with_our_sockets(arguments: dict[str, Any]) -> dict[str, Any]:
    if arguments["ssl_context"] is not None:
        arguments["ssl_context"].sslsocket_class = Socket
    return arguments


class Socket(ssl.SSLSocket):
    """A TLS connection that takes its errors back out of OpenSSL's list."""

    def read(self, *args: Any, **kwargs: Any) -> Any:
        """Receive; `recv` and `recv_into` call it."""
        with _forgotten():
            return super().read(*args, **kwargs)

    def send(self, *args: Any, **kwargs: Any) -> int:
        """Send what the connection takes."""
        with _forgotten():
            return super().send(*args, **kwargs)

    def do_handshake(self, *args: Any, **kwargs: Any) -> None:
        """Begin to speak TLS."""
        with _forgotten():
            super().do_handshake(*args, **kwargs)


class _forgotten(contextlib.AbstractContextManager[None]):
    """Take an error of the block out of the list; of an `ssl.SSLError` Python has emptied it."""

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if isinstance(error, OSError) and not isinstance(error, ssl.SSLError):
            # A new connection does that, too
            _spare_context().wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO(), server_side=True)


@functools.cache
def _spare_context() -> ssl.SSLContext:
    return ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
