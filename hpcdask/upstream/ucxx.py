"""Private parts of ucxx and distributed-ucxx, as in 0.52.

Their own connections spin, and let in whoever knocks. Import this only where UCX is to be used.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any
from unittest import mock

import distributed_ucxx.ucxx as base

from .parts import refuse

SEEN = "ucxx 0.52"


def start() -> None:
    """Start UCX without its active messages and remote memory access.

    With them whoever connects has ucxx allocate what he says, and read a header that he wrote.
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
    """UCX's worker of this process."""
    return _context().worker


def keep_running() -> int:
    """Keep ucxx from stopping, and its reader in place, when nothing is registered any more."""
    return int(base._register_dask_resource())


def keep_running_for(owner: object) -> int:
    """The same, until an object is gone."""
    resource = keep_running()
    weakref.finalize(owner, base._deregister_dask_resource, resource)
    return resource


def connect(host: str, port: int) -> Any:
    """A raw endpoint, which was not introduced yet."""
    from ucxx._lib.libucxx import UCXEndpoint

    return UCXEndpoint.create(worker(), host, port, True)


def listen(port: int, requested: Any, *args: Any) -> Any:
    """Listen: not by ucxx's own listener, which lets in any number of silent strangers."""
    from ucxx._lib.libucxx import UCXListener

    return UCXListener.create(worker(), port, requested, args, deliver_endpoint=True)


def listened_port(listener: Any) -> int:
    """The port that distributed's listener was to have."""
    return int(listener._input_port)


def endpoint_of(comm: Any) -> Any:
    """The endpoint of a connection of distributed's, or None where it is closed."""
    return comm._ep


def raw(endpoint: Any) -> Any:
    """UCX's own endpoint in that of ucxx."""
    return endpoint._ep


def tags(endpoint: Any) -> tuple[Any, Any]:
    """Return the tags of the messages that an endpoint sends, and that it receives."""
    from ucxx.types import Tag

    return Tag(endpoint._tags["msg_send"]), Tag(endpoint._tags["msg_recv"])


def array_type() -> Any:
    """Return the type of buffers that requests take."""
    from ucxx._lib.arr import Array

    return Array


def new_tag(seed: bytes, raw_endpoint: Any) -> int:
    """A tag for the messages to an endpoint."""
    from ucxx._lib_async.utils import hash64bits

    return int(hash64bits("msg_tag", seed, raw_endpoint.handle))


async def exchange_tags(streams: Any, tag: int, *, listens: bool) -> int:
    """Tell the other side a tag, and get its own; RuntimeError where the checksum does not fit.

    Without a deadline: that of the caller would be lost when both are over at once.
    """
    from ucxx._lib_async.exchange_peer_info import exchange_peer_info

    told = await exchange_peer_info(streams, tag, listener=listens, connect_timeout=None)
    return int(told["msg_tag"])


def endpoint(raw_endpoint: Any, send_tag: int, receive_tag: int) -> Any:
    """ucxx's endpoint of a raw one that was introduced."""
    from ucxx._lib_async import Endpoint

    tags = {"msg_send": send_tag, "msg_recv": receive_tag}
    return Endpoint(endpoint=raw_endpoint, ctx=_context(), tags=tags)
