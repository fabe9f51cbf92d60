"""A Dask cluster whose workers are jobs of a queueing system.

It inherits from `distributed.deploy.Cluster`, which brings adaptive scaling, the widget and the
link to the dashboard, and leaves the jobs to a `JobController`.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import inspect
import os
import re
import sys
import weakref
from collections.abc import Awaitable, Collection, Iterable
from datetime import timedelta
from typing import Any, ClassVar, Literal, Self, cast

from distributed import Scheduler, Security
from distributed.core import Status
from distributed.utils import silence_logging_cmgr
from tornado.ioloop import IOLoop

from hpcdask.client.defaults import suiting_devices
from hpcdask.errors import HpcdaskError, UsageError
from hpcdask.jobs import watchdog
from hpcdask.jobs.folder import ClusterFolder, prune
from hpcdask.queues.base import Queue
from hpcdask.spec.specs import Protocol

from .configuration import configured, import_job_class, log_directory, refuse_schedulers, section
from .controller import JobController
from .display import JobTable, html, text
from .job import Policy
from .keywords import number, seconds
from .options import JobOptions, read_job_options
from .scaling import Scaling
from .scheduler import ClusterScheduler, read_scheduler_options
from .state import ClusterState

#: Seconds between two queries of the queue.
POLL_INTERVAL_S = 5.0
#: Seconds that the workers of a job that runs get to connect.
START_TIMEOUT_S = 300.0


class JobCluster(Scaling):
    """Base of the clusters for the several queueing systems; see `SLURMCUDACluster`."""

    #: Name of the queue in `hpcdask.queues.registry`, and what the queue says of dask-jobqueue.
    queue_name: ClassVar[str]
    jobqueue: ClassVar[tuple[str, str]]
    _instances: ClassVar[weakref.WeakSet[JobCluster]] = weakref.WeakSet()
    _folder: ClusterFolder | None = None
    _making: asyncio.Future[ClusterFolder] | None = None
    _watchdog: Any = None
    _ending: asyncio.Future[None] | None = None

    def __init__(
        self,
        n_workers: int = 0,
        *,
        gpus_per_job: int | None = None,
        gpu_type: str | None = None,
        nodes_per_job: int = 1,
        poll_interval: str | float | timedelta | None = None,
        start_timeout: str | float | timedelta | None = None,
        security: Security | bool | None = None,
        shared_temp_directory: str | None = None,
        scheduler_options: dict[str, Any] | None = None,
        scheduler_cls: type[Scheduler] = Scheduler,
        protocol: Literal[Protocol, "tls", "tls://", "tcp://", "ucx://"] | None = None,
        interface: str | None = None,
        config_name: str | None = None,
        silence_logs: int | str | bool = "error",
        name: str | None = None,
        asynchronous: bool = False,
        loop: Any = None,
        **job_keywords: Any,
    ) -> None:
        self._n_workers = number(n_workers or 0, "n_workers", "workers")
        job_cls = import_job_class(self.jobqueue)
        usual = job_cls.default_config_name()
        config_name = config_name or usual
        refuse_schedulers(job_keywords)
        self.queue = self._make_queue(job_keywords)
        with section(config_name, usual):
            interface = configured("interface", {"interface": interface}, config_name)
            self.options = read_job_options(
                job_cls,
                self.queue,
                config_name,
                gpus_per_job=gpus_per_job,
                gpu_type=gpu_type,
                nodes_per_job=nodes_per_job,
                protocol=protocol,
                given={**job_keywords, "interface": interface},
                own=set(inspect.signature(JobCluster).parameters) - {"job_keywords"},
            )
            self._poll_interval_s = seconds(poll_interval, "poll_interval") or POLL_INTERVAL_S
            self._start_timeout_s = seconds(start_timeout, "start_timeout") or START_TIMEOUT_S
            base = configured("shared_temp_directory", {}, config_name)
            self._base = shared_temp_directory or base
            self._logs = log_directory(job_keywords, config_name)
            local = self.queue.is_local
            chosen = read_scheduler_options(scheduler_options, config_name, interface, local=local)
        self._own_scheduler = ClusterScheduler(
            scheduler_cls, chosen, security, local=local, say=self._say
        )
        if n_workers:
            self.queue.check()
        self._exits = _until_closed(silence_logs, self.options)
        loop = IOLoop.current() if loop is None and asynchronous else loop
        super().__init__(asynchronous=asynchronous, loop=loop, quiet=True, name=name)
        self.id = _new_id(self.name)
        self._instances.add(self)
        if not self.called_from_running_loop:
            self._start_now()

    def _make_queue(self, job_keywords: dict[str, Any]) -> Queue:
        """The door to the queue; takes from the keywords what belongs to it."""
        from hpcdask.queues.registry import queue_class

        return queue_class(self.queue_name).of_cluster(job_keywords)

    def _start_now(self) -> None:
        self._loop_runner.start()
        try:
            self.sync(self._start)
        except BaseException:
            self.close()
            raise

    @property
    def scheduler(self) -> Scheduler | None:
        """The scheduler; None before the start."""
        return self._own_scheduler.server

    @property
    def security(self) -> Security:
        """What lets workers and clients in."""
        return self._own_scheduler.security

    # Start and end

    async def _start(self) -> None:
        if self.status != Status.created:
            return
        self.status = Status.starting
        # file systems may be slow; the end waits for it, to leave nothing
        self._making = asyncio.ensure_future(asyncio.to_thread(self._make_folders))
        folder = await asyncio.shield(self._making)
        await self._own_scheduler.start()
        self.scheduler_comm = self._own_scheduler.connect()
        await asyncio.to_thread(folder.write_script, self.job_script())
        for directive in self.queue.replaced(self.options.job):
            self._say(
                f"warning: the directive {directive!r} has no effect: hpcdask knows its jobs by a "
                f"tag in its place"
            )
        self._watchdog = await asyncio.to_thread(watchdog.start_watchdog, folder)
        await asyncio.to_thread(prune, self._base)
        assert self.scheduler is not None
        state = ClusterState(
            self.scheduler,
            self.id,
            size=self.options.workers,
            policy=Policy(
                start_timeout_s=self._start_timeout_s, walltime_s=self.options.walltime_s
            ),
            say=self._say,
        )
        self.controller = JobController(
            state,
            self.queue,
            folder,
            poll_interval_s=self._poll_interval_s,
            over=self._end_by_itself,
        )
        self.controller.start()
        self._tell_most_workers(self.controller)
        await super()._start()
        if self._n_workers:
            await self._scale(self._n_workers)

    def _make_folders(self) -> ClusterFolder:
        folder = self._folder = ClusterFolder.create(self.id, self.queue_name, base=self._base)
        if self._logs is not None:
            folder.logs_in(self._logs)
        self._own_scheduler.save_keys(str(folder.keys))
        self._own_scheduler.make_scratch()
        return folder

    async def _close(self) -> None:
        await asyncio.shield(self._begin_to_end())  # who waits may give up, and close again

    def _begin_to_end(self) -> asyncio.Future[None]:
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._end())
        return self._ending

    def _end_by_itself(self) -> None:
        """The scheduler is closed by somebody else, and nobody waits for the cluster's end."""

        def tell(ending: asyncio.Future[None]) -> None:
            if not ending.cancelled() and (error := ending.exception()) is not None:
                self._say(f"error: {error}")

        self._begin_to_end().add_done_callback(tell)

    async def _end(self) -> None:
        self.status = Status.closing
        problem: HpcdaskError | None = None
        if self._making is not None:
            await asyncio.wait([self._making])
        if self._adaptive is not None:
            self._adaptive.stop()
        if self.controller is not None:
            self.controller.closing()
        await self._own_scheduler.close()
        if self.controller is not None:
            try:
                await self.controller.close()
            except HpcdaskError as error:
                problem = error
        await super()._close()
        if self._folder is not None:
            self._folder.remove_keys()
        if self._watchdog is not None and problem is None:
            self._watchdog.dismiss()
        self._own_scheduler.remove_scratch()
        self._exits.close()
        if problem is not None:
            raise problem

    def close(self, timeout: float | None = None) -> Awaitable[None] | None:
        """Cancel all jobs, wait until the queue no longer has them, and stop the scheduler.

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
            if not self.asynchronous and self.status == Status.closed:
                self._loop_runner.stop()
        return result

    async def _ready(self) -> JobCluster:
        try:
            await self._start()
        except BaseException:
            await self._close()
            raise
        return self

    def __enter__(self) -> Self:
        return cast(Self, super().__enter__())

    async def __aenter__(self) -> Self:
        await self._ready()
        return self

    def __await__(self) -> Any:
        return self._ready().__await__()

    async def _wait_for_workers(self, n_workers: int = 0, timeout: Any = None) -> None:
        waiting = asyncio.ensure_future(super()._wait_for_workers(n_workers, timeout))
        try:
            while not waiting.done():
                if self.controller is not None and self.controller.failure is not None:
                    raise self.controller.failure
                await asyncio.wait([waiting], timeout=0.1)
            await waiting
        finally:
            waiting.cancel()

    # What it shows

    def job_script(self) -> str:
        """The exact script of every job."""
        folder = str(self._folder.path) if self._folder else "<folder>"
        return self.options.script(
            self.queue,
            self.id,
            folder,
            self._own_scheduler.address,
            tls=self.security.require_encryption,
        )

    def jobs(self) -> JobTable:
        """The state of all jobs, including those that are over."""
        return JobTable(self.controller.state.jobs.values() if self.controller else ())

    def job_logs(
        self, *ids: str | int | Iterable[str | int], lines: int | None = None
    ) -> dict[str, str]:
        """The logs of jobs, by id, including those of jobs that are over.

        Parameters
        ----------
        *ids
            Ids of jobs, or lists of ids. Default: all jobs.
        lines
            How many of the last lines of each log. Default: all.
        """
        if self._folder is None:
            return {}
        known = [str(job.id) for job in self.jobs()]
        chosen = _chosen(ids, known) if ids else known
        return {job_id: "\n".join(self._folder.tail(job_id, lines)) for job_id in chosen}

    @property
    def failure(self) -> HpcdaskError | None:
        """Why the cluster submits no more jobs; None while all is well."""
        return self.controller.failure if self.controller else None

    def _say(self, line: str) -> None:
        self._log(line)
        print(f"hpcdask: {line}", file=sys.stderr, flush=True)

    @property
    def dashboard_link(self) -> str:
        """Where the dashboard is, seen from this machine."""
        return self._own_scheduler.dashboard_link() or str(super().dashboard_link)

    def __repr__(self) -> str:
        link = self.dashboard_link if self.status == Status.running else ""
        status = text(self.jobs(), self.failure, link, self._own_scheduler.tunnel())
        return f"{', '.join([super().__repr__().removesuffix(')'), *status])})"

    def _repr_html_(self, cluster_status: str | None = None) -> str:
        status = html(self.jobs(), self.failure, self._own_scheduler.tunnel())
        return str(super()._repr_html_(f"{cluster_status or ''}{status}"))


def _chosen(ids: Iterable[str | int | Iterable[str | int]], known: Collection[str]) -> list[str]:
    """Ids of jobs from ids and lists of them."""
    asked: list[str] = []
    for some in ids:
        asked += [str(some)] if isinstance(some, str | int) else map(str, some)
    if unknown := set(asked) - set(known):
        raise UsageError(
            f"job_logs: no job {', '.join(sorted(unknown))}. There are: {', '.join(known)}"
        )
    return asked


def _until_closed(level: int | str | bool, options: JobOptions) -> contextlib.ExitStack:
    """Leaves out distributed's messages below this level; on GPUs, has chunks suit them."""
    exits = contextlib.ExitStack()
    if level:
        exits.enter_context(silence_logging_cmgr(level=level))
    if options.gpus and options.spec.device != "cpu":
        exits.enter_context(suiting_devices())
    return exits


def _new_id(name: str) -> str:
    """No dot and no dash but the last: see the tags of Moab and of hpcdask submit."""
    return re.sub(r"[^A-Za-z0-9_]+", "_", f"{name}")[:40] + f"-{os.urandom(3).hex()}"


@atexit.register
def close_clusters() -> None:
    """Close what the program left open. What cannot be closed in time is left to the watchdog.

    So are commands of the queue: Python has shut its threads down by then. Before that, threads of
    the program may still wait for results.
    """
    for cluster in list(JobCluster._instances):
        if getattr(cluster, "status", Status.closed) != Status.closed:
            with contextlib.suppress(Exception):
                cluster.close(timeout=10)


def _leave_to_parent() -> None:
    """In a child that was forked: the clusters, and what their schedulers have on disk, stay."""
    for cluster in list(JobCluster._instances):
        cluster._own_scheduler.leave_to_parent()
    JobCluster._instances.clear()


os.register_at_fork(after_in_child=_leave_to_parent)
