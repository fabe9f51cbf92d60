"""TLS of a cluster, which processes of one user on one host do without.

The kernel keeps them apart from others as well as TLS does, and a Unix socket needs no encryption.
Beside each TLS port its owner listens on a Unix socket in Linux's abstract namespace, which leaves
no file, and both ends ask the kernel who the other is. Otherwise the connection is TLS. Large
buffers are not sent, but copied by the receiver, where the kernel allows that; arrays on a device,
where the receiver takes them as such.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import logging
import os
import select
import socket
import ssl
import struct
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import dask
from dask.utils import parse_timedelta
from distributed import Security
from distributed.comm import CommClosedError, tcp
from distributed.comm.utils import from_frames, to_frames
from distributed.utils import ensure_memoryview, offload
from tornado import netutil
from tornado.ioloop import IOLoop
from tornado.iostream import IOStream, StreamClosedError

from hpcdask.upstream.tls import Socket, serve_tls_by

from . import private, process_memory
from .process_memory import address_to_read, agree, is_on_device, read_memory

logger = logging.getLogger("distributed.hpcdask.nearby")

#: Part of a socket's name: how both ends speak.
VERSION = b"3"
#: Bytes from which on the receiver copies a buffer, and a size to which none is split.
LARGE, UNSPLIT = 2**15, 2**62
#: Number of buffers of a message, or 0 for "copied", and bytes that follow; then the size of each
#: buffer, and its address if it is to be copied: from a device, that is `ON_DEVICE`.
PREFIX, ENTRY = struct.Struct("<QQ"), struct.Struct("<QQ")
ON_DEVICE = 2**64 - 1
#: Serializers for an end that takes arrays on a device, those of distributed's ucx.
WITH_DEVICE = ("cuda", "dask", "pickle", "error")
COPIED = PREFIX.pack(0, 0)
#: Seconds that a connection stays open for what its peer still copies.
CLOSE_S = 30.0
CONNECT = "distributed.comm.timeouts.connect"
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
    known = VERSION + address.encode() + getattr(context, "cluster", b"")
    return f"\0hpcdask-{hashlib.sha256(known).hexdigest()[:32]}"


class _Socket(socket.socket):
    """Unix socket that distributed treats like TCP."""

    def setsockopt(self, level: int, *args: Any) -> None:
        """Set an option, unless it is TCP's own."""
        if level != socket.SOL_TCP:
            super().setsockopt(level, *args)


class NearbyComm(tcp.TCP):
    """Connection to a process of this user on this host.

    Each message has its small buffers in it. The receiver copies the large ones from the sender,
    which keeps them until it hears of that; if the connection ends before, the copy is not used.
    ``pid`` is 0 if the other's memory cannot be read; ``to_device``: it takes device arrays.
    """

    def __init__(
        self, stream: IOStream, address: str, deserialize: bool, pid: int, to_device: bool
    ) -> None:
        super().__init__(stream, address, address, deserialize)  # on one host by its name, too
        self._pid = pid
        self._to_device = to_device
        self._lent: deque[list[Any]] = deque()
        self._reads = False

    async def write(
        self, msg: Any, serializers: Collection[str] | None = None, on_error: str = "message"
    ) -> int:
        """Send a message; returns its bytes."""
        frames, handle, memory = await self._to_frames(msg, serializers, on_error)
        table, inline, sent = [], [], []
        lent = [] if memory is None else [memory]
        for frame in frames:
            address = 0
            if is_on_device(frame):
                address = ON_DEVICE
            elif frame.nbytes < LARGE:
                inline.append(frame)
            elif address := self._pid and address_to_read(frame):
                lent.append(frame)
            else:
                sent.append(frame)
            table.append(ENTRY.pack(frame.nbytes, address))
        if lent:
            self._lent.append(lent)
        body = b"".join([*table, *inline, handle])
        with self._ending():
            for buffer in (PREFIX.pack(len(frames), len(body)) + body, *sent):
                self._open().write(buffer)
        return sum(frame.nbytes for frame in frames)

    async def _to_frames(
        self, msg: Any, serializers: Collection[str] | None, on_error: str
    ) -> tuple[list[Any], bytes, Any]:
        """Return the buffers of a message, and handle and memory of those on a device."""
        ends = {"sender": self.local_info, "recipient": self.remote_info}
        serialize = functools.partial(
            to_frames,
            msg,
            allow_offload=self.allow_offload,
            on_error=on_error,
            context={**ends, **self.handshake_options},
            frame_split_size=UNSPLIT,
        )
        handle, memory = b"", None
        with_device = WITH_DEVICE if self._to_device else None
        frames = await serialize(serializers=serializers or with_device)
        if on_device := [frame for frame in frames if is_on_device(frame)]:
            try:
                handle, memory = await offload(process_memory.lend_arrays, on_device)
            except (MemoryError, RuntimeError):  # through host memory
                frames = await serialize(serializers=serializers)
        frames = [one if is_on_device(one) else ensure_memoryview(one) for one in frames]
        return frames, handle, memory

    async def read(self, deserializers: Collection[str] | None = None) -> Any:
        self._reads = True
        with self._ending():
            frames = await self._receive()
        self._reads = False
        return await from_frames(
            frames,
            deserialize=self.deserialize,
            deserializers=deserializers,
            allow_offload=self.allow_offload,
        )

    async def _receive(self) -> list[Any]:
        """Return the buffers of the next message."""
        stream, count = self._open(), 0
        while not count:
            count, size = await self._begin()
        body = await tcp.read_bytes_rw(stream, size)
        at = count * ENTRY.size
        table = [*ENTRY.iter_unpack(body[:at])]
        frames: list[Any] = []
        for size, address in table:
            if address:
                frames.append(None)
            elif size < LARGE:
                frames.append(body[at : at + size])
                at += size
            else:
                frames.append(await tcp.read_bytes_rw(stream, size))
        if any(address for _, address in table):
            await offload(self._copy, table, frames, bytes(body[at:]))
            if _hung_up(stream):  # and its memory may have been used for something else
                raise StreamClosedError
            stream.write(COPIED)
        return frames

    async def _begin(self) -> tuple[int, int]:
        """Read the sizes of the next message, or that the other end has copied one."""
        count, size = PREFIX.unpack(await self._open().read_bytes(PREFIX.size))
        if not count:
            await offload(self._lent.popleft().clear)  # the driver takes its time
        return count, size

    def _copy(self, table: Sequence[tuple[int, int]], frames: list[Any], handle: bytes) -> None:
        """Put in the buffers that are to be copied."""
        sizes = [size for size, address in table if address == ON_DEVICE]
        arrays = process_memory.copy_arrays(handle, sizes) if sizes else []
        for place, (size, address) in enumerate(table):
            if address == ON_DEVICE:
                frames[place] = arrays.pop(0)
            elif address:
                frames[place] = read_memory(self._pid, address, size)

    def _open(self) -> IOStream:
        if self.stream is None:
            raise CommClosedError(f"{self} is closed")
        return self.stream

    @contextlib.contextmanager
    def _ending(self) -> Iterator[None]:
        """End the connection if this fails: a message in part cannot be taken back."""
        try:
            yield
        except BaseException as error:
            over = self.closed() and isinstance(error, asyncio.CancelledError)  # amid a copy
            self.abort()
            if over or isinstance(error, OSError):
                raise CommClosedError(f"in {self}: {error}") from error
            raise

    def close(self) -> Any:
        """Close once the other end has copied all, or in some seconds."""
        return asyncio.ensure_future(self._end()) if self._lent else super().close()

    async def _end(self) -> None:
        with contextlib.suppress(OSError):
            async with asyncio.timeout(CLOSE_S):
                while self._lent and not self.closed():
                    if self._reads:
                        await asyncio.sleep(0.001)
                    elif (await self._begin())[0]:
                        break
        await super().close()
        self._lent.clear()

    def abort(self) -> None:
        super().abort()
        self._lent.clear()


def _hung_up(stream: IOStream) -> bool:
    """Return whether the other end is closed."""
    if stream.closed():
        return True
    poll = select.poll()
    poll.register(stream.fileno(), select.POLLRDHUP)
    return bool(poll.poll(0))


def _to_stream(sock: socket.socket) -> tuple[IOStream, int]:
    """Return the stream of a connection, and the process at its other end.

    Raises NotPrivate if that is another user's.
    """
    own = _Socket(fileno=sock.detach())
    pid, user, _ = struct.unpack("3i", own.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if user != os.geteuid():
        own.close()
        raise private.NotPrivate("another user's process is at its other end")
    return IOStream(own, max_buffer_size=tcp.MAX_BUFFER_SIZE), pid


async def _to_comm(stream: IOStream, pid: int, address: str, deserialize: bool) -> NearbyComm:
    """Return the connection. Raises OSError if the other end says nothing for too long."""
    try:
        async with asyncio.timeout(parse_timedelta(dask.config.get(CONNECT))):
            is_shared, to_device = await agree(stream, pid)
    except BaseException:
        stream.close()
        raise
    return NearbyComm(stream, address, deserialize, pid if is_shared else 0, to_device)


class _Connector(tcp.TLSConnector):
    async def connect(
        self, address: str, deserialize: bool = True, **connection_args: Any
    ) -> tcp.TCP:
        """Connect to a process of this host by its Unix socket, to others by TLS."""
        context: Any = connection_args.get("ssl_context")
        if hasattr(context, "cluster"):
            with contextlib.suppress(OSError):
                name = socket_name(address, context)
                return await _connect_to(name, self.prefix + address, deserialize)
        far: Any = super()
        comm: tcp.TCP = await far.connect(address, deserialize, **connection_args)
        return comm


async def _connect_to(name: str, address: str, deserialize: bool) -> NearbyComm:
    """Connect to a Unix socket whose owner answers."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.setblocking(False)
        sock.connect(name)  # done at once, or refused
        stream, pid = _to_stream(sock)
    return await _to_comm(stream, pid, address, deserialize)


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
            stream, pid = _to_stream(connection)
            comm = await _to_comm(stream, pid, self._address, self.deserialize)
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
