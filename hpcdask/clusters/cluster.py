"""A Dask cluster whose workers are jobs of a queueing system.

It inherits from `distributed.deploy.Cluster`, which brings adaptive scaling, the widget and the
link to the dashboard, and leaves the jobs to a `Keeper`.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import math
import os
import re
import sys
import warnings
import weakref
from collections.abc import Awaitable, Collection
from typing import Any, ClassVar

import dask.config
from distributed import Scheduler, Security, rpc
from distributed.core import Status
from distributed.deploy.adaptive import Adaptive
from distributed.deploy.cluster import Cluster
from distributed.scheduler import WorkerState
from distributed.utils import silence_logging_cmgr
from tornado.ioloop import IOLoop

from hpcdask import security as keys
from hpcdask.errors import HpcdaskError, UsageError
from hpcdask.queues import warden
from hpcdask.queues.base import Queue
from hpcdask.queues.folder import ClusterFolder
from hpcdask.reconcile import Job, Policy
from hpcdask.scheduler import add_lazy_dashboard
from hpcdask.spec import parse_memory

from . import options
from .display import JobTable, html
from .keeper import Keeper
from .options import NO_ADDRESS, JobOptions

#: Seconds between two queries of the queue.
POLL_INTERVAL_S = 5.0


def job_of(state: WorkerState) -> str:
    """A worker's job, by which workers come and go together: the name without the last number."""
    return str(state.name).rpartition("-")[0]


class JobAdaptive(Adaptive):
    """distributed's adaptive scaling, whose way down is the cluster's own."""

    async def scale_down(self, workers: Collection[str]) -> None:
        """End the jobs of these workers without losing what they hold."""
        if workers:
            self.cluster._scale_down(workers)

    async def scale_up(self, n: int) -> None:
        """Wish for more workers; why that fails is told by the cluster."""
        with contextlib.suppress(HpcdaskError):
            await self.cluster._scale(n)


class JobCluster(Cluster):
    """Base of the clusters for the several queueing systems; see `SLURMCUDACluster`."""

    #: Class of dask-jobqueue that writes the header, as (module, name), and its configuration.
    jobqueue: ClassVar[tuple[str, str]]
    #: Name of the queue in `hpcdask.queues.registry`.
    queue_name: ClassVar[str]
    _instances: ClassVar[weakref.WeakSet[JobCluster]] = weakref.WeakSet()

    def __init__(
        self,
        n_workers: int = 0,
        *,
        gpus_per_job: int | None = None,
        gpu_type: str | None = None,
        nodes_per_job: int = 1,
        poll_interval: str | float | None = None,
        start_timeout: str | float | None = None,
        security: Security | bool | None = None,
        shared_temp_directory: str | None = None,
        scheduler_options: dict[str, Any] | None = None,
        scheduler_cls: type[Scheduler] = Scheduler,
        protocol: str | None = None,
        interface: str | None = None,
        config_name: str | None = None,
        silence_logs: int | str | bool = "error",
        name: str | None = None,
        asynchronous: bool = False,
        loop: Any = None,
        **job_keywords: Any,
    ) -> None:
        self.status = Status.created
        module, job_name = self.jobqueue
        job_cls = getattr(options.import_jobqueue(module), job_name)
        self._config_name = config_name or job_cls.default_config_name()
        for keyword in ("dashboard_address", "host"):
            if keyword in job_keywords:
                raise UsageError(
                    f'{keyword} belongs to the scheduler: scheduler_options={{"{keyword}": …}}'
                )
        self.queue = self._make_queue(job_keywords)
        if interface is None:
            interface = dask.config.get(f"jobqueue.{self._config_name}.interface", None)
        self.options: JobOptions = options.read_job_options(
            job_cls,
            self.queue,
            self._config_name,
            gpus_per_job=gpus_per_job,
            gpu_type=gpu_type,
            nodes_per_job=nodes_per_job,
            protocol=protocol,
            given={**job_keywords, "interface": interface},
        )
        self._poll_interval_s = options.seconds(poll_interval, "poll_interval") or POLL_INTERVAL_S
        self._policy = Policy(
            start_timeout_s=options.seconds(start_timeout, "start_timeout") or 300.0,
            walltime_s=self.options.walltime and self.options.walltime.total_seconds(),
        )
        self._scheduler_cls = scheduler_cls
        self._scheduler_options = self._read_scheduler_options(scheduler_options, interface)
        self._base = shared_temp_directory or dask.config.get(
            f"jobqueue.{self._config_name}.shared-temp-directory", None
        )
        self._logs = options.log_directory(job_keywords, self._config_name)
        self._asked_security = security
        self._n_workers = n_workers
        self._exits = contextlib.ExitStack()
        if silence_logs:
            self._exits.enter_context(silence_logging_cmgr(level=silence_logs))
        self.scheduler: Scheduler | None = None
        self.keeper: Keeper | None = None
        self._folder: ClusterFolder | None = None
        self._warden: Any = None
        self._ending: asyncio.Future[None] | None = None
        self.security = Security()
        if loop is None and asynchronous:
            loop = IOLoop.current()
        super().__init__(asynchronous=asynchronous, loop=loop, quiet=True, name=name)
        self.id = re.sub(r"[^A-Za-z0-9_.]+", "_", f"{self.name}")[:40] + f"-{os.urandom(3).hex()}"
        self._instances.add(self)
        if n_workers:
            self.queue.check()
        if not self.called_from_running_loop:
            self._loop_runner.start()
            try:
                self.sync(self._start)
            except BaseException:
                self.close()
                raise

    def _make_queue(self, job_keywords: dict[str, Any]) -> Queue:
        """The door to the queue; takes from the keywords what belongs to it."""
        from hpcdask.queues.registry import queue_class

        return queue_class(self.queue_name)()

    def _read_scheduler_options(
        self, given: dict[str, Any] | None, interface: str | None
    ) -> dict[str, Any]:
        configured = dask.config.get(f"jobqueue.{self._config_name}.scheduler-options", None)
        chosen = dict(configured or {}) if given is None else dict(given)
        if "host" not in chosen:
            chosen.setdefault("interface", interface)
            what = "interface" if chosen["interface"] == interface else "scheduler_options"
            options.check_interface(chosen["interface"], what)
        return {"dashboard_address": ":8787", **chosen}

    # Start and end

    async def _start(self) -> None:
        if self.status != Status.created:
            return
        self.status = Status.starting
        folder = self._folder = ClusterFolder.create(self.id, self.queue_name, base=self._base)
        if self._logs is not None:
            folder.logs_in(self._logs)
        credentials = self._credentials()
        if credentials:
            keys.save_credentials(credentials, str(folder.keys))
        await self._start_scheduler()
        folder.write_script(self.job_script())
        self._warden = warden.start_warden(folder)
        assert self.scheduler is not None
        self.keeper = Keeper(
            self.queue,
            folder,
            self.scheduler,
            self.id,
            size=self.options.workers,
            policy=self._policy,
            poll_interval_s=self._poll_interval_s,
            say=self._say,
        )
        self.keeper.start()
        await super()._start()  # type: ignore[no-untyped-call]
        if self._n_workers:
            await self._scale(self._n_workers)

    def _credentials(self) -> keys.Credentials:
        """What lets workers in; sets `security`. Keys of one's own are files or texts, as given."""
        asked = self._asked_security
        if asked is False:
            self._say("warning: security=False: anybody who reaches the scheduler can run code")
            return {}
        if isinstance(asked, Security):
            self.security = asked
            fields = keys.FILES.values()
            given = {field: getattr(asked, field) for field in fields if getattr(asked, field)}
            return {field: _text(value) for field, value in given.items()}
        made = keys.create_credentials()
        self.security = keys.to_security(made)
        return made

    async def _start_scheduler(self) -> None:
        protocol = "tls" if self.security.require_encryption else "tcp"
        with warnings.catch_warnings():  # the default port of the dashboard may be taken
            warnings.filterwarnings("ignore", message="Port .* is already in use")
            self.scheduler = self._scheduler_cls(
                **{
                    "protocol": protocol,
                    "security": self.security,
                    "port": 0,
                    "dashboard": False,
                    **self._scheduler_options,
                }
            )
        add_lazy_dashboard(self.scheduler)
        await self.scheduler
        access: Any = self.security.get_connection_args("client")
        self.scheduler_comm = rpc(self.scheduler.address, connection_args=access)

    async def _close(self) -> None:
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._end())
        await self._ending

    async def _end(self) -> None:
        self.status = Status.closing
        problem: HpcdaskError | None = None
        with contextlib.suppress(AttributeError):
            self._adaptive.stop()
        if self.scheduler is not None and self.keeper is not None:
            self.keeper.closing()
            await self.scheduler.close(reason="the cluster is closed")  # its workers end as well
            try:
                await self.keeper.close()
            except HpcdaskError as error:
                problem = error
        elif self.scheduler is not None:
            await self.scheduler.close()
        await super()._close()  # type: ignore[no-untyped-call]
        if self._folder is not None:
            self._folder.remove_keys()
        if self._warden is not None and problem is None:
            self._warden.dismiss()
        self._exits.close()
        if problem is not None:
            raise problem

    def close(self, timeout: float | None = None) -> Awaitable[None] | None:
        """Cancel all jobs, see that they are gone, and stop the scheduler.

        Parameters
        ----------
        timeout
            Seconds to wait for that.

        Raises
        ------
        QueueError
            Jobs are still in the queue; the message names them.
        """
        try:
            result: Awaitable[None] | None = super().close(timeout)
        finally:
            if not self.asynchronous:
                self._loop_runner.stop()
        return result

    async def __aenter__(self) -> JobCluster:
        await self._start()
        return self

    def __await__(self) -> Any:
        async def ready() -> JobCluster:
            await self._start()
            return self

        return ready().__await__()

    # Scaling

    def scale(
        self,
        n: int | None = None,
        jobs: int = 0,
        memory: str | int | None = None,
        cores: int | None = None,
    ) -> Any:
        """Ask for this many workers, and wait until the queue has their jobs.

        Parameters
        ----------
        n
            Workers.
        jobs
            Jobs.
        memory
            Host memory of all workers together, in bytes or as text.
        cores
            Threads of all workers together.

        Raises
        ------
        UsageError
            There is no such queueing system on this machine.
        Refused, QueueError
            The queue does not take the jobs, or does not answer.
        """
        size = self.options.workers
        workers = max(
            n or 0,
            jobs * size,
            math.ceil((parse_memory(memory, "memory") or 0) / self._worker_memory()),
            math.ceil((cores or 0) / self._worker_threads()),
        )
        if workers < 0 or (n or 0) < 0 or jobs < 0:
            raise UsageError(f"scale: {min(n or 0, jobs)} is not a number of workers")
        self._running_keeper()
        if workers:
            self.queue.check()
        return self.sync(self._scale, workers)

    async def _scale(self, n: int) -> None:
        keeper = self._running_keeper()
        keeper.want(math.ceil(n / self.options.workers))
        await keeper.settle()

    def _scale_down(self, names: Collection[str]) -> None:
        self._running_keeper().dismiss(names)

    def _running_keeper(self) -> Keeper:
        if self.keeper is None or self.status not in (Status.starting, Status.running):
            raise UsageError("this cluster is closed: make a new one")
        return self.keeper

    def adapt(  # type: ignore[override]
        self,
        *,
        minimum: int = 0,
        maximum: int | float = math.inf,
        minimum_jobs: int | None = None,
        maximum_jobs: int | None = None,
        minimum_memory: str | int | None = None,
        maximum_memory: str | int | None = None,
        minimum_cores: int | None = None,
        maximum_cores: int | None = None,
        Adaptive: type[Adaptive] = JobAdaptive,
        **kwargs: Any,
    ) -> Adaptive:
        """Let the number of workers follow the work.

        Parameters
        ----------
        minimum, maximum
            Workers.
        minimum_jobs, maximum_jobs, minimum_memory, maximum_memory, minimum_cores, maximum_cores
            The same in jobs, bytes of host memory or threads of all workers together.
        Adaptive
            Class that decides.
        **kwargs
            Passed to `distributed.deploy.adaptive.Adaptive`.

        Raises
        ------
        UsageError
            `minimum` is above `maximum`, or there is no such queueing system on this machine.
        """
        size, memory = self.options.workers, self._worker_memory()
        threads = self._worker_threads()
        low = [minimum or 0]
        high: list[float] = [math.inf if maximum is None else maximum]
        if minimum_jobs is not None:
            low.append(minimum_jobs * size)
        if maximum_jobs is not None:
            high.append(maximum_jobs * size)
        if minimum_memory is not None:
            low.append(math.ceil((parse_memory(minimum_memory, "minimum_memory") or 0) / memory))
        if maximum_memory is not None:
            high.append((parse_memory(maximum_memory, "maximum_memory") or 0) // memory)
        if minimum_cores is not None:
            low.append(math.ceil(minimum_cores / threads))
        if maximum_cores is not None:
            high.append(maximum_cores // threads)
        if max(low) > min(high) or max(low) < 0:
            raise UsageError(
                f"adapt: the minimum of {max(low)} workers is above the maximum of {min(high):g}"
            )
        self._running_keeper()
        self.queue.check()
        if size > 1:
            kwargs.setdefault("worker_key", job_of)
        return super().adapt(Adaptive, minimum=max(low), maximum=min(high), **kwargs)

    def _worker_memory(self) -> int:
        return max(1, self.options.spec.memory_limit or int(self.options.job.worker_memory))

    def _worker_threads(self) -> int:
        return self.options.spec.nthreads or 1

    @property
    def plan(self) -> set[str]:
        """Names of the workers that are wanted, for adaptive scaling."""
        return set(self.keeper.names()) if self.keeper else set()

    @property
    def requested(self) -> set[str]:
        """Names of the workers that are asked for."""
        return self.plan

    @property
    def observed(self) -> set[str]:
        """Names of the workers that are connected."""
        return set(self.keeper.connected()) if self.keeper else set()

    async def _wait_for_workers(self, n_workers: int = 0, timeout: Any = None) -> None:
        waiting = asyncio.ensure_future(
            super()._wait_for_workers(n_workers, timeout)  # type: ignore[no-untyped-call]
        )
        while not waiting.done():
            if self.keeper is not None and self.keeper.failure is not None:
                waiting.cancel()
                raise self.keeper.failure
            await asyncio.wait([waiting], timeout=0.1)
        await waiting

    # What it shows

    def job_script(self) -> str:
        """The script that is submitted for each job, exactly."""
        address = self.scheduler.address if self.scheduler and self.scheduler.status else None
        folder = str(self._folder.path) if self._folder else "<folder>"
        return self.options.script(
            self.queue,
            self.id,
            folder,
            address or NO_ADDRESS,
            tls=self.security.require_encryption,
        )

    def jobs(self) -> JobTable:
        """What is known of each job, those that are over included."""
        found: list[Job] = list(self.keeper.jobs.values()) if self.keeper else []
        return JobTable(found)

    def job_logs(self, *ids: str, lines: int | None = None) -> dict[str, str]:
        """The logs of jobs, live or over.

        Parameters
        ----------
        *ids
            Of the jobs; by default all.
        lines
            At most so many of the last lines; None for all.
        """
        if self._folder is None:
            return {}
        known = [str(job.id) for job in self.jobs()]
        if unknown := set(ids) - set(known):
            raise UsageError(
                f"job_logs: no job {', '.join(sorted(unknown))}. There are: {', '.join(known)}"
            )
        return {job_id: "\n".join(self._folder.tail(job_id, lines)) for job_id in ids or known}

    @property
    def failure(self) -> HpcdaskError | None:
        """Why nothing more is submitted; None while all is well."""
        return self.keeper.failure if self.keeper else None

    def _say(self, text: str) -> None:
        self._log(text)  # type: ignore[no-untyped-call]
        print(f"hpcdask: {text}", file=sys.stderr, flush=True)

    def __repr__(self) -> str:
        text = super().__repr__()  # type: ignore[no-untyped-call]
        counts = self.jobs().counts()
        return f"{text[:-1]}, {counts})" if counts else text

    def _repr_html_(self, cluster_status: str | None = None) -> str:
        status = html(self.jobs(), self.failure)
        return str(super()._repr_html_(f"{cluster_status or ''}{status}"))  # type: ignore[no-untyped-call]


def _text(value: str) -> str:
    """PEM text: given as such, or the path of a file."""
    if "\n" in value:
        return value
    with open(value) as file:
        return file.read()


@atexit.register
def close_clusters() -> None:
    """Close what the program left open. What cannot be closed in time is left to the warden."""
    for cluster in list(JobCluster._instances):
        if getattr(cluster, "status", Status.closed) != Status.closed:
            with contextlib.suppress(Exception):
                cluster.close(timeout=10)
