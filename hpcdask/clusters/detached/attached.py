"""A detached cluster as a notebook has it: the methods of a cluster, which ask its process."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Awaitable, Coroutine, Generator
from typing import Any, Self

import dask.config
from distributed import Security
from distributed.core import Status as State
from distributed.core import rpc
from distributed.deploy.cluster import Cluster
from distributed.objects import SchedulerInfo
from tornado.ioloop import IOLoop

from hpcdask.client.defaults import prompt_clients, suiting_devices
from hpcdask.clusters.cluster import JobCluster, wait_unless
from hpcdask.clusters.display import JobTable, age, html, text
from hpcdask.clusters.keywords import seconds
from hpcdask.errors import HpcdaskError, NoAnswer, UsageError, root_cause
from hpcdask.gpu.table import GpuTable
from hpcdask.jobs import detached
from hpcdask.jobs.detached import ENDED, ControlRecord
from hpcdask.jobs.folder import ClusterFolder
from hpcdask.logs import complain, say
from hpcdask.upstream import distributed as upstream

from .process import await_running, end, ended, security_of, start
from .protocol import ANSWER_S, Status, ask
from .request import Making, read_request

#: Seconds between two requests for a detached cluster's status.
LOOK_PAUSE_S = 1.0
#: The pause is so many times as long as a request takes, for clusters of many workers.
LOOK_SHARE = 20
#: Seconds that a scheduler's job has to start before an error says why it waits.
START_TIMEOUT_S = 600.0
#: Requests under way in event loops, which hold tasks weakly.
_requests: set[asyncio.Future[Any]] = set()


class Adapting:
    """Adaptive scaling of an attached cluster, which ``adapt`` returns.

    In an event loop ``adapt`` returns at once, as distributed's does, and the object can be
    awaited: JupyterLab's Dask extension does not wait, and reads the bounds.
    """

    def __init__(self, cluster: AttachedCluster, bounds: dict[str, Any]) -> None:
        self.minimum, self.maximum = bounds.get("minimum"), bounds.get("maximum")
        self._cluster = cluster
        self._request = cluster._request("adapt", bounds)

    async def _settled(self) -> Self:
        await self._request
        return self

    def __await__(self) -> Generator[Any, None, Self]:
        return self._settled().__await__()

    def stop(self) -> Any:
        """End adaptive scaling; the workers stay."""
        return self._cluster.stop_adapting()


class AttachedCluster(Cluster):
    """A detached cluster, which lives on without this object.

    It has the methods of a cluster of jobs. The cluster's own process carries them out, so all
    attached notebooks see the same. `close` only detaches; `shutdown` ends the cluster.
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
        # an object that attaches prints messages from now on only
        self._seen = Status(told=0 if making else 1 << 30)
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
        if self.status != State.created:
            return
        self.status = State.starting
        if self._folder is None:
            assert self._making is not None
            self._folder = await start(self._making)
        self.id = self._folder.name
        record = await await_running(self._folder, self._timeout_s)
        self.name = record.name
        self.security = await asyncio.to_thread(security_of, self._folder, record)
        access: Any = self.security.get_connection_args("client")
        self.scheduler_comm = rpc(record.address, connection_args=access)
        await self._ask("status")
        if record.gpus:
            self._exits.enter_context(suiting_devices())
        for callback in self.periodic_callbacks.values():
            callback.start()
        self.status = State.running
        self._follower = asyncio.create_task(self._follow())
        if record.idle_timeout_s is not None and self._making is None:
            say(
                f"attached to {record.name}. It ends after {age(record.idle_timeout_s)} h without "
                f"clients, attached notebooks and Dask tasks"
            )

    _ready: Any = JobCluster._ready
    __await__: Any = JobCluster.__await__
    __aenter__: Any = JobCluster.__aenter__

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
            if not self.asynchronous and self.status == State.closed:
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
        self.status = State.closing  # so that its clients do not try to come back
        await end(self._folder, "shutdown() by a notebook")
        await self._close()

    # Requests

    def _request(self, name: str, *args: Any, **keywords: Any) -> Any:
        """Send a request, and wait for the answer outside of event loops.

        In an event loop the request is sent also if nobody awaits the future that this returns; a
        line tells of its failure.
        """
        if not self.asynchronous:
            return self.sync(self._ask, name, *args, **keywords)

        def tell(task: asyncio.Future[Any]) -> None:
            _requests.discard(task)
            if not task.cancelled() and (error := task.exception()):
                complain(f"{name}: {error}")

        task = asyncio.ensure_future(self._ask(name, *args, **keywords))
        _requests.add(task)
        task.add_done_callback(tell)
        return task

    async def _ask(self, name: str, *args: Any, **keywords: Any) -> None:
        """Send a request, and keep the status that answers it. Prints the cluster's messages."""
        if self._failure is not None:
            raise self._failure
        if self.scheduler_comm is None or self.status not in (State.starting, State.running):
            raise UsageError(f'this object is detached: hpcdask.attach("{self.name}") again')
        try:
            async with asyncio.timeout(None if name == "scale" else ANSWER_S):
                seen = await self._unless_ended(
                    ask(self.scheduler_comm, name, self._seen.told, *args, **keywords)
                )
                # distributed's own way to follow the workers is for one object only
                info = await self.scheduler_comm.identity(n_workers=-1)
        except OSError as error:  # TimeoutError is one
            raise await self._why_lost(error) from None
        news = max(0, seen.told - self._seen.told)  # another answer may have told some of them
        for line in seen.lines[len(seen.lines) - min(news, len(seen.lines)) :]:
            say(line)
        self._seen, self.scheduler_info = seen, SchedulerInfo(info)

    async def _unless_ended(self, asking: Coroutine[Any, Any, Status]) -> Status:
        """Wait for an answer. Raises OSError soon if the cluster has ended.

        Dask tries for half a minute to connect to a scheduler that is gone.
        """
        assert self._folder is not None
        asked = asyncio.ensure_future(asking)
        try:
            while not (await asyncio.wait([asked], timeout=1.0))[0]:
                with contextlib.suppress(HpcdaskError):
                    record = await asyncio.to_thread(ControlRecord.read, self._folder)
                    if record is None or record.state == ENDED:
                        raise ConnectionError("it has ended")
            return await asked
        finally:
            asked.cancel()

    async def _follow(self) -> None:
        """Ask for the status again and again, and print the cluster's messages."""
        silent = False
        while self._failure is None:
            began, pause, problem = time.monotonic(), LOOK_PAUSE_S, ""
            try:
                await self._ask("status")
                pause = max(pause, LOOK_SHARE * (time.monotonic() - began))
            except NoAnswer as error:  # such as a network that is away for a while
                problem = f"{error}; trying again"
            except Exception as error:  # an answer that makes no sense must not be the last
                if error is not self._failure:
                    problem = f"{self.name} cannot be followed: {root_cause(error)}"
            if problem and not silent:
                say(f"warning: {problem}")
            silent = bool(problem)
            await asyncio.sleep(pause)

    async def _why_lost(self, error: OSError) -> HpcdaskError:
        """Return why the cluster does not answer, and end its jobs; NoAnswer: it may come back."""
        folder = self._folder
        assert folder is not None
        try:
            why = await detached.settle(folder)
        except Exception as problem:  # an answer of the queue may make no sense
            return NoAnswer(f"{folder.name} does not answer: {error}. {problem}")
        if not why:
            record = ControlRecord.read(folder)
            return NoAnswer(
                f"{folder.name} does not answer at {record.address if record else ''}, though it "
                f"is not over: see whether this machine reaches that address "
                f"({type(error).__name__}: {error}){detached.see_log(folder)}"
            )
        if self._failure is None:
            self._failure = ended(folder, why)
            if self.status == State.running:
                self.status = State.closing  # so that its clients do not try to come back
                say(f"error: {self._failure}")
        return self._failure

    @functools.wraps(JobCluster.scale)
    def scale(self, *args: Any, **keywords: Any) -> Any:  # type: ignore[override]
        return self._request("scale", *args, **keywords)

    def adapt(self, **bounds: Any) -> Any:  # type: ignore[override]
        """Make the number of workers follow the work; see `JobCluster.adapt`."""
        return Adapting(self, bounds)

    def stop_adapting(self) -> Any:
        """End adaptive scaling, which any attached notebook may have started."""
        return self._request("adapt", None)

    async def _wait_for_workers(self, n_workers: int = 0, timeout: Any = None) -> None:
        async def why_not() -> HpcdaskError | None:
            if self._failure is None and self._seen.failure is not None:  # others may do
                await self._ask("status", n_workers=n_workers)
                return self._seen.too_few
            return self._failure

        await wait_unless(super()._wait_for_workers(n_workers, timeout), why_not, self.jobs)

    def get_client(self) -> Any:
        """Return a client of the cluster."""
        with dask.config.set(prompt_clients()):
            return super().get_client()

    # What it shows

    #: These read the cluster's folder.
    job_logs: Any = JobCluster.job_logs
    logs: Any = JobCluster.logs

    @functools.wraps(JobCluster.job_script)
    def job_script(self, group: str | None = None) -> str:
        groups = self._seen.groups
        name = groups[0] if group is None else group
        if name not in groups:
            raise UsageError(f"job_script: no group {name}. There are {', '.join(groups)}")
        assert self._folder is not None
        return self._folder.script(name).read_text()

    def jobs(self) -> JobTable:
        """Return the state of all jobs, including those that are over."""
        return self._seen.table()

    def gpus(self) -> GpuTable:
        """Return what the GPUs of all workers do now; empty while none was sampled."""
        return self._seen.gpu_table()

    @property
    def failure(self) -> HpcdaskError | None:
        """Return why the cluster has ended or submits no more jobs; None while all is well."""
        return self._failure or self._seen.failure

    @property
    def adapts(self) -> bool:
        """Return whether the number of workers follows the work."""
        return self._seen.adapts

    @property
    def plan(self) -> set[str]:
        """Return the names of the workers that are wanted."""
        return set(self._seen.requested)

    #: Names of the workers that are asked for.
    requested = plan

    @property
    def dashboard_link(self) -> str:
        """Return the address of the dashboard, seen from the scheduler's machine."""
        return self._seen.dashboard

    def __repr__(self) -> str:
        status = text(self.jobs(), self.failure, self._seen.dashboard, self._seen.tunnel)
        return f"{', '.join([super().__repr__().removesuffix(')'), *status])})"

    def _repr_html_(self, cluster_status: str | None = None) -> str:
        status = html(self.jobs(), self.gpus(), self.failure, self._seen.tunnel)
        return str(super()._repr_html_(f"{cluster_status or ''}{status}"))


def make(cls: type[JobCluster], keywords: dict[str, Any]) -> AttachedCluster:
    """Make a detached cluster of this class, and attach to it."""
    asynchronous, loop = keywords.get("asynchronous", False), keywords.get("loop")
    timeout = seconds(keywords.pop("scheduler_timeout", None), "scheduler_timeout")
    making = read_request(cls, dict(keywords))
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
    UsageError, ClusterError, QueueError
        You have no detached cluster of this name, or it has ended, or its scheduler still waits in
        the queue; it does not answer.
    """
    found = detached.find(name, folder)
    if found.ended is not None:
        record = ControlRecord.read(found)
        raise ended(found, record.why if record else "")
    return AttachedCluster(found, timeout=timeout, asynchronous=asynchronous, loop=loop)
