"""Private parts of distributed, as in 2026.7.0 to 2026.8.0.

What is set is looked for first. Methods that subclasses override, and the texts below, cannot be
asked for at run time: tests/unit/test_upstream.py finds them in distributed's source.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable
from typing import Any, TypeVar

from .parts import refuse, require

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


def gathered(stream: Any) -> int:
    """How many messages wait to be sent."""
    require(SEEN, stream, "buffer")
    return len(stream.buffer)


def send_now(stream: Any) -> None:
    """Send what has gathered, whatever the interval."""
    require(SEEN, stream, "buffer", "next_deadline", "waker")
    if stream.buffer:
        stream.next_deadline = None
        stream.waker.set()


#: ``distributed.scheduler.worker-saturation`` where nobody has configured it.
USUAL_SATURATION = 1.1


def replace_filling(scheduler: Any, fill: Callable[..., None]) -> Callable[..., None]:
    """Have a function called when workers may take queued tasks; returns the usual one.

    There is no public way to send several at a time, other than to send all at once.
    """
    require(SEEN, scheduler, "stimulus_queue_slots_maybe_opened", "WORKER_SATURATION")
    require(SEEN, scheduler, "idle_task_count", "check_idle_saturated", "transitions")
    usual: Callable[..., None] = scheduler.stimulus_queue_slots_maybe_opened
    scheduler.stimulus_queue_slots_maybe_opened = fill
    return usual


def send_queued(
    scheduler: Any,
    groups: Iterable[Collection[Any]],
    saturation: float,
    are_meant: Callable[[], bool],
    stimulus_id: str,
) -> None:
    """Fill one group of workers after the other, as long as the next queued tasks are meant.

    The saturation is so high only meanwhile: what becomes ready by itself is sent as ever.
    """
    usual, free = scheduler.WORKER_SATURATION, scheduler.idle_task_count
    scheduler.WORKER_SATURATION = saturation
    filled: list[Any] = []
    try:
        for workers in groups:
            filled += workers
            scheduler.idle_task_count = set(workers)
            while scheduler.idle_task_count and scheduler.queued and are_meant():
                scheduler.transitions({scheduler.queued.peek().key: "processing"}, stimulus_id)
    finally:
        scheduler.WORKER_SATURATION, scheduler.idle_task_count = usual, free
        for worker in filled:
            scheduler.check_idle_saturated(worker)


def before_graphs(scheduler: Any, wait: Callable[[], Awaitable[None]]) -> None:
    """Have graphs wait for this before they are unpickled, and what their clients send later."""
    handlers = scheduler.stream_handlers
    if "update-graph" not in handlers:
        refuse(SEEN, "Scheduler.stream_handlers: update-graph")
    known = handlers["update-graph"]

    async def update_graph(**message: Any) -> None:
        await wait()
        await known(**message)

    handlers["update-graph"] = update_graph


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
    """What starts and stops a cluster's event loop."""
    return cluster._loop_runner


def adaptive(cluster: Any) -> Any:
    """What ``adapt()`` made last, or None."""
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
