"""A Dask cluster whose workers are jobs of a queueing system.

It inherits from `distributed.deploy.Cluster`, which brings adaptive scaling, the widget and the
link to the dashboard, and leaves the jobs to a `JobController`.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import inspect
import itertools
import os
import weakref
from collections.abc import Awaitable, Mapping
from datetime import timedelta
from typing import Any, ClassVar, Literal, Self, cast

from distributed import Scheduler, Security
from distributed.core import Status
from distributed.utils import silence_logging_cmgr
from tornado.ioloop import IOLoop

from hpcdask.client.defaults import suiting_devices
from hpcdask.comm.warmup import transport_of
from hpcdask.errors import HpcdaskError, UsageError
from hpcdask.gpu.table import GpuTable
from hpcdask.jobs import watchdog
from hpcdask.jobs.folder import ClusterFolder, prune
from hpcdask.jobs.state import OVER
from hpcdask.logs import say
from hpcdask.queues.base import Queue
from hpcdask.spec.keywords import Protocol
from hpcdask.spec.tags import group_id
from hpcdask.upstream import distributed as upstream

from .configuration import configured, import_job_class, section
from .controller import JobController
from .detachable import Detachable
from .display import JobTable, html, text
from .groups import OF_GROUPS, common_device, read_groups
from .job import Job
from .job_logs import JobLogs
from .keywords import USUAL_JOB, refuse_detached, seconds
from .scaling import wait_unless
from .scheduler import ClusterScheduler, read_scheduler_options

#: Seconds between two queries of the queue.
POLL_INTERVAL_S = 5.0


class JobCluster(JobLogs, Detachable):
    """Base of the clusters for the several queueing systems; see `SLURMCUDACluster`."""

    #: Name of the queue in `hpcdask.queues.registry`, and what the queue says of dask-jobqueue.
    queue_name: ClassVar[str]
    jobqueue: ClassVar[tuple[str, str]]
    _instances: ClassVar[weakref.WeakSet[JobCluster]] = weakref.WeakSet()
    _making: asyncio.Future[ClusterFolder] | None = None
    _watchdog: Any = None
    _ending: asyncio.Future[None] | None = None

    def __init__(
        self,
        n_workers: int = 0,
        *,
        groups: Mapping[str, Mapping[str, Any]] | None = None,
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
        detached: bool = False,
        scheduler_job: dict[str, Any] | None = USUAL_JOB,
        scheduler_timeout: str | float | timedelta | None = None,
        idle_timeout: str | float | timedelta | None = None,
        asynchronous: bool = False,
        loop: Any = None,
        **job_keywords: Any,
    ) -> None:
        given = {name: value for name, value in locals().items() if name in OF_GROUPS}
        job_cls = import_job_class(self.jobqueue)
        usual = job_cls.default_config_name()
        config_name = config_name or usual
        refuse_detached(detached, scheduler_job, scheduler_timeout, idle_timeout)
        if groups is not None:
            job_keywords |= common_device(groups)
        self.queue = self._make_queue(job_keywords)
        with section(config_name, usual):
            interface = configured("interface", {"interface": interface}, config_name)
            self.groups = read_groups(
                groups,
                {**job_keywords, **given, "interface": interface},
                job_cls,
                self.queue,
                config_name,
                own=set(inspect.signature(JobCluster).parameters) - {"job_keywords"},
            )
            self._poll_interval_s = seconds(poll_interval, "poll_interval") or POLL_INTERVAL_S
            self._read_folders(shared_temp_directory, job_keywords, config_name)
            where = {"local": self.queue.is_local, "on_node": self._goes_to_node}
            chosen = read_scheduler_options(scheduler_options, config_name, interface, **where)
        self._own_scheduler = ClusterScheduler(
            scheduler_cls, chosen, security, where["local"], self._say, self._port_range
        )
        if any(group.n_workers for group in self.groups.values()):
            self.queue.check()
        on_gpu = any(group.on_gpu for group in self.groups.values())
        self._exits = _until_closed(silence_logs, on_gpu)
        loop = IOLoop.current() if loop is None and asynchronous else loop
        super().__init__(asynchronous=asynchronous, loop=loop, quiet=True, name=name)
        self._instances.add(self)
        self._start_now()

    def _make_queue(self, job_keywords: dict[str, Any]) -> Queue:
        """The door to the queue; takes from the keywords what belongs to it."""
        from hpcdask.queues.registry import queue_class

        return queue_class(self.queue_name).of_cluster(job_keywords)

    def _start_now(self) -> None:
        """Start, unless the user's event loop does."""
        if self.called_from_running_loop:
            return
        upstream.loop_runner(self).start()
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
    def _port_range(self) -> str | None:
        """Return the range of ports of all parts, the scheduler too: the same for all groups."""
        return next(iter(self.groups.values())).options.spec.port_range

    @property
    def security(self) -> Security:
        """Return the credentials of workers and clients."""
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
        for name, group in self.groups.items():
            await asyncio.to_thread(folder.write_script, self.job_script(name), name)
            for directive in self.queue.replaced(group.options.job):
                self._say(
                    f"warning: the directive {directive!r} has no effect: hpcdask knows its jobs "
                    f"by a tag in its place"
                )
        self._watchdog = await asyncio.to_thread(watchdog.start_watchdog, folder)
        await asyncio.to_thread(prune, self._base)
        assert self.scheduler is not None
        groups = self.groups.values()
        self.controller = JobController(
            [group.new_state(self.scheduler, self.id, self._say) for group in groups],
            self.queue,
            folder,
            poll_interval_s=self._poll_interval_s,
            over=self._end_by_itself,
        )
        self.controller.start()
        self._tell_most_workers(self.controller)
        await super()._start()
        if wishes := {group.name: group.n_workers for group in groups if group.n_workers}:
            await self._scale(wishes)

    def _make_folders(self) -> ClusterFolder:
        folder = self._make_folder()
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
        if (adaptive := upstream.adaptive(self)) is not None:
            adaptive.stop()
        if self.controller is not None:
            self.controller.closing()
        await self._own_scheduler.close()
        if self.controller is not None:
            try:
                await self.controller.close()
            except HpcdaskError as error:
                problem = error
        if self._folder is not None:
            self._folder.remove_keys()
        await super()._close()
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
                upstream.loop_runner(self).stop()
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
        async def why_not() -> HpcdaskError | None:
            return self._too_few(n_workers)

        await wait_unless(super()._wait_for_workers(n_workers, timeout), why_not, self.jobs)

    # What it shows

    def job_script(self, group: str | None = None) -> str:
        """The exact script of every job, or of those of a group. Default: of the first one."""
        name = next(iter(self.groups)) if group is None else group
        if name not in self.groups:
            raise UsageError(f"job_script: no group {name}. There are {', '.join(self.groups)}")
        folder = str(self._folder.path) if self._folder else "<folder>"
        return self.groups[name].options.script(
            self.queue,
            group_id(self.id, name),
            folder,
            self._own_scheduler.address,
            tls=self.security.require_encryption,
        )

    @property
    def job_header(self) -> str:
        """The directives of the script of every job, or of the first group's."""
        return "\n".join(itertools.takewhile(bool, self.job_script().splitlines()[1:]))

    @property
    def job_name(self) -> str:
        """The jobs' name in the queue, or that of the first group's."""
        return next(iter(self.groups.values())).options.name

    @property
    def workers(self) -> dict[str, Job]:
        """The jobs that are not over, by id: an entry for each job, as in dask-jobqueue."""
        return {job.id: job for job in self.jobs() if job.state not in OVER}

    def jobs(self) -> JobTable:
        """The state of all jobs, including those that are over."""
        controller = self.controller
        return JobTable(controller.jobs(), controller.waits) if controller else JobTable()

    def gpus(self) -> GpuTable:
        """Return what the GPUs of all workers do now; empty while none was sampled."""
        return GpuTable.of(self.scheduler)

    @property
    def failure(self) -> HpcdaskError | None:
        """Why the cluster, or a group of it, submits no more jobs; None while all is well."""
        return self.controller.failure if self.controller else None

    def _say(self, line: str) -> None:
        upstream.log(self, line)
        say(line)

    @property
    def dashboard_link(self) -> str:
        """Where the dashboard is, seen from this machine."""
        return self._own_scheduler.dashboard_link() or str(super().dashboard_link)

    def __repr__(self) -> str:
        link = self.dashboard_link if self.status == Status.running else ""
        status = text(self.jobs(), self.failure, link, self._own_scheduler.tunnel())
        return f"{', '.join([super().__repr__().removesuffix(')'), *status])})"

    def _repr_html_(self, cluster_status: str | None = None) -> str:
        gpus = self.gpus()
        transport = transport_of(self.scheduler, on_device=bool(gpus))
        tunnel = self._own_scheduler.tunnel()
        status = html(self.jobs(), gpus, self.failure, tunnel, transport=transport)
        return str(super()._repr_html_(f"{cluster_status or ''}{status}"))


def _until_closed(level: int | str | bool, on_gpu: bool) -> contextlib.ExitStack:
    """Leaves out distributed's messages below this level; on GPUs, has chunks suit them."""
    exits = contextlib.ExitStack()
    if level:
        exits.enter_context(silence_logging_cmgr(level=level))
    if on_gpu:
        exits.enter_context(suiting_devices())
    return exits


# the keywords are those of __init__, though __new__ sees them first
_SIGNATURE = inspect.signature(JobCluster.__init__, eval_str=True)
JobCluster.__new__.__signature__ = _SIGNATURE  # type: ignore[attr-defined]


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
