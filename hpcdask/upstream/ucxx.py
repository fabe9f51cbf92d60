"""Private parts of ucxx and distributed-ucxx, as in 0.52. Import this only to use UCX."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import distributed_ucxx.ucxx as base

from .parts import refuse

SEEN = "ucxx 0.52"


def start() -> None:
    """Start UCX without its active messages and remote memory access.

    With them a stranger who connects has ucxx allocate memory, and read a header of his own.
    Raises UsageError if UCX has them all the same.
    """
    from ucxx._lib import libucxx

    features = (libucxx.Feature.TAG, libucxx.Feature.STREAM, libucxx.Feature.WAKEUP)
    context = functools.partial(libucxx.UCXContext, feature_flags=features)
    # it complains of the CUDA context, which was made before as UCX wants it
    quiet = mock.patch.object(base.logger, "disabled", True)
    with mock.patch.object(libucxx, "UCXContext", context), quiet:
        base.init_once()
    allowed = sum(int(feature.value) for feature in features)
    if (started := _context().context.feature_flags) != allowed:
        refuse(SEEN, f"UCXContext: UCX was to start with features {allowed}, and has {started}")


def _context() -> Any:
    return base.ucxx.core._get_ctx()


def worker() -> Any:
    return _context().worker


def keep_running() -> int:
    """Keep ucxx from stopping, and its reader in place; returns the id of a registration."""
    return int(base._register_dask_resource())


def connect(host: str, port: int) -> Any:
    """Return a raw endpoint, without tags; ConnectionError where UCX has no way there."""
    from ucxx._lib.libucxx import UCXEndpoint

    try:
        return UCXEndpoint.create(worker(), host, port, True)
    except base.ucxx.exceptions.UCXError as error:
        raise ConnectionError(f"no ucx connection to {host}: {error!r}") from error


def listen(port: int, requested: Any, *args: Any) -> Any:
    """Listen without ucxx's own listener, which accepts any number of silent strangers."""
    from ucxx._lib.libucxx import UCXListener

    return UCXListener.create(worker(), port, requested, args, deliver_endpoint=True)


def listened_port(listener: Any) -> int:
    return int(listener._input_port)


def endpoint_of(comm: Any) -> Any:
    """Return the endpoint of a connection of distributed's, or None where it is closed."""
    return comm._ep


def endpoint(raw_endpoint: Any, send_tag: int, receive_tag: int) -> Any:
    """Return ucxx's endpoint of a raw one, with the tags of its messages."""
    from ucxx._lib_async import Endpoint

    tags = {"msg_send": send_tag, "msg_recv": receive_tag}
    return Endpoint(endpoint=raw_endpoint, ctx=_context(), tags=tags)


def raw_and_tags(endpoint: Any) -> tuple[Any, Any, Any]:
    """Return UCX's own endpoint in that of ucxx, and the tags by which it sends and receives."""
    from ucxx.types import Tag

    return endpoint._ep, Tag(endpoint._tags["msg_send"]), Tag(endpoint._tags["msg_recv"])


def send(raw: Any, tag: Any, buffer: Any) -> Any:
    """Begin to send a message; returns the request."""
    raw.raise_on_error()
    return raw.tag_send(array(buffer), tag)


def receive(raw: Any, tag: Any, buffer: Any) -> Any:
    """Begin to receive a message of exactly as many bytes as the buffer holds."""
    target = array(buffer)
    if raw.alive:
        return raw.tag_recv(target, tag)
    # the other side is gone; what it said last may lie here
    lies = worker().tag_probe(tag)
    if lies.matched and lies.length == target.nbytes:
        return worker().tag_recv_with_handle(target, worker().tag_probe(tag, remove=True))
    raw.raise_on_error()
    raise base.ucxx.exceptions.UCXCloseError("the other side closed the connection")


def array(buffer: Any) -> Any:
    """Return a buffer as UCX takes it."""
    from ucxx._lib.arr import Array

    return Array(buffer)
