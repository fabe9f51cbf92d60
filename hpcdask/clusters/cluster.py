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
import socket
import sys
import textwrap
import warnings
import weakref
from collections.abc import Awaitable, Iterable
from datetime import timedelta
from typing import Any, ClassVar

import dask.config
from distributed import Scheduler, Security, rpc
from distributed.comm import get_address_host
from distributed.core import Status
from distributed.utils import format_dashboard_link, silence_logging_cmgr
from tornado.ioloop import IOLoop

from hpcdask.errors import HpcdaskError, UsageError
from hpcdask.jobs import watchdog
from hpcdask.jobs.folder import ClusterFolder, prune
from hpcdask.node.scratch import scratch_folder
from hpcdask.process import owner_text
from hpcdask.queues.base import Queue
from hpcdask.security import listening, private, webserver
from hpcdask.security.credentials import (
    FILES,
    Credentials,
    create_credentials,
    save_credentials,
    to_security,
)
from hpcdask.security.tls import ClusterSecurity

from .configuration import import_jobqueue, log_directory, section
from .controller import JobController
from .display import JobTable, html
from .job import Job, Policy
from .keywords import check_interface, number, seconds
from .options import NO_ADDRESS, read_job_options
from .scaling import Scaling
from .state import ClusterState

#: Seconds between two queries of the queue.
POLL_INTERVAL_S = 5.0
LOOPBACK = "127.0.0.1"


class JobCluster(Scaling):
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
        n_workers = number(n_workers or 0, "n_workers", "workers")
        module, job_name = self.jobqueue
        job_cls = getattr(import_jobqueue(module), job_name)
        self._config_name = config_name or job_cls.default_config_name()
        for keyword in ("dashboard_address", "host"):
            if keyword in job_keywords:
                raise UsageError(
                    f'{keyword} belongs to the scheduler: scheduler_options={{"{keyword}": …}}'
                )
        self.queue = self._make_queue(job_keywords)
        with section(self._config_name, job_cls.default_config_name()):
            if interface is None:
                interface = dask.config.get(f"jobqueue.{self._config_name}.interface", None)
            self.options = read_job_options(
                job_cls,
                self.queue,
                self._config_name,
                gpus_per_job=gpus_per_job,
                gpu_type=gpu_type,
                nodes_per_job=nodes_per_job,
                protocol=protocol,
                given={**job_keywords, "interface": interface},
                own=[
                    name
                    for name in inspect.signature(JobCluster).parameters
                    if name != "job_keywords"
                ],
            )
            self._poll_interval_s = seconds(poll_interval, "poll_interval") or POLL_INTERVAL_S
            walltime = self.options.walltime
            self._policy = Policy(
                start_timeout_s=seconds(start_timeout, "start_timeout") or 300.0,
                walltime_s=None if walltime in (None, timedelta.max) else walltime.total_seconds(),
            )
            self._scheduler_cls = scheduler_cls
            self._scheduler_options = self._read_scheduler_options(scheduler_options, interface)
            self._base = shared_temp_directory or dask.config.get(
                f"jobqueue.{self._config_name}.shared-temp-directory", None
            )
            self._logs = log_directory(job_keywords, self._config_name)
        self._asked_security = security
        self._n_workers = n_workers
        if n_workers:
            self.queue.check()
        self._exits = contextlib.ExitStack()
        if silence_logs:
            self._exits.enter_context(silence_logging_cmgr(level=silence_logs))
        self.scheduler: Scheduler | None = None
        self.controller: JobController | None = None
        self._folder: ClusterFolder | None = None
        self._address = NO_ADDRESS
        self._watchdog: Any = None
        self._ending: asyncio.Future[None] | None = None
        self.security = Security()
        if loop is None and asynchronous:
            loop = IOLoop.current()
        super().__init__(asynchronous=asynchronous, loop=loop, quiet=True, name=name)
        # no dot and no dash but the last: see the tags of Moab and of hpcdask submit
        self.id = re.sub(r"[^A-Za-z0-9_]+", "_", f"{self.name}")[:40] + f"-{os.urandom(3).hex()}"
        self._instances.add(self)
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
            if self.queue_name == "local" and chosen["interface"] is None:
                chosen["host"] = LOOPBACK
            what = "interface" if chosen["interface"] == interface else "scheduler_options"
            check_interface(chosen["interface"], what)
        return {"dashboard_address": f"{LOOPBACK}:8787", **chosen}

    # Start and end

    async def _start(self) -> None:
        if self.status != Status.created:
            return
        self.status = Status.starting
        folder = self._folder = ClusterFolder.create(self.id, self.queue_name, base=self._base)
        if self._logs is not None:
            folder.logs_in(self._logs)
        credentials = self._credentials()
        shared = {name: text for name, text in credentials.items() if "scheduler" not in name}
        if shared:
            save_credentials(shared, str(folder.keys))
        await self._start_scheduler()
        folder.write_script(self.job_script())
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
            policy=self._policy,
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
        await super()._start()
        if self._n_workers:
            await self._scale(self._n_workers)

    def _credentials(self) -> Credentials:
        """What lets workers in; sets `security`. Keys of one's own are files or texts, as given."""
        asked = self._asked_security
        if asked is False:
            self._say("warning: security=False: any user who reaches a port of it runs code as you")
            return {}
        if isinstance(asked, Security):
            self.security = ClusterSecurity.of(asked) if type(asked) is Security else asked
            fields = FILES.values()
            given = {field: getattr(asked, field) for field in fields if getattr(asked, field)}
            return {field: _text(value) for field, value in given.items()}
        made = create_credentials()
        self.security = to_security(made)
        return made

    async def _start_scheduler(self) -> None:
        protocol = "tls" if self.security.require_encryption else "tcp"
        listening.prepare()

        def announce(path: str) -> None:
            self._exits.callback(private.remove, path, owner_text())

        # distributed's usual one, which it puts on sys.path, may be another user's
        scratch = scratch_folder(None, announce)
        # the default port of the dashboard may be taken
        with warnings.catch_warnings(), webserver.without_proxy():
            warnings.filterwarnings("ignore", message="Port .* is already in use")
            self.scheduler = self._scheduler_cls(
                **{
                    "protocol": protocol,
                    "security": self.security,
                    "port": 0,
                    "dashboard": False,
                    "local_directory": scratch,
                    **self._scheduler_options,
                }
            )
        webserver.guard(self.scheduler)
        webserver.add_lazy_dashboard(self.scheduler)
        await self.scheduler
        listening.guard(self.scheduler)
        self._address = self.scheduler.address
        host = get_address_host(self._address)
        if self.queue_name != "local" and host in ("127.0.0.1", "::1"):
            self._say(
                f"warning: the scheduler listens at {self._address}, which other nodes cannot "
                f'reach: name this machine\'s network with scheduler_options={{"interface": "…"}}'
            )
        access: Any = self.security.get_connection_args("client")
        self.scheduler_comm = rpc(self.scheduler.address, connection_args=access)

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
        if self._adaptive is not None:
            self._adaptive.stop()
        if self.scheduler is not None and self.controller is not None:
            self.controller.closing()
            await self.scheduler.close(reason="the cluster is closed")  # its workers end as well
            try:
                await self.controller.close()
            except HpcdaskError as error:
                problem = error
        elif self.scheduler is not None:
            await self.scheduler.close()
        await super()._close()
        if self._folder is not None:
            self._folder.remove_keys()
        if self._watchdog is not None and problem is None:
            self._watchdog.dismiss()
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

    async def __aenter__(self) -> JobCluster:
        return await self._ready()

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
        """The script that is submitted for each job, exactly."""
        folder = str(self._folder.path) if self._folder else "<folder>"
        return self.options.script(
            self.queue,
            self.id,
            folder,
            self._address,
            tls=self.security.require_encryption,
        )

    def jobs(self) -> JobTable:
        """What is known of each job, those that are over included."""
        found: list[Job] = list(self.controller.state.jobs.values()) if self.controller else []
        return JobTable(found)

    def job_logs(
        self, *ids: str | int | Iterable[str | int], lines: int | None = None
    ) -> dict[str, str]:
        """The logs of jobs, live or over.

        Parameters
        ----------
        *ids
            Of the jobs, or lists of them; by default all.
        lines
            At most so many of the last lines; None for all.
        """
        if self._folder is None:
            return {}
        known = [str(job.id) for job in self.jobs()]
        asked: list[str] = []
        for some in ids:
            asked += [str(some)] if isinstance(some, str | int) else map(str, some)
        if unknown := set(asked) - set(known):
            raise UsageError(
                f"job_logs: no job {', '.join(sorted(unknown))}. There are: {', '.join(known)}"
            )
        chosen = asked if ids else known
        return {job_id: "\n".join(self._folder.tail(job_id, lines)) for job_id in chosen}

    @property
    def failure(self) -> HpcdaskError | None:
        """Why nothing more is submitted; None while all is well."""
        return self.controller.failure if self.controller else None

    def _say(self, text: str) -> None:
        self._log(text)
        print(f"hpcdask: {text}", file=sys.stderr, flush=True)

    @property
    def dashboard_link(self) -> str:
        """Where the dashboard is, seen from this machine."""
        server: Any = self.scheduler.http_server if self.scheduler is not None else None
        if server is not None and server.address in (LOOPBACK, "::1"):
            return str(format_dashboard_link(server.address, server.port))
        return str(super().dashboard_link)

    def _tunnel(self) -> str:
        """The command that brings the dashboard to the user's machine; empty if none is needed."""
        server: Any = self.scheduler.http_server if self.scheduler is not None else None
        if self.queue_name == "local" or server is None or server.address != LOOPBACK:
            return ""
        return f"ssh -L {server.port}:{LOOPBACK}:{server.port} {socket.gethostname()}"

    def __repr__(self) -> str:
        text = super().__repr__()
        link = self.dashboard_link if self.status == Status.running else ""
        failed = textwrap.shorten(str(self.failure), 100, placeholder=" …") if self.failure else ""
        parts = [
            text.removesuffix(")"),
            self.jobs().counts(),
            f"dashboard {link}{self._tunnel() and f' ({self._tunnel()})'}" if link else "",
            f"failed: {failed}" if failed else "",
        ]
        return f"{', '.join(filter(None, parts))})"

    def _repr_html_(self, cluster_status: str | None = None) -> str:
        status = html(self.jobs(), self.failure, self._tunnel())
        return str(super()._repr_html_(f"{cluster_status or ''}{status}"))


def _text(value: str) -> str:
    """PEM text: given as such, or the path of a file."""
    if "\n" in value:
        return value
    with open(value) as file:
        return file.read()


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
        # distributed removes the folder at the end of any process that knows it
        folder = getattr(cluster.scheduler, "_workdir", None)
        if folder is not None:
            folder._finalizer.detach()
    JobCluster._instances.clear()


os.register_at_fork(after_in_child=_leave_to_parent)
