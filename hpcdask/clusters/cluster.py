"""A Dask cluster whose workers are jobs of a queueing system, kept by a `Controller`."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import itertools
import math
import os
import weakref
from collections.abc import Mapping
from subprocess import Popen
from typing import Any, ClassVar, Self, cast

from distributed import Security, rpc
from distributed.core import Status
from distributed.deploy.adaptive import Adaptive
from distributed.utils import silence_logging_cmgr

from hpcdask.bootstrap.environment import open_folder_warning
from hpcdask.client.defaults import suiting_devices
from hpcdask.client.gang_scheduler import MOST_WORKERS
from hpcdask.errors import HpcdaskError, UsageError
from hpcdask.gpu.monitor import monitor_of, usage_lines
from hpcdask.jobs import watchdog
from hpcdask.jobs.folder import ClusterFolder, new_name, prune
from hpcdask.logs import say
from hpcdask.node.scratch import scratch_folder
from hpcdask.process import make_observable, owner_text
from hpcdask.queues.job_state import OVER
from hpcdask.security import private
from hpcdask.security.nearby import NearbySecurity
from hpcdask.spec.keywords import describe, spell_out
from hpcdask.spec.names import group_id
from hpcdask.spec.parsing import Time, parse_seconds
from hpcdask.upstream import distributed as upstream

from . import scaling
from .base import BaseCluster
from .controller import SHUT_DOWN, Controller, Group
from .display import JobTable
from .job import Job
from .keywords import ClusterKeywords, keywords_of_class
from .options import NO_ADDRESS, ClusterOptions
from .scheduler import locate, make_security, start_scheduler

_PARAMETERS = """

    Every keyword of dask-jobqueue's class keeps its name and meaning, and its configuration
    (``jobqueue.{config}``) is read, so that changing the import is enough; it may hold hpcdask's
    keywords too. The fields of `hpcdask.spec.specs.WorkerSpec` are keywords as well. None is for a
    value that nobody gave.

    Parameters
    ----------
    **keywords
        Those of the cluster, of its jobs and of its workers.

    Raises
    ------
    UsageError
        A keyword is unknown or its value is not understood; nothing was started.
    Refused, QueueError
        From `scale`: the queue does not take the jobs, or does not answer.
    JobsFailed
        From `wait_for_workers` and Dask tasks: jobs keep ending before their workers connect.
"""


class JobCluster(BaseCluster):
    """Base of the clusters for the several queueing systems; see `SLURMCUDACluster`.

    `queue_name` is the queue's name in `hpcdask.queues.registry`, `keywords` the dict of those that
    the class takes. `scheduler` and `controller` are None before the start. `security` is what
    workers and clients prove themselves with. `id` is the cluster's name in the queue and on disk.
    """

    queue_name: ClassVar[str]
    keywords: ClassVar[type] = ClusterKeywords
    _instances: ClassVar[weakref.WeakSet[JobCluster]] = weakref.WeakSet()

    def __init_subclass__(cls, queue_name: str = "", keywords: type | None = None) -> None:
        if keywords is not None:  # else a user's own class
            cls.queue_name, cls.keywords = queue_name, keywords
            known = keywords_of_class(keywords)
            doc = (cls.__doc__ or "").rstrip() + _PARAMETERS.format(config=queue_name)
            cls.__doc__ = describe(doc, known)
            init: Any = cls.__init__
            init.__signature__ = spell_out(init, known)

    def __new__(cls, *args: Any, **keywords: Any) -> Self:
        """Make a cluster of this process, or what is attached to a detached one."""
        if not keywords.pop("detached", False):
            return super().__new__(cls)
        from .detached.attached import make

        if args:
            keywords["n_workers"] = args[0]
        return cast(Self, make(cls, keywords))  # it has the same methods

    def __init__(self, n_workers: int = 0, **keywords: Any) -> None:
        for name in ("detached", "scheduler_job", "scheduler_timeout", "idle_timeout"):
            if keywords.pop(name, None):
                raise UsageError(f"{name} is for clusters with detached=True, of hpcdask's classes")
        asynchronous, loop = keywords.pop("asynchronous", False), keywords.pop("loop", None)
        self.options = ClusterOptions.read(type(self), {"n_workers": n_workers, **keywords})
        self.queue, self.groups = self.options.queue, self.options.groups
        self.security: Security = NearbySecurity()
        self.controller: Controller | None = None
        self._scratch = ""
        self._watchdog: Popen[bytes] | None = None
        self._ending: asyncio.Future[None] | None = None
        if any(group.n_workers for group in self.groups.values()):
            self.queue.check()
        super().__init__(asynchronous=asynchronous, loop=loop, name=self.options.name)
        self.id = new_name(self.name)
        if self.options.silence_logs:
            self._exits.enter_context(silence_logging_cmgr(level=self.options.silence_logs))
        if any(group.on_gpu for group in self.groups.values()):
            self._exits.enter_context(suiting_devices())
        self._instances.add(self)
        self._begin()

    # Start and end

    def take_folder(self, folder: ClusterFolder) -> None:
        """Take a folder that was made for the cluster, and its name."""
        self._folder, self.id = folder, folder.name

    async def _start(self) -> None:
        if self.status != Status.created:
            return
        self.status = Status.starting
        with contextlib.suppress(OSError):  # the folder is gone
            if warning := open_folder_warning():
                self._say(warning)
        folder = await asyncio.to_thread(self._make_folders)  # file systems may be slow
        loop = asyncio.get_running_loop()
        watching = loop.run_in_executor(None, watchdog.start_watchdog, folder)
        try:
            scheduler = await start_scheduler(self.options, self.security, self._scratch)
            self.scheduler = scheduler
        finally:
            self._watchdog = await watching
        is_local = self.queue.is_local
        self.dashboard_link, self.tunnel = locate(scheduler, is_local=is_local, say=self._say)
        access: Any = self.security.get_connection_args("client")
        self.scheduler_comm = rpc(scheduler.address, connection_args=access)
        over = functools.partial(self._request, "close", self._close)
        every_s = self.options.poll_interval_s
        self.controller = Controller(scheduler, self.queue, folder, every_s, self._say, over)
        for name, group in self.groups.items():
            await asyncio.to_thread(folder.write_script, self.job_script(name), name)
            resources = group.spec.all_resources(on_gpu=group.on_gpu)
            made = Group(self.controller, name, group.workers, group.policy, resources)
            self.controller.groups[name] = made
            for directive in filter(self.queue.overruled.search, group.job.job_extra_directives):
                self._say(
                    f"warning: the directive {directive!r} has no effect: hpcdask knows its jobs "
                    f"by a tag in its place"
                )
        self.controller.start()
        self.controller.spawn(asyncio.to_thread(prune, self.options.base))
        scheduler.extensions[MOST_WORKERS] = self.most_workers
        await super()._start()
        if wishes := {name: one.n_workers for name, one in self.groups.items() if one.n_workers}:
            await self._scale(wishes)

    def _make_folders(self) -> ClusterFolder:
        if self._folder is None:
            base = self.options.base
            self._folder = ClusterFolder.create(self.id, self.queue_name, base=base)
        if self.options.logs is not None:
            self._folder.logs_in(self.options.logs)
        keys = str(self._folder.keys)
        self.security = make_security(self.options.security, keys, self._say)
        # distributed's usual folder, which is on sys.path as well, may be another user's
        self._scratch = scratch_folder(None, lambda path: None)
        make_observable()
        return self._folder

    async def _close(self) -> None:
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._end())
        await asyncio.shield(self._ending)  # who waits may give up, and close again

    async def _end(self) -> None:
        self.status = Status.closing
        if self.controller is not None:
            self.controller.expect_end()
        if (scheduler := self.scheduler) is not None and scheduler.status != Status.closed:
            await monitor_of(scheduler).refresh()
            for line in usage_lines(scheduler):
                self._say(line)
            await scheduler.close(reason="the cluster is closed")
        if self._scratch:
            private.remove(self._scratch, owner_text())
        try:
            if self.controller is not None:
                await self.controller.close()
        except Exception:
            self._ending = None  # jobs are left: another close() tries again
            raise
        finally:
            if self._folder is not None:
                self._folder.remove_keys()
        await super()._close()
        if self._folder is not None:
            self._folder.mark_ended()
        if self._watchdog is not None:
            watchdog.dismiss(self._watchdog)
        self._exits.close()

    # The number of workers

    def scale(
        self,
        n: int | None = None,
        jobs: int = 0,
        memory: str | int | None = None,
        cores: int | None = None,
        **groups: int,
    ) -> Any:
        """Ask for a number of workers, and wait until the queue has their jobs.

        The number is rounded up to whole jobs. If you give several parameters, the one that results
        in the most workers counts. In an event loop the call returns at once; await what it returns
        to wait for the queue.

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
        **groups
            In a cluster with groups, the workers of each, as in ``scale(gpu=8, cpu=32)``, in place
            of the other parameters. Groups that are not named stay as they are.

        Raises
        ------
        UsageError
            There is no such group, or no such queueing system on this machine.
        Refused, QueueError
            The queue does not take the jobs, or does not answer. A limit of the site is only a
            warning: the cluster tries again later.
        """
        self._running()  # of a closed cluster there is no event loop
        given = {"n": n, "jobs": jobs, "memory": memory, "cores": cores}
        wishes = scaling.wishes(self.scale, self.groups, given, groups)
        if any(wishes.values()):
            self.queue.check()
        return self._request("scale", self._scale, wishes)

    async def _scale(self, wishes: Mapping[str, int]) -> None:
        controller = self._running()
        await asyncio.gather(*(controller.groups[name].scale(n) for name, n in wishes.items()))

    def _running(self) -> Controller:
        if self.controller is None or self.status not in (Status.starting, Status.running):
            shut_down = str(self.failure) == SHUT_DOWN
            raise UsageError(SHUT_DOWN if shut_down else "this cluster is closed: make a new one")
        return self.controller

    @property
    def _groups(self) -> dict[str, Group]:
        """Return the groups and their jobs; none before the start."""
        return self.controller.groups if self.controller else {}

    @property
    def adapts(self) -> bool:
        """Return whether the number of workers follows the work."""
        return getattr(upstream.adaptive(self), "periodic_callback", None) is not None

    def limits(self) -> dict[str, float]:
        """Return how many workers each group may come to have without further ado."""
        limits: dict[str, float] = {name: len(one.names()) for name, one in self._groups.items()}
        if self.adapts:
            limits |= {name: most for name, (_, most) in upstream.adaptive(self).bounds.items()}
        return limits

    def most_workers(self) -> float:
        limits = self.limits()
        return sum(
            limits[name] if one.failure is None else sum(map(len, one.connected().values()))
            for name, one in self._groups.items()
        )

    def adapt(  # type: ignore[override]
        self,
        *,
        minimum: int | None = 0,
        maximum: int | float | None = math.inf,
        minimum_jobs: int | None = None,
        maximum_jobs: int | None = None,
        minimum_memory: str | int | None = None,
        maximum_memory: str | int | None = None,
        minimum_cores: int | None = None,
        maximum_cores: int | None = None,
        interval: Time | None = None,
        wait_count: int | None = None,
        target_duration: Time | None = None,
        **groups: tuple[int, float | None],
    ) -> Adaptive:
        """Make the number of workers follow the work.

        Minimums are rounded up to whole jobs, maximums down. The strictest bound counts.

        Parameters
        ----------
        minimum, maximum
            Bounds in workers. Default: 0, and no maximum.
        minimum_jobs, maximum_jobs
            Bounds in jobs.
        minimum_memory, maximum_memory, minimum_cores, maximum_cores
            Bounds in host memory and in threads of all workers together.
        interval, wait_count
            Time between two looks (default 1 s), and looks in a row at which a worker is idle
            before it leaves (default 3): their product is the time that idle workers stay.
        target_duration
            Time in which the waiting Dask tasks should be done. Default: 5 s.
        **groups
            In a cluster with groups, the least and most workers of each, as in
            ``adapt(gpu=(0, 16), cpu=(0, 64))``, in place of the other bounds. Groups that are not
            named stay as they are.

        Returns
        -------
        distributed.deploy.adaptive.Adaptive
            Its ``stop()`` ends adaptive scaling, and the workers stay. `scale` does not end it: the
            next look overrules the number.

        Raises
        ------
        UsageError
            A keyword is unknown, a value is not understood, `minimum` is above `maximum`,
            `maximum` is less than one job, or this machine has no such queueing system.
        """
        given = {name: one for name, one in locals().items() if name[:3] in ("min", "max")}
        bounds = scaling.bounds(self.adapt, self.groups, given, groups)
        times: dict[str, Any] = {
            # an interval of 0 is for who adapts by hand
            "interval": interval and parse_seconds(interval, "adapt: interval"),
            "target_duration": parse_seconds(target_duration, "adapt: target_duration"),
            "wait_count": wait_count,
        }
        controller = self._running()
        self.queue.check()
        for name in bounds:
            controller.groups[name].reset_failures()
        return super().adapt(scaling.JobAdaptive, bounds=bounds, **times)

    @property
    def plan(self) -> set[str]:
        """Return the names of the workers that are wanted."""
        return {name for group in self._groups.values() for name in group.names()}

    # What it shows

    def job_script(self, group: str | None = None) -> str:
        """Return the exact script of every job, or of a group's. Default: the first one's."""
        name = next(iter(self.groups)) if group is None else group
        if name not in self.groups:
            raise UsageError(f"job_script: no group {name}. There are {', '.join(self.groups)}")
        folder = str(self._folder.path) if self._folder else "<folder>"
        address = self.scheduler.address if self.scheduler else NO_ADDRESS
        group_name, tls = group_id(self.id, name), self.security.require_encryption
        return self.groups[name].script(self.queue, group_name, folder, address, tls=tls)

    @property
    def job_header(self) -> str:
        """Return the directives of the script of every job, or of the first group's."""
        return "\n".join(itertools.takewhile(bool, self.job_script().splitlines()[1:]))

    @property
    def job_name(self) -> str:
        """Return the jobs' name in the queue, or that of the first group's."""
        return next(iter(self.groups.values())).asked.name

    @property
    def workers(self) -> dict[str, Job]:
        """Return the jobs that are not over, by id, as dask-jobqueue does."""
        return {job.id: job for job in self.jobs() if job.state not in OVER}

    def jobs(self) -> JobTable:
        controller = self.controller
        return JobTable(controller.jobs(), controller.waits) if controller else JobTable()

    @property
    def failure(self) -> HpcdaskError | None:
        return self.controller.failure if self.controller else None

    def _say(self, line: str) -> None:
        upstream.log(self, line)
        say(line)


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


os.register_at_fork(after_in_child=JobCluster._instances.clear)  # they are the parent's
