"""Both ends prove they know the secret."""

from __future__ import annotations

import hmac
import os
import secrets
from typing import Any

from hpcdask.upstream import ucxx as upstream

from .ucx_progress import progress

#: Bytes of a secret, of a challenge and of the answer to it.
SECRET_NBYTES = 32


async def authenticate(wire: Any, secret: bytes, *, listens: bool) -> None:
    """Prove to each other over an `Endpoint` that both know a secret, without telling it.

    A challenge and its answer by HMAC-SHA256 in either direction, in messages of fixed size; the
    answers of the two sides differ, so that none can be sent back. The side that does not know it
    meets a PermissionError.
    """
    mine, theirs = secrets.token_bytes(SECRET_NBYTES), bytearray(SECRET_NBYTES)
    await wire.wait(wire.send(mine), wire.receive(theirs))
    pair = (mine + theirs) if listens else (theirs + mine)

    def answer(of_listener: bool) -> bytes:
        role = b"listens" if of_listener else b"connects"
        return hmac.digest(secret, role + pair, "sha256")

    proof = answer(listens)  # UCX reads it where it lies until it is sent
    if not listens:
        await wire.wait(wire.send(proof))
    got = bytearray(SECRET_NBYTES)
    await wire.wait(wire.receive(got))
    if not hmac.compare_digest(got, answer(not listens)):
        raise PermissionError("the other side does not know the secret of this cluster")
    if listens:
        await wire.wait(wire.send(proof))


class _Streams:
    """An endpoint's streams, as ucxx's `exchange_peer_info` uses them, but waited for in sleep."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw

    def stream_send(self, array: Any) -> _Waited:
        return _Waited(self._raw.stream_send(array))

    def stream_recv(self, array: Any) -> _Waited:
        return _Waited(self._raw.stream_recv(array))


class _Waited:
    def __init__(self, request: Any) -> None:
        self._request = request

    async def wait(self) -> None:
        await progress().wait(self._request)


async def introduce(raw: Any, *, listens: bool) -> Any:
    """Make ucxx's endpoint of a raw one: the two sides tell each other their tags.

    ucxx does the same, but its event loop spins meanwhile, however long the other side is silent.
    """
    tag = upstream.new_tag(os.urandom(16), raw)
    try:
        told = await upstream.exchange_tags(_Streams(raw), tag, listens=listens)
    except RuntimeError as error:  # the checksum does not fit
        raise PermissionError(f"the other side does not speak ucxx: {error}") from error
    return upstream.endpoint(raw, send_tag=told, receive_tag=tag)
