"""Private parts of distributed's P2P, as in 2026.7.0 to 2026.8.0; there is no public one.

What `hpcdask.comm.p2p.DeviceRechunkRun` overrides, and the layout of shards, are private too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distributed.shuffle._exceptions import DataUnavailable as DataUnavailable
from distributed.shuffle._rechunk import ArrayRechunkRun as ArrayRechunkRun
from distributed.shuffle._rechunk import ArrayRechunkSpec as ArrayRechunkSpec

from .distributed import SEEN
from .parts import require


def send_by(run: Any, send: Callable[..., Any]) -> None:
    """Have what is buffered for other workers be sent by another function."""
    require(SEEN, run._comm_buffer, "send")
    run._comm_buffer.send = send


def set_message_size(run: Any, nbytes: int) -> None:
    """Set the bytes of one message, of this run alone."""
    require(SEEN, run._comm_buffer, "max_message_size")
    run._comm_buffer.max_message_size = nbytes


def bound_buffer(run: Any, nbytes: float) -> None:
    """Have at most so many bytes wait to be sent."""
    limiter = run._comm_buffer.memory_limiter
    require(SEEN, limiter, "limit")
    limiter.limit = min(limiter.limit, nbytes)


def loop(run: Any) -> Any:
    """The event loop that a run is in."""
    return run._loop


def fail(run: Any, error: Exception) -> None:
    """Have a run raise this from its next step on."""
    require(SEEN, run, "_exception")
    run._exception = error
