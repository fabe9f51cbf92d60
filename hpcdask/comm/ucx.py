"""UCX connections among workers: they prove who they are, and sleep while nothing happens.

distributed-ucxx opens its port to the whole network, and its event loop spins. Here both sides
prove that they know the listener's secret before anything is read whose size or content the other
side chooses, and UCX's file descriptor wakes the event loop. Nothing is encrypted. Import this
module only in a process that is to use UCX, with its CUDA context already made.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import logging
import secrets
import struct
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import distributed_ucxx.ucxx as base
from distributed.comm.addressing import parse_host_port
from distributed.comm.core import CommClosedError, FatalCommClosedError
from distributed.comm.registry import backends
from distributed.comm.utils import from_frames, to_frames
from distributed.protocol.utils import host_array
from distributed.utils import nbytes

from hpcdask.security import ports
from hpcdask.security.nearby import UNSPLIT
from hpcdask.upstream import ucxx as upstream

from .warmup import connect_timeout

logger = logging.getLogger("distributed.hpcdask.ucx")

#: Bytes of a secret, of a challenge and of the answer to it.
SECRET_NBYTES = 32
#: Seconds after which UCX is progressed even if it reported nothing, and to say goodbye.
SAFETY_S, CLOSE_DEADLINE_S = 0.1, 1.0
#: Seconds of polling: for device memory, as UCX does not report the end of every copy between
#: devices, and for other messages, whose answer often comes at once; Dask tasks lack a processor
#: that spins for longer.
POLL_S, ANSWER_POLL_S = 1.0, 0.002
#: Bytes of a message's first block, and of host frames that travel with the message's header.
BLOCK_NBYTES, INLINE_NBYTES = 1024, 32 * 2**10
#: Of the first block: 0 or CLOSING, bytes of the header, number of frames. Of a frame: kind, bytes.
_PREFIX, _FRAME = struct.Struct("<BQQ"), struct.Struct("<BQ")
_HOST, _DEVICE, _INLINE, _CLOSING = range(4)
SERIALIZERS = ("cuda", "dask", "pickle", "error")

#: The secrets of listeners, by their address.
known_secrets: dict[str, bytes] = {}
#: Connections that are accepted or served: the event loop itself holds tasks weakly.
_serving: set[asyncio.Task[None]] = set()


def version() -> tuple[int, ...]:
    return tuple(base.ucxx.get_ucx_version())


class Progress:
    """Driver of this process's one UCX worker from its event loop.

    While a message is polled for, UCX is progressed on each turn of the loop. Otherwise it is
    armed, and its file descriptor wakes the loop: an idle connection costs no processor time.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        upstream.start()
        self.loop, self.worker = loop, upstream.worker()
        self._asleep: dict[Any, asyncio.Future[None]] = {}
        self._pollers = 0
        self._timer: asyncio.TimerHandle | None = None
        upstream.keep_running()
        # in the place of ucxx's reader, which does not arm UCX again
        loop.add_reader(self.worker.epoll_file_descriptor, self.turn)
        self.turn()

    async def wait(self, *requests: Any, poll_s: float = 0.0) -> None:
        """Wait for the end of requests of ucxx, polling at first; raise what UCX says of one."""
        until = self.loop.time() + poll_s
        self._pollers += 1
        try:
            while not all(one.completed for one in requests) and self.loop.time() < until:
                self.advance()
                await asyncio.sleep(0)
        finally:
            self._pollers -= 1
            self.turn()
        for request in requests:
            if not request.completed:
                future = self._asleep[request] = self.loop.create_future()
                try:
                    await future
                finally:
                    self._asleep.pop(request, None)
            request.check_error()

    def advance(self) -> None:
        """Progress UCX, and wake those whose request is over, or was cancelled."""
        self.worker.progress()
        for request, future in self._asleep.items():
            if request.completed and not future.done():
                future.set_result(None)

    def close(self, raw: Any) -> None:
        raw.close_blocking()
        self.advance()

    def turn(self) -> None:
        """Progress UCX once, and make it report what comes next unless it is polled."""
        self.advance()
        if self._pollers:
            return
        if self._timer is not None:
            self._timer.cancel()
        if self.worker.arm():
            self._timer = self.loop.call_later(SAFETY_S, self.turn)
        else:  # something has come already
            self.loop.call_soon(self.turn)


@functools.lru_cache(maxsize=1)
def _progress_in(loop: asyncio.AbstractEventLoop) -> Progress:
    return Progress(loop)


def progress() -> Progress:
    """Return the driver of the running event loop; a new loop takes over."""
    return _progress_in(asyncio.get_running_loop())


class Channel:
    """Messages of known size over a raw endpoint, whose two sides have no tags yet."""

    def __init__(self, raw: Any) -> None:
        self.raw = raw
        self.heard = False

    async def send(self, message: bytes) -> None:
        request = self.raw.stream_send(upstream.array(message))
        await progress().wait(request, poll_s=ANSWER_POLL_S)

    async def receive(self, count: int) -> bytes:
        buffer = bytearray(count)
        request = self.raw.stream_recv(upstream.array(buffer))
        await progress().wait(request, poll_s=ANSWER_POLL_S)
        self.heard = True
        return bytes(buffer)


async def prove(channel: Any, secret: bytes, *, listens: bool) -> tuple[int, int]:
    """Prove to each other that both know a secret, without telling it.

    A challenge and its answer by HMAC-SHA256 in either direction; the two answers differ, so that
    none can be sent back. Returns the secret tags of messages that this side sends and receives.
    Raises PermissionError if the other side does not know the secret.
    """
    mine = secrets.token_bytes(SECRET_NBYTES)
    if listens:
        await channel.send(mine)
    theirs = await channel.receive(SECRET_NBYTES)
    if not listens:
        await channel.send(mine)
    both = mine + theirs if listens else theirs + mine

    def digest(purpose: str, *, of_listener: bool) -> bytes:
        role = "listens" if of_listener else "connects"
        return hmac.digest(secret, f"{purpose} {role} ".encode() + both, "sha256")

    proof = digest("proof", of_listener=listens)
    if not listens:
        await channel.send(proof)
    answer = await channel.receive(SECRET_NBYTES)
    if not hmac.compare_digest(answer, digest("proof", of_listener=not listens)):
        raise PermissionError("the other side does not know the secret of this cluster")
    if listens:
        await channel.send(proof)
    sent, received = (digest("tag", of_listener=side) for side in (listens, not listens))
    return int.from_bytes(sent[:8], "big"), int.from_bytes(received[:8], "big")


class PeerComm(base.UCXX):  # type: ignore[misc]
    """A connection between two workers."""

    def __init__(self, endpoint: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(endpoint, *args, **kwargs)
        raw, send_tag, receive_tag = upstream.raw_and_tags(endpoint)
        self._send = functools.partial(upstream.send, raw, send_tag)
        self._receive = functools.partial(upstream.receive, raw, receive_tag)
        self._driver = progress()

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
            frame_split_size=UNSPLIT,
            # to serialize device memory is to take its address: a thread only costs time
            allow_offload=self.allow_offload and not _of_device(msg),
        )
        table = [(_kind(frame), nbytes(frame)) for frame in frames]
        inline = [frame for frame, (kind, _) in zip(frames, table, strict=True) if kind == _INLINE]
        header = b"".join([*(_FRAME.pack(*entry) for entry in table), *inline])
        parts = [*_blocks(0, header, len(frames)), *_large(frames, table)]
        with self._breaking("writing"):
            await self._transfer(self._send, parts)
        return sum(size for _, size in table)

    async def read(self, deserializers: Collection[str] | None = None) -> Any:
        with self._breaking("reading"):
            if upstream.endpoint_of(self) is None:
                raise CommClosedError("the ucx connection is closed")
            first = bytearray(BLOCK_NBYTES)
            await self._transfer(self._receive, [first])
            closing, size, count = _PREFIX.unpack_from(first)
            if closing:
                raise CommClosedError("the other side closed the ucx connection")
            header = memoryview(first)[_PREFIX.size :][:size]
            if len(header) < size:
                header = memoryview(bytearray(size))  # arrays in it may be written to
                await self._transfer(self._receive, [header])
            at, frames = count * _FRAME.size, []
            table = list(_FRAME.iter_unpack(header[:at]))
            for kind, size in table:
                if kind == _INLINE:
                    frames.append(header[at : at + size])
                    at += size
                else:
                    frames.append((base.device_array if kind == _DEVICE else host_array)(size))
            await self._transfer(self._receive, _large(frames, table))
            return await from_frames(
                frames,
                deserialize=self.deserialize,
                deserializers=deserializers or SERIALIZERS,
                allow_offload=self.allow_offload and not any(map(_is_on_device, frames)),
            )

    async def _transfer(self, begin: Callable[[Any], Any], parts: Sequence[Any]) -> None:
        """Begin to send or to receive all parts, and wait for their end."""
        if on_device := any(map(_is_on_device, parts)):
            # UCX does not wait for what the device still does with the memory
            base.synchronize_stream()
        requests = [begin(part) for part in parts]
        await self._driver.wait(*requests, poll_s=POLL_S if on_device else ANSWER_POLL_S)

    @contextlib.contextmanager
    def _breaking(self, doing: str) -> Iterator[None]:
        """End the connection if this fails: a message in part cannot be taken back."""
        try:
            yield
        except BaseException as error:
            self.abort()
            if isinstance(error, (base.ucxx.exceptions.UCXError, EOFError)):
                raise CommClosedError(f"the ucx connection broke while {doing}: {error}") from error
            raise

    async def close(self) -> None:
        """Say goodbye, and end the connection."""
        try:
            if not self.closed():
                with contextlib.suppress(TimeoutError, base.ucxx.exceptions.UCXError):
                    async with asyncio.timeout(CLOSE_DEADLINE_S):
                        await self._driver.wait(*map(self._send, _blocks(_CLOSING, b"", 0)))
        finally:
            self.abort()

    def abort(self) -> None:
        super().abort()
        self._driver.advance()


def _is_on_device(value: Any) -> bool:
    return hasattr(value, "__cuda_array_interface__")


def _kind(frame: Any) -> int:
    if _is_on_device(frame):
        return _DEVICE
    return _INLINE if nbytes(frame) <= INLINE_NBYTES else _HOST


def _large(frames: Sequence[Any], table: Sequence[tuple[int, int]]) -> list[Any]:
    found = zip(frames, table, strict=True)
    return [frame for frame, (kind, size) in found if kind != _INLINE and size]


def _of_device(msg: Any) -> bool:
    """Return whether a message of distributed carries arrays of device memory."""
    carried = msg.get("data") if isinstance(msg, dict) else msg
    values = carried.values() if isinstance(carried, dict) else (carried,)
    return any(_is_on_device(getattr(value, "data", None)) for value in values)


def _blocks(flag: int, header: bytes, count: int) -> list[bytes]:
    """Return the block of fixed size that begins a message, and the header if it has no room."""
    first = _PREFIX.pack(flag, len(header), count)
    if len(first) + len(header) > BLOCK_NBYTES:
        return [first.ljust(BLOCK_NBYTES, b"\0"), header]
    return [(first + header).ljust(BLOCK_NBYTES, b"\0")]


class PeerConnector(base.UCXXConnector):  # type: ignore[misc]
    """Connector to workers whose secret is known."""

    async def connect(self, address: str, deserialize: bool = True, **kwargs: Any) -> PeerComm:
        """Open a connection and prove oneself, within the deadline of distributed's `connect`."""
        progress()
        if (secret := known_secrets.get(self.prefix + address)) is None:
            raise FatalCommClosedError(f"nothing is known of a ucx listener at {address}")
        raw = upstream.connect(*parse_host_port(address))
        channel = Channel(raw)
        try:
            endpoint = upstream.endpoint(raw, *await prove(channel, secret, listens=False))
        except BaseException as error:
            progress().close(raw)
            broke = isinstance(error, base.ucxx.exceptions.UCXError)
            if isinstance(error, PermissionError) or (broke and channel.heard):
                raise FatalCommClosedError(f"{address} did not prove itself: {error}") from error
            if broke:
                raise CommClosedError(f"no ucx connection to {address}: {error!r}") from error
            raise
        return PeerComm(endpoint, "", self.prefix + address, deserialize)


class PeerListener(base.UCXXListener):  # type: ignore[misc]
    """Listener that serves connections which have proved themselves."""

    async def start(self) -> None:
        progress()
        self.secret = secrets.token_bytes(SECRET_NBYTES)
        self.loop = asyncio.get_running_loop()
        self._resource_id = upstream.keep_running()
        port = upstream.listened_port(self)

        def listen(port: int) -> Any:
            ports.check_free(port)  # UCX does not say what is wrong
            return upstream.listen(port, _requested, weakref.ref(self))

        self.ucxx_server = listen(port) if port else ports.choose(listen)
        self._port = self.ucxx_server.port

    @property
    def port(self) -> int:
        return int(self._port)

    async def accept(self, raw: Any) -> None:
        """Serve a connection once it has proved itself."""
        seconds = connect_timeout()
        try:
            async with asyncio.timeout(seconds):
                tags = await prove(Channel(raw), self.secret, listens=True)
                endpoint = upstream.endpoint(raw, *tags)
                comm = PeerComm(endpoint, self.address, self.address, self.deserialize)
                comm.allow_offload = self.allow_offload
                await self.on_connection(comm)
        except BaseException as error:
            progress().close(raw)
            if not isinstance(error, Exception):
                raise
            stranger = isinstance(error, (PermissionError, TimeoutError))
            level = logging.WARNING if stranger else logging.INFO
            reason = str(error) or f"it did not prove itself within {seconds:g} s"
            logger.log(level, "refused a ucx connection to %s: %s", self.address, reason)
        else:
            await self.comm_handler(comm)


def _requested(raw: Any, listener: weakref.ref[PeerListener]) -> None:
    """Accept a connection that UCX has for a listener, and call nothing of UCX before the end."""
    there = listener()
    if there is not None and not there.loop.is_closed():
        task = there.loop.create_task(there.accept(raw))
        _serving.add(task)
        task.add_done_callback(_serving.discard)


class PeerBackend(base.UCXXBackend):  # type: ignore[misc]
    """distributed's comm backend for connections that prove themselves."""

    get_connector, get_listener = PeerConnector, PeerListener


def register() -> None:
    backends["ucx"] = PeerBackend()
