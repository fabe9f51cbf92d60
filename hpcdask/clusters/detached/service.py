"""Calls that a detached cluster serves over the scheduler's own connections.

Whoever reaches the scheduler has this user's keys, and could run any code as this user anyway: so
arguments and answers are pickled.
"""

from __future__ import annotations

import asyncio
import inspect
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distributed.core import rpc

from hpcdask.clusters import retire
from hpcdask.clusters.display import JobTable
from hpcdask.clusters.job import Job
from hpcdask.errors import ClusterError, HpcdaskError
from hpcdask.upstream import distributed as upstream

if TYPE_CHECKING:
    from distributed import Scheduler

    from hpcdask.clusters.cluster import JobCluster
    from hpcdask.gpu.monitor import GpuState

#: The handler's name.
OPERATION = "hpcdask_control"
#: Methods of the cluster that are called as they are, and those that read files.
PASSED_ON, READ_FILES = ("scale", "job_script"), ("job_logs", "logs")
#: Seconds that a detached cluster has to answer what takes no time.
LOOK_TIMEOUT_S = 30.0


@dataclass
class Look:
    """State of a detached cluster, for an attached notebook.

    `identity` is the scheduler's. `lines` are what it has told since the last look, of `told` in
    all. `problem` says why jobs may wait for ever.
    """

    jobs: tuple[Job, ...]
    failure: HpcdaskError | None
    lines: list[str]
    told: int
    requested: set[str]
    identity: dict[str, Any]
    dashboard: str
    tunnel: str
    problem: str = ""

    def table(self) -> JobTable:
        """The jobs as they are shown."""
        return JobTable(self.jobs, self.problem)


@dataclass
class Service:
    """Obeys those who attach; `end` begins the cluster's end, for a reason."""

    cluster: JobCluster
    end: Callable[[str], None]
    _used: float = field(default_factory=time.monotonic)
    _adaptive: Any = None

    def __post_init__(self) -> None:
        assert self.cluster.scheduler is not None
        self.scheduler: Scheduler = self.cluster.scheduler
        self.scheduler.handlers[OPERATION] = self.answer

    async def answer(self, call: str, arguments: bytes) -> dict[str, Any]:
        """Do what an attached notebook asks, and return the answer or the error."""
        try:
            args, keywords = pickle.loads(arguments)
            if call in READ_FILES:
                result = await asyncio.to_thread(getattr(self.cluster, call), *args, **keywords)
            elif call in PASSED_ON:
                result = getattr(self.cluster, call)(*args, **keywords)
            else:
                result = getattr(self, f"on_{call}")(*args, **keywords)
            if inspect.isawaitable(result):
                result = await result
            return {"result": pickle.dumps(result)}
        except Exception as error:  # it is raised there
            return {"error": pickle.dumps(error)}

    def on_look(self, told: int) -> Look:
        """Return the state of the cluster."""
        self._used = time.monotonic()
        lines = upstream.logged(self.cluster)
        return Look(
            tuple(self.cluster.jobs()),
            self.cluster.failure,
            lines[told:],
            len(lines),
            self.cluster.plan,
            self.scheduler.identity(),
            self.cluster.dashboard_link,
            self.cluster._own_scheduler.tunnel(),
            self.cluster.jobs().problem,
        )

    def on_jobs(self) -> tuple[Job, ...]:
        """See `JobCluster.jobs`."""
        return tuple(self.cluster.jobs())

    def on_too_few(self, n_workers: int) -> HpcdaskError | None:
        """Why there will not be so many workers; None if they may come."""
        return self.cluster._too_few(n_workers)

    def on_adapt(self, **bounds: Any) -> None:
        """See `JobCluster.adapt`."""
        self._adaptive = self.cluster.adapt(**bounds)

    def on_stop_adapting(self) -> bool:
        """End adaptive scaling; the workers stay. Whether there was any."""
        adaptive, self._adaptive = self._adaptive, None
        if adaptive is not None:
            adaptive.stop()
        return adaptive is not None

    def on_gpus(self) -> tuple[GpuState, ...]:
        """See `JobCluster.gpus`."""
        return tuple(self.cluster.gpus())

    def on_shutdown(self, why: str) -> None:
        """Begin to end the cluster."""
        self.end(why)

    # What the process asks

    def idle_s(self) -> float:
        """Seconds since the last client, attached notebook, or Dask task to compute."""
        scheduler = self.scheduler
        clients = scheduler.client_comms  # not what stands for published datasets and the like
        busy = any(ws.processing for ws in scheduler.workers.values())
        if clients or busy or scheduler.queued or scheduler.unrunnable:
            self._used = time.monotonic()
        return time.monotonic() - self._used

    def warn(self, text: str) -> None:
        """Tell all attached notebooks, and programs that are clients only."""
        self.cluster._say(f"warning: {text}")
        self.scheduler.log_event(
            "print", {"args": (f"hpcdask: warning: {text}",), "file": 2, "flush": True}
        )

    def fail_all(self, error: ClusterError) -> int:
        """Fail all Dask tasks that are not done, rather than lose them; return their number."""
        return retire.fail_unfinished(self.scheduler, error)


async def call(scheduler: rpc, name: str, *args: Any, **keywords: Any) -> Any:
    """Ask a detached cluster. Raises what it raises, and OSError if it does not answer."""
    answer = await getattr(scheduler, OPERATION)(
        call=name, arguments=pickle.dumps((args, keywords))
    )
    if "error" in answer:
        raise pickle.loads(answer["error"])
    return pickle.loads(answer["result"])
