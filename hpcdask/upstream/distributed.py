"""Private parts of distributed, as in 2026.7.0 to 2026.8.0.

What is set is looked for first. Methods that subclasses override, and the texts below, cannot be
asked for at run time: tests/unit/test_upstream.py finds them in distributed's source.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

from .parts import require

Result = TypeVar("Result")

SEEN = "distributed 2026.7.0 to 2026.8.0"
#: Lines of its log that are left out, or lose their traceback.
HEARTBEAT_FAILED = "during heartbeat"
NOT_CONNECTED = "Worker failed to connect"
RESTARTING = "Restarting worker"
PEER_LEFT = ("Worker stream died", "failed during get data")
CONNECT_TIMED_OUT = "Timed out trying to connect"
HANDSHAKE_FAILED = "TLS handshake failed"
#: Why a worker closes: with the scheduler, and where its connection breaks.
SCHEDULER_CLOSED = "scheduler-close"
CONNECTION_BROKEN = "worker-handle-scheduler-connection-broken"
HEARTBEAT_ERROR = "worker-heartbeat-error"


def run_in_loop(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine in the kind of event loop that distributed's configuration names."""
    from distributed.compatibility import asyncio_run
    from distributed.config import get_loop_factory

    result: Result = asyncio_run(work, loop_factory=get_loop_factory())
    return result


def set_interval(stream: Any, seconds: float) -> None:
    """Set the seconds between two messages; no configuration has them."""
    require(SEEN, stream, "interval")
    stream.interval = seconds


def set_message_limit(worker: Any, nbytes: int) -> None:
    """Set the bytes that a worker asks of another in one message.

    ``distributed.worker.transfer.message-bytes-limit`` is read before it is known whether ucx
    starts, and so much at once does not suit tcp.
    """
    require(SEEN, worker.state, "transfer_message_bytes_limit")
    worker.state.transfer_message_bytes_limit = nbytes


def preload_nothing() -> None:
    """Keep nannies from importing every optional package, to name it to a running fork server."""
    import distributed.utils

    require(SEEN, distributed.utils, "_forkserver_preload_set")
    distributed.utils._forkserver_preload_set = True


def leave_folder(server: Any) -> None:
    """In a fork: keep the server's folder, which the end of any process that knows it removes."""
    if server is None:
        return
    require(SEEN, server, "_workdir")
    if server._workdir is not None:
        server._workdir._finalizer.detach()


def loop_runner(cluster: Any) -> Any:
    """Return the runner that starts and stops a cluster's event loop."""
    return cluster._loop_runner


def adaptive(cluster: Any) -> Any:
    """Return what ``adapt()`` made last, or None."""
    return cluster._adaptive


def log(cluster: Any, line: str) -> None:
    """Add a line to a cluster's own log, which ``get_logs()`` shows."""
    cluster._log(line)


def logged(cluster: Any) -> list[str]:
    """The lines of that log."""
    return [line for _, line in cluster._cluster_manager_logs]


def paths(router: Any) -> set[str]:
    """The paths of an HTTP server's routes, as distributed's site map has them."""
    from distributed.http.routing import _descend_routes

    found: set[str] = set()
    _descend_routes(router, set(), found)
    return found
