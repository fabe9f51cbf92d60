"""UCX connections among workers: they prove who they are, and sleep while nothing happens.

distributed-ucxx opens its port to the whole network, and while a connection is open its event loop
spins. Here both sides of a new connection prove with a challenge that they know the listener's
secret, before anything is read whose size or content the other side chooses; and a message that is
waited for is noticed by UCX's own file descriptor. Nothing is encrypted.

Import this module only in a process that is to use UCX, with its CUDA context already made.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import struct
import weakref
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any

import distributed_ucxx.ucxx as base
from distributed.comm.addressing import parse_host_port
from distributed.comm.core import CommClosedError, FatalCommClosedError
from distributed.comm.registry import backends
from distributed.comm.utils import from_frames, to_frames
from distributed.protocol.utils import host_array
from distributed.utils import nbytes

from hpcdask.security import ports
from hpcdask.upstream import ucxx as upstream

from .ucx_auth import SECRET_NBYTES, authenticate, introduce
from .ucx_progress import Endpoint, progress

logger = logging.getLogger("distributed.hpcdask.ucx")

#: Seconds in which a new connection must prove itself.
AUTHENTICATION_DEADLINE_S = 5.0
#: Seconds that a connection which ends has to say so.
CLOSE_DEADLINE_S = 1.0
#: Seconds for which a transfer of device memory is polled, before it is left to UCX to report its
#: end: UCX does not report the end of every copy between devices.
POLL_S = 1.0
#: Seconds for which other messages are polled for: an answer often comes at once, and a processor
#: that spins for longer is one that Dask tasks lack.
ANSWER_POLL_S = 0.002
#: Bytes of a message's first block, which holds all of a short message.
BLOCK_NBYTES = 1024
#: Host frames up to this many bytes travel with the message's header.
INLINE_NBYTES = 32 * 2**10
#: Of the first block: 0, or CLOSING; bytes of the header; number of frames.
_PREFIX = struct.Struct("<BQQ")
_FRAME = struct.Struct("<BQ")
_HOST, _DEVICE, _INLINE = range(3)
_CLOSING = 1
SERIALIZERS = ("cuda", "dask", "pickle", "error")

#: The secrets of listeners, by their address without the scheme.
known_secrets: dict[str, bytes] = {}


def version() -> tuple[int, ...]:
    """UCX's."""
    return tuple(base.ucxx.get_ucx_version())


class PeerComm(base.UCXX):  # type: ignore[misc]
    """A connection between two workers."""

    def __init__(self, endpoint: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(endpoint, *args, **kwargs)
        self._wire = Endpoint(endpoint)

    async def write(
        self, msg: Any, serializers: Collection[str] | None = None, on_error: str = "message"
    ) -> int:
        """Send a message; returns its bytes."""
        if self.closed():
            raise CommClosedError("the ucx connection is closed")
        frames: Sequence[Any] = await to_frames(
            msg,
            serializers=serializers or SERIALIZERS,
            on_error=on_error,
            # to serialize device memory is to take its address: a thread only costs time
            allow_offload=self.allow_offload and not _of_device(msg),
        )
        sizes = [nbytes(frame) for frame in frames]
        kinds = [
            _DEVICE
            if hasattr(frame, "__cuda_array_interface__")
            else _INLINE
            if size <= INLINE_NBYTES
            else _HOST
            for frame, size in zip(frames, sizes, strict=True)
        ]
        inline = [frame for frame, kind in zip(frames, kinds, strict=True) if kind == _INLINE]
        table = b"".join(map(_FRAME.pack, kinds, sizes))
        header = b"".join([table, *inline])
        first, rest = _first_block(0, header, len(frames))
        if _DEVICE in kinds:
            # UCX does not wait for what the device still has to do
            base.synchronize_stream()
        large = [
            frame
            for frame, kind, size in zip(frames, kinds, sizes, strict=True)
            if kind != _INLINE and size
        ]
        try:
            parts = [first, rest, *large] if rest else [first, *large]
            seconds = POLL_S if _DEVICE in kinds else ANSWER_POLL_S
            await self._wire.wait_polling(
                *[self._wire.send(part) for part in parts], seconds=seconds
            )
        except BaseException as error:
            # what was sent in part cannot be taken back
            self.abort()
            if isinstance(error, base.ucxx.exceptions.UCXError):
                raise CommClosedError(f"the ucx connection broke while writing: {error}") from error
            raise
        return sum(sizes)

    async def read(self, deserializers: Collection[str] | None = None) -> Any:
        """The next message."""
        try:
            frames = await self._read_frames()
            on_device = any(hasattr(frame, "__cuda_array_interface__") for frame in frames)
            return await from_frames(
                frames,
                deserialize=self.deserialize,
                deserializers=deserializers or SERIALIZERS,
                allow_offload=self.allow_offload and not on_device,
            )
        except BaseException as error:
            self.abort()
            if isinstance(error, (base.ucxx.exceptions.UCXError, EOFError)):
                raise CommClosedError(f"the ucx connection broke while reading: {error}") from error
            raise

    async def _read_frames(self) -> list[Any]:
        if upstream.endpoint_of(self) is None:
            raise CommClosedError("the ucx connection is closed")
        first = bytearray(BLOCK_NBYTES)
        await self._wire.wait_polling(self._wire.receive(first), seconds=ANSWER_POLL_S)
        closing, size, count = _PREFIX.unpack_from(first)
        if closing:
            raise CommClosedError("the other side closed the ucx connection")
        header = memoryview(first)[_PREFIX.size : _PREFIX.size + size]
        if (there := len(header)) < size:
            whole = memoryview(bytearray(size))  # what is made of frames may have to be writable
            whole[:there] = header
            header = whole
            await self._wire.wait_polling(self._wire.receive(header[there:]), seconds=ANSWER_POLL_S)
        kinds_sizes = list(_FRAME.iter_unpack(header[: count * _FRAME.size]))
        frames, at = [], count * _FRAME.size
        for kind, nbytes_ in kinds_sizes:
            if kind == _INLINE:
                frames.append(header[at : at + nbytes_])
                at += nbytes_
            else:
                frames.append(
                    base.device_array(nbytes_) if kind == _DEVICE else host_array(nbytes_)
                )
        large = [
            frame
            for frame, (kind, size) in zip(frames, kinds_sizes, strict=True)
            if kind != _INLINE and size
        ]
        seconds = ANSWER_POLL_S
        if any(kind == _DEVICE for kind, _ in kinds_sizes):
            seconds = POLL_S
            # what used the memory before may still run
            base.synchronize_stream()
        await self._wire.wait_polling(
            *[self._wire.receive(frame) for frame in large], seconds=seconds
        )
        return frames

    async def close(self) -> None:
        """Say goodbye, and end the connection."""
        endpoint = upstream.endpoint_of(self)
        if endpoint is not None and endpoint.alive:
            first, _ = _first_block(_CLOSING, b"", 0)
            try:
                with contextlib.suppress(TimeoutError, base.ucxx.exceptions.UCXError):
                    async with asyncio.timeout(CLOSE_DEADLINE_S):
                        await self._wire.wait(self._wire.send(first))
            finally:
                self.abort()
        self.abort()

    def abort(self) -> None:
        """End the connection now."""
        super().abort()
        self._wire.look()


def _of_device(msg: Any) -> bool:
    """Return whether a message of distributed carries arrays of device memory."""
    carried = msg.get("data") if isinstance(msg, dict) else msg
    values = carried.values() if isinstance(carried, dict) else (carried,)
    return any(
        hasattr(getattr(value, "data", None), "__cuda_array_interface__") for value in values
    )


def _first_block(flag: int, header: bytes, count: int) -> tuple[bytes, bytes]:
    """The block of fixed size that begins a message, and what does not fit in."""
    room = BLOCK_NBYTES - _PREFIX.size
    first = _PREFIX.pack(flag, len(header), count) + header[:room]
    return first.ljust(BLOCK_NBYTES, b"\0"), header[room:]


class PeerConnector(base.UCXXConnector):  # type: ignore[misc]
    """Connects to a worker whose secret is known."""

    comm_class = PeerComm

    async def connect(self, address: str, deserialize: bool = True, **kwargs: Any) -> PeerComm:
        """Open a connection and prove oneself."""
        secret = known_secrets.get(address)
        if secret is None:
            raise FatalCommClosedError(f"nothing is known of a ucx listener at {address}")
        with progress().polling():
            raw = comm = None
            try:
                raw = upstream.connect(*parse_host_port(address))
                async with asyncio.timeout(AUTHENTICATION_DEADLINE_S):
                    endpoint = await introduce(raw, listens=False)
                    comm = PeerComm(endpoint, "", self.prefix + address, deserialize)
                    await authenticate(comm._wire, secret, listens=False)
            except BaseException as error:
                if raw is not None:
                    raw.close_blocking()
                progress().look()
                broke = isinstance(error, base.ucxx.exceptions.UCXError)
                if isinstance(error, PermissionError) or (broke and comm is not None):
                    raise FatalCommClosedError(
                        f"{address} did not prove itself: {error}"
                    ) from error
                if broke or isinstance(error, TimeoutError):
                    raise CommClosedError(f"no ucx connection to {address}: {error!r}") from error
                raise
        return comm


class PeerListener(base.UCXXListener):  # type: ignore[misc]
    """Hands over connections that have proved themselves."""

    comm_class = PeerComm
    secret: bytes

    async def start(self) -> None:
        """Listen on a free port."""
        progress()
        self.secret = secrets.token_bytes(SECRET_NBYTES)
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._resource_id = upstream.keep_running_for(self)
        port = upstream.listened_port(self)
        self.ucxx_server = self._listen(port) if port else ports.choose(self._listen)
        self._port = self.ucxx_server.port

    def _listen(self, port: int) -> Any:
        ports.check_free(port)  # UCX does not say what is wrong
        return upstream.listen(port, _requested, weakref.ref(self))

    @property
    def port(self) -> int:
        """Where it listens, or did."""
        return int(self._port)

    def stop(self) -> None:
        """Accept no more connections."""
        super().stop()
        for task in self._tasks:
            task.cancel()

    def admit(self, raw: Any) -> None:
        """See to a connection that was asked for; UCX must not be called before this returns."""
        if self._loop.is_closed():
            return
        task = self._loop.create_task(self._accept(raw))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, raw: Any) -> None:
        comm = await self._prove(raw)
        if comm is not None and self.comm_handler:
            # not in this task, which ends with the listener
            handling = self._loop.create_task(self._handle(comm))
            _handling.add(handling)
            handling.add_done_callback(_handling.discard)

    async def _handle(self, comm: PeerComm) -> None:
        try:
            await self.comm_handler(comm)
        except Exception:
            comm.abort()
            logger.exception("a ucx connection to %s broke", self.address)

    async def _prove(self, raw: Any) -> PeerComm | None:
        """The connection, once it has proved itself."""
        try:
            async with asyncio.timeout(AUTHENTICATION_DEADLINE_S):
                endpoint = await introduce(raw, listens=True)
                comm = PeerComm(endpoint, self.address, self.address, self.deserialize)
                comm.allow_offload = self.allow_offload
                await authenticate(comm._wire, self.secret, listens=True)
                await self.on_connection(comm)
                return comm
        except BaseException as error:
            raw.close_blocking()
            progress().look()
            if not isinstance(error, Exception):
                raise
            # a worker of this cluster that ends meanwhile closes without an answer
            stranger = isinstance(error, (PermissionError, TimeoutError))
            level = logging.WARNING if stranger else logging.INFO
            logger.log(level, "refused a ucx connection to %s: %s", self.address, _reason(error))
            return None


#: What serves connections that proved themselves: the event loop itself holds tasks weakly.
_handling: set[asyncio.Task[None]] = set()


def _requested(raw: Any, listener: weakref.ref[PeerListener]) -> None:
    """UCX has a connection for a listener."""
    if (there := listener()) is not None:
        there.admit(raw)


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"it did not prove itself within {AUTHENTICATION_DEADLINE_S:g} s"
    return f"{type(error).__name__}: {error}"


class PeerBackend(base.UCXXBackend):  # type: ignore[misc]
    """distributed's comm backend for connections that prove themselves."""

    def get_connector(self) -> PeerConnector:
        """Dials."""
        return PeerConnector()

    def get_listener(
        self,
        loc: str,
        handle_comm: Callable[[PeerComm], Awaitable[None]],
        deserialize: bool,
        **connection_args: Any,
    ) -> PeerListener:
        """Accepts."""
        return PeerListener(loc, handle_comm, deserialize, **connection_args)


def register() -> None:
    """Make this the ``ucx`` of this process."""
    backends["ucx"] = PeerBackend()
