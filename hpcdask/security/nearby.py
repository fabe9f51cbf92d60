"""TLS of a cluster, which processes of one user on one host do without.

The kernel keeps them apart from others as well as TLS does, and a Unix socket needs no encryption.
Beside each TLS port its owner listens on a Unix socket in Linux's abstract namespace, which leaves
no file, and both ends ask the kernel who the other is. Otherwise the connection is TLS.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import socket
import ssl
import struct
from typing import Any

from distributed import Security
from distributed.comm import tcp
from tornado import netutil
from tornado.ioloop import IOLoop
from tornado.iostream import IOStream

from hpcdask.upstream.tls import Socket, serve_tls_by

from . import private

logger = logging.getLogger("distributed.hpcdask.nearby")

#: What a listener says first.
GREETING = b"hpcdask\n"
#: Connections that the kernel accepts ahead; its own limit may be lower.
BACKLOG = 4096


class NearbySecurity(Security):
    """Credentials of a cluster whose processes on one host talk over Unix sockets."""

    @classmethod
    def of(cls, other: Security) -> NearbySecurity:
        """Return the same credentials as `NearbySecurity`."""
        made = cls()
        for name in Security.__slots__:
            setattr(made, name, getattr(other, name))
        return made

    def get_connection_args(self, role: str) -> dict[str, Any]:
        return _prepared(super().get_connection_args(role))

    def get_listen_args(self, role: str) -> dict[str, Any]:
        return _prepared(super().get_listen_args(role))


def _prepared(arguments: dict[str, Any]) -> dict[str, Any]:
    if (context := arguments["ssl_context"]) is not None:
        context.sslsocket_class = Socket
        context.cluster = b"".join(context.get_ca_certs(binary_form=True))
        _use_sockets()
    return arguments


def socket_name(address: str, context: ssl.SSLContext) -> str:
    """Return the name of the Unix socket beside a TLS port of a cluster."""
    known = address.encode() + getattr(context, "cluster", b"")
    return f"\0hpcdask-{hashlib.sha256(known).hexdigest()[:32]}"


class _Socket(socket.socket):
    """Unix socket that distributed treats like TCP."""

    def setsockopt(self, level: int, *args: Any) -> None:
        """Set an option, unless it is TCP's own."""
        if level != socket.SOL_TCP:
            super().setsockopt(level, *args)


class NearbyComm(tcp.TCP):
    """Connection to a process of this user on this host."""

    def __init__(self, stream: IOStream, address: str, deserialize: bool) -> None:
        super().__init__(stream, address, address, deserialize)  # on one host by its name, too


def _to_stream(sock: socket.socket) -> IOStream:
    """Return the stream of a connection. Raises NotPrivate if another user has its other end."""
    own = _Socket(fileno=sock.detach())
    _, user, _ = struct.unpack("3i", own.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if user != os.geteuid():
        own.close()
        raise private.NotPrivate("another user's process is at its other end")
    return IOStream(own, max_buffer_size=tcp.MAX_BUFFER_SIZE)


class _Connector(tcp.TLSConnector):
    async def connect(
        self, address: str, deserialize: bool = True, **connection_args: Any
    ) -> tcp.TCP:
        """Connect to a process of this host by its Unix socket, to others by TLS."""
        context: Any = connection_args.get("ssl_context")
        if hasattr(context, "cluster"):
            with contextlib.suppress(OSError):
                stream = await _connect_to(socket_name(address, context))
                return NearbyComm(stream, self.prefix + address, deserialize)
        far: Any = super()
        comm: tcp.TCP = await far.connect(address, deserialize, **connection_args)
        return comm


async def _connect_to(name: str) -> IOStream:
    """Connect to a Unix socket whose owner answers."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.setblocking(False)
        sock.connect(name)  # done at once, or refused
        stream = _to_stream(sock)
    try:
        await stream.read_bytes(len(GREETING))  # a hanging process is to time out here
    except BaseException:
        stream.close()
        raise
    return stream


class _Listener(tcp.TLSListener):
    async def start(self) -> None:
        """Listen on TLS, and on a Unix socket where one can be made."""
        own: Any = super()
        await own.start()
        self._nearby = contextlib.ExitStack()
        self._address = self.contact_address  # it is gone with the port, before its connections
        if hasattr(context := self.server_args["ssl_options"], "cluster"):
            try:
                name = socket_name(self._address.removeprefix(self.prefix), context)
                sock = netutil.bind_unix_socket(name, backlog=BACKLOG)
            except OSError as error:
                logger.info("%s takes no connections but TLS: %s", self._address, error)
                return
            serve = functools.partial(IOLoop.current().add_callback, self._serve)
            self._nearby.enter_context(sock)
            self._nearby.callback(netutil.add_accept_handler(sock, lambda taken, _: serve(taken)))

    async def _serve(self, connection: socket.socket) -> None:
        try:
            stream = _to_stream(connection)
            stream.write(GREETING)
            comm = NearbyComm(stream, self._address, self.deserialize)
            comm.allow_offload = self.allow_offload
            await self.on_connection(comm)
        except OSError as error:
            logger.info("refused a connection to %s: %s", self._address, error)
        else:
            await self.comm_handler(comm)

    def stop(self) -> None:
        """Stop listening."""
        self._nearby.close()
        own: Any = super()
        own.stop()


@functools.cache
def _use_sockets() -> None:
    """Make the tls:// comms of this process look for Unix sockets first."""
    serve_tls_by(_Connector, _Listener)
