"""A detached cluster as a notebook has it: the methods of a cluster, which ask its process."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Awaitable, Callable
from typing import Any, Self, cast

from distributed import Security
from distributed.core import Status, rpc
from distributed.deploy.cluster import Cluster
from distributed.objects import SchedulerInfo
from tornado.ioloop import IOLoop

from hpcdask.client.defaults import prompt_clients, suiting_devices
from hpcdask.clusters.cluster import JobCluster
from hpcdask.clusters.display import JobTable, age, html, text
from hpcdask.clusters.keywords import seconds
from hpcdask.clusters.scaling import wait_unless
from hpcdask.errors import HpcdaskError, NoAnswer, UsageError
from hpcdask.gpu.table import GpuTable
from hpcdask.jobs import detached
from hpcdask.jobs.detached import ControlRecord
from hpcdask.jobs.folder import ClusterFolder
from hpcdask.logs import say
from hpcdask.security.credentials import load_credentials, to_security
from hpcdask.upstream import distributed as upstream

from .adapting import Adapting
from .process import (
    QUEUE_PAUSE_S,
    RECORD_PAUSE_S,
    await_running,
    end,
    ended,
    launch,
    make_folder,
    unless_ended,
)
from .request import Making, read_request
from .service import LOOK_TIMEOUT_S, Look, call

#: Seconds between two looks at a detached cluster.
LOOK_PAUSE_S = 1.0
#: So many times as long as a look takes is the pause after it, for clusters of many workers.
LOOK_SHARE = 20
#: Seconds that a scheduler's job has to start before one no longer waits for it.
START_TIMEOUT_S = 600.0

_NOTHING = Look((), None, [], 0, set(), {"workers": {}}, "", "")


def _asked(name: str, shown: Callable[[Any], Any] = lambda answer: answer) -> Any:
    """A method of `JobCluster` that the cluster's process carries out."""

    async def ask(self: AttachedCluster, *args: Any, **keywords: Any) -> Any:
        return shown(await self._ask(name, *args, **keywords))

    @functools.wraps(getattr(JobCluster, name))
    def method(self: AttachedCluster, *args: Any, **keywords: Any) -> Any:
        return self.sync(ask, self, *args, **keywords)

    return method


class AttachedCluster(Cluster):
    """A detached cluster, which lives on without this object.

    It has the methods of a cluster of jobs. What they do is done by the cluster's own process, so
    all that are attached see the same. `close` only detaches; `shutdown` ends the cluster.
    """

    def __init__(
        self,
        folder: ClusterFolder | None,
        making: Making | None = None,
        *,
        timeout: float = START_TIMEOUT_S,
        asynchronous: bool = False,
        loop: Any = None,
    ) -> None:
        self._making = making
        self._folder = folder
        self._timeout_s = timeout
        self._seen = _NOTHING
        self._failure: HpcdaskError | None = None
        self._follower: asyncio.Task[None] | None = None
        self._exits = contextlib.ExitStack()
        self.security = Security()
        loop = IOLoop.current() if loop is None and asynchronous else loop
        name = making.request.name if making else None
        super().__init__(asynchronous=asynchronous, loop=loop, quiet=True, name=name)
        if not self.called_from_running_loop:
            upstream.loop_runner(self).start()
            try:
                self.sync(self._start)
            except BaseException:
                self.close()
                raise

    # Start and end

    async def _start(self) -> None:
        if self.status != Status.created:
            return
        self.status = Status.starting
        if self._folder is None:
            assert self._making is not None
            self._folder = await asyncio.to_thread(make_folder, self._making)
            self.id = self._folder.name
            await launch(self._making, self._folder)
        self.id = self._folder.name
        record = await await_running(self._folder, self._timeout_s)
        if record.tls:
            keys = await asyncio.to_thread(load_credentials, str(self._folder.keys))
            self.security = to_security(keys)
        access: Any = self.security.get_connection_args("client")
        self.scheduler_comm = rpc(record.address, connection_args=access)
        try:
            async with asyncio.timeout(LOOK_TIMEOUT_S):
                told = 0 if self._making else 1 << 30  # only what it tells from now on
                await self._look(told)
        except OSError as error:  # TimeoutError is one
            raise await self._why_lost(error) from None
        if record.gpus:
            self._exits.enter_context(suiting_devices())
        self.name = record.name
        for callback in self.periodic_callbacks.values():
            callback.start()
        self.status = Status.running
        self._follower = asyncio.create_task(self._follow())
        if record.idle_timeout_s is not None and self._making is None:
            say(
                f"attached to {record.name}. It ends after {age(record.idle_timeout_s)} h without "
                f"clients, attached notebooks and Dask tasks"
            )

    async def _ready(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self._close()
            raise
        return self

    def __await__(self) -> Any:
        return self._ready().__await__()

    async def __aenter__(self) -> Self:
        return await self._ready()

    async def _close(self) -> None:
        if self._follower is not None:
            self._follower.cancel()
            await asyncio.wait([self._follower])
        await super()._close()
        self._exits.close()

    def close(self, timeout: float | None = None) -> Awaitable[None] | None:
        """Detach: the cluster and its jobs go on. To end them: `shutdown`."""
        try:
            result: Awaitable[None] | None = super().close(timeout)
        finally:
            if not self.asynchronous and self.status == Status.closed:
                upstream.loop_runner(self).stop()
        return result

    def shutdown(self) -> Any:
        """End the cluster, its scheduler and all its jobs, for everybody.

        Raises
        ------
        ClusterError, QueueError
            It does not end, or jobs are still in the queue; the message says which.
        """
        result = self.sync(self._shutdown)
        if not self.asynchronous:
            self.close()
        return result

    async def _shutdown(self) -> None:
        assert self._folder is not None
        if self._follower is not None:
            self._follower.cancel()
        self.status = Status.closing  # so that its clients do not try to come back
        await end(self._folder, "shutdown() by a notebook")
        await self._close()

    # What it asks

    async def _ask(self, name: str, *args: Any, **keywords: Any) -> Any:
        if self._failure is not None:
            raise self._failure
        assert self._folder is not None
        if self.scheduler_comm is None or self.status != Status.running:
            raise UsageError(f'this object is detached: hpcdask.attach("{self.name}") again')
        try:
            asking = call(self.scheduler_comm, name, *args, **keywords)
            return await unless_ended(asking, self._folder)
        except OSError as error:
            raise await self._why_lost(error) from None

    async def _look(self, told: int) -> None:
        assert self.scheduler_comm is not None
        self._seen = await call(self.scheduler_comm, "look", told=told)
        # distributed's own way to follow the workers is for one object only
        self.scheduler_info = SchedulerInfo(self._seen.identity)

    async def _follow(self) -> None:
        """Look at the cluster again and again, and tell what it tells."""
        silent = False
        assert self._folder is not None
        while self._failure is None:
            began, pause = time.monotonic(), LOOK_PAUSE_S
            try:
                async with asyncio.timeout(LOOK_TIMEOUT_S):
                    await unless_ended(self._look(self._seen.told), self._folder)
                silent = False
                pause = max(pause, LOOK_SHARE * (time.monotonic() - began))
            except OSError as error:
                lost = await self._why_lost(error)
                if isinstance(lost, NoAnswer):  # such as a network that is away for a while
                    if not silent:
                        say(f"warning: {lost}; trying again")
                    silent = True
                else:
                    self._failure = lost
                    self.status = Status.closing  # so that its clients do not try to come back
                    say(f"error: {lost}")
            for line in self._seen.lines:
                say(line)
            self._seen.lines = []
            await asyncio.sleep(pause)

    async def _why_lost(self, error: OSError) -> HpcdaskError:
        """Why it does not answer; jobs that it left are ended. NoAnswer: it may come back."""
        folder = self._folder
        assert folder is not None
        deadline = time.monotonic() + QUEUE_PAUSE_S
        try:
            why = await detached.settle(folder)
            while not why and time.monotonic() < deadline:
                await asyncio.sleep(RECORD_PAUSE_S)  # its end may take a moment to be told
                why = await detached.settle(folder)
        except HpcdaskError as problem:
            return NoAnswer(f"{folder.name} does not answer: {error}. {problem}")
        if why:
            return ended(folder, why)
        record = ControlRecord.read(folder)
        return NoAnswer(
            f"{folder.name} does not answer at {record.address if record else ''}, though it is "
            f"not over: see whether this machine reaches that address. Log: "
            f"{detached.control_log(folder)} ({type(error).__name__}: {error})"
        )

    scale = _asked("scale")
    job_script = _asked("job_script")
    job_logs = _asked("job_logs")
    logs = _asked("logs")
    gpus = _asked("gpus", GpuTable)

    def adapt(self, **bounds: Any) -> Any:  # type: ignore[override]
        """Make the number of workers follow the work; see `JobCluster.adapt`."""

        adapting = Adapting(self, bounds)
        return adapting if self.asynchronous else self.sync(adapting.settle)

    def jobs(self) -> Any:
        """The state of all jobs, including those that are over."""

        async def jobs() -> JobTable:
            with contextlib.suppress(HpcdaskError):  # what was seen last
                self._seen.jobs = await self._ask("jobs")
            return self._seen.table()

        return self.sync(jobs)

    async def _wait_for_workers(self, n_workers: int = 0, timeout: Any = None) -> None:
        async def why_not() -> HpcdaskError | None:
            if (
                self._failure is None and self._seen.failure is not None
            ):  # of a group, others may do
                return cast(HpcdaskError | None, await self._ask("too_few", n_workers=n_workers))
            return self._failure

        waiting = super()._wait_for_workers(n_workers, timeout)
        await wait_unless(waiting, why_not, lambda: self._seen.table())

    def get_client(self) -> Any:
        """A client of the cluster."""
        import dask.config

        with dask.config.set(prompt_clients()):
            return super().get_client()

    # What it shows

    @property
    def failure(self) -> HpcdaskError | None:
        """Why the cluster has ended, or submits no more jobs; None while all is well."""
        return self._failure or self._seen.failure

    @property
    def plan(self) -> set[str]:
        """Names of the workers that are wanted."""
        return self._seen.requested

    #: Names of the workers that are asked for.
    requested = plan

    @property
    def dashboard_link(self) -> str:
        """Where the dashboard is, seen from the scheduler's machine."""
        return self._seen.dashboard

    def __repr__(self) -> str:
        seen = self._seen
        status = text(seen.table(), self.failure, seen.dashboard, seen.tunnel)
        return f"{', '.join([super().__repr__().removesuffix(')'), *status])})"

    def _repr_html_(self, cluster_status: str | None = None) -> str:
        seen = self._seen
        status = html(seen.table(), GpuTable(), self.failure, seen.tunnel)
        return str(super()._repr_html_(f"{cluster_status or ''}{status}"))


def make(cls: type[JobCluster], keywords: dict[str, Any]) -> AttachedCluster:
    """Make a detached cluster of this class, and attach to it."""
    asynchronous, loop = keywords.get("asynchronous", False), keywords.get("loop")
    timeout = seconds(keywords.pop("scheduler_timeout", None), "scheduler_timeout")
    making = read_request(cls, dict(keywords))
    detached.refuse_taken(making.request.name, making.base)
    return AttachedCluster(
        None, making, timeout=timeout or START_TIMEOUT_S, asynchronous=asynchronous, loop=loop
    )


def attach(
    name: str,
    *,
    folder: str | None = None,
    timeout: float = START_TIMEOUT_S,
    asynchronous: bool = False,
    loop: Any = None,
) -> AttachedCluster:
    """Attach to a detached cluster, which this or another notebook of yours has made.

    Parameters
    ----------
    name
        Its name, or its id where several have the name.
    folder
        Folder with the clusters' folders. Default: ``~/.hpcdask``, which knows those elsewhere.
    timeout
        Seconds to wait for a scheduler's job that is still in the queue.
    asynchronous
        Use it with ``async with``.
    loop
        Event loop. Default: a new one in a thread.

    Returns
    -------
    AttachedCluster
        It has the methods of a cluster of jobs; its ``close`` only detaches.

    Raises
    ------
    UsageError
        You have no detached cluster of this name.
    ClusterError
        It has ended, and the message says why; or its scheduler still waits in the queue.
    QueueError
        It does not answer.
    """
    found = detached.find(name, folder)
    if found.ended is not None:
        record = ControlRecord.read(found)
        raise ended(found, record.why if record else "")
    return AttachedCluster(found, timeout=timeout, asynchronous=asynchronous, loop=loop)
