"""Private parts of dask and distributed, as in 2026.7.0 to 2026.8.0; test_upstream.py has them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from types import SimpleNamespace
from typing import Any, NoReturn, TypeVar

import dask.highlevelgraph
from dask._expr import FinalizeCompute as FinalizeCompute
from dask._task_spec import Alias as Alias
from dask._task_spec import Task as Task
from dask._task_spec import convert_legacy_graph as convert_legacy_graph

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


def send_at_once(stream: Any) -> None:
    """Send each message of a stream without waiting for others; no configuration has this."""
    require(SEEN, stream, "interval")
    stream.interval = 0.0


def prepare_graphs(
    client: Any, is_needed: Callable[[], bool], prepare: Callable[[], Awaitable[None]]
) -> None:
    """Hold back a graph of a client, and what follows, until `prepare` is done, if it is needed."""
    stream = client.scheduler_comm
    require(SEEN, stream, "send")
    send, held = stream.send, list[Any]()

    async def release() -> None:
        try:
            await prepare()
        finally:
            with contextlib.suppress(OSError):  # the client has closed
                send(*held)
            held.clear()

    def send_prepared(*messages: Any) -> None:
        if not held:
            if not is_needed() or all(one["op"] != "update-graph" for one in messages):
                send(*messages)
                return
            client.loop.add_callback(release)
        held.extend(messages)

    stream.send = send_prepared


def set_message_limit(worker: Any, nbytes: int) -> None:
    """Set the bytes that a worker asks of another in one message: known once ucx starts."""
    require(SEEN, worker.state, "transfer_message_bytes_limit")
    worker.state.transfer_message_bytes_limit = nbytes


def preload_nothing() -> None:
    """Keep nannies from importing every optional package, to name it to a running fork server."""
    import distributed.utils

    require(SEEN, distributed.utils, "_forkserver_preload_set")
    distributed.utils._forkserver_preload_set = True


def loop_runner(cluster: Any) -> Any:
    return cluster._loop_runner


def adaptive(cluster: Any) -> Any:
    """Return what ``adapt()`` made last, or None."""
    return cluster._adaptive


def log(cluster: Any, line: str) -> None:
    """Add a line to a cluster's own log, which ``get_logs()`` shows."""
    cluster._log(line)


def logged(cluster: Any) -> list[str]:
    return [line for _, line in cluster._cluster_manager_logs]


def fail_unreadable_tasks() -> None:
    """Make a Dask task that this worker cannot unpickle fail where it is run."""
    # distributed unpickles as it reads its connection to the scheduler, and an error ends both
    from distributed.protocol import core, pickle

    require(SEEN, core, "pickle")

    def loads(data: bytes, *, buffers: Sequence[Any] = ()) -> Any:
        try:
            return pickle.loads(data, buffers=buffers)
        except Exception as error:
            return Task("unreadable", raise_error, error)

    holder: Any = core
    holder.pickle = SimpleNamespace(**{**vars(pickle), "loads": loads})


def raise_error(error: BaseException) -> NoReturn:
    raise error


def drop_text_traceback(event: Any) -> None:
    """Drop a traceback that was sent as text, as of a deep recursion: a client waits for ever."""
    from distributed.protocol import pickle

    if event.traceback is not None and isinstance(pickle.loads(event.traceback.data), str):
        event.traceback = None


@functools.cache
def cull_by_layer() -> None:
    """Make each layer of a graph look at its own wanted keys only: linear, not quadratic."""
    # dask's looks at all keys for each `delayed` call: for 5,000 calls, 25 million times
    layer: Any = dask.highlevelgraph.Layer
    cull = layer.cull

    def of_its_own(self: Any, keys: set[Any], all_hlg_keys: Any) -> Any:
        if not self.has_legacy_tasks and len(self) <= len(keys):
            keys = {key for key in self if key in keys}
        return cull(self, keys, all_hlg_keys)

    layer.cull = of_its_own
