"""A detached cluster as a notebook has it: the methods of a cluster, which ask its process."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

from distributed import Security
from distributed.core import Status as State
from distributed.core import rpc
from distributed.objects import SchedulerInfo

from hpcdask.client.defaults import suiting_devices
from hpcdask.clusters.base import BaseCluster
from hpcdask.clusters.classes import class_of
from hpcdask.clusters.cluster import JobCluster
from hpcdask.clusters.display import JobTable
from hpcdask.errors import ClusterError, HpcdaskError, NoAnswer, UsageError, root_cause
from hpcdask.gpu.monitor import GpuTable
from hpcdask.jobs import detached
from hpcdask.jobs.folder import ClusterFolder
from hpcdask.logs import say
from hpcdask.queues.registry import systems
from hpcdask.security.credentials import load_credentials, to_security
from hpcdask.spec.parsing import parse_seconds

from .process import Start, await_running, end, ended, prepare
from .protocol import Status, ask, to_error

#: Seconds between two requests for a detached cluster's status, to connect to it, and for an answer
#: that takes no time.
LOOK_PAUSE_S, CONNECT_S, ANSWER_S = 1.0, 10.0, 30.0
#: The pause is so many times as long as a request takes, for clusters of many workers.
LOOK_SHARE = 20
#: Seconds that a scheduler's job has to start before an error says why it waits.
START_TIMEOUT_S = 600.0


class AttachedCluster(BaseCluster):
    """A detached cluster, which lives on without this object.

    It has the methods of a cluster of jobs. The cluster's own process carries them out, so all
    attached notebooks see the same. `close` only detaches; `shutdown` ends the cluster. `adapts`
    tells whether the number of workers follows the work.
    """

    adapts = False

    def __init__(
        self,
        folder: ClusterFolder,
        start: Start | None = None,
        *,
        timeout: float = START_TIMEOUT_S,
        asynchronous: bool = False,
        loop: Any = None,
    ) -> None:
        self._folder: ClusterFolder = folder
        self._start_process = start
        self._timeout_s = timeout
        # an object that attaches prints messages from now on only
        self._seen = Status(told=0 if start else 1 << 30)
        self._failure: HpcdaskError | None = None
        self._follower: asyncio.Task[None] | None = None
        self.security = Security()
        super().__init__(asynchronous=asynchronous, loop=loop, name=folder.name)
        self._begin()

    # Start and end

    async def _start(self) -> None:
        if self.status != State.created:
            return
        self.status = State.starting
        if self._start_process is not None:
            await self._start_process()
        self.id = self._folder.name
        record = await await_running(self._folder, self._timeout_s)
        self.name = record.name
        if self._folder.keys.exists():
            keys = await asyncio.to_thread(load_credentials, str(self._folder.keys))
            self.security = to_security(keys)
        access: Any = self.security.get_connection_args("client")
        # Dask tries for half a minute to connect to a scheduler that is gone
        self.scheduler_comm = rpc(record.address, timeout=CONNECT_S, connection_args=access)
        await self._ask("status")
        if record.gpus:
            self._exits.enter_context(suiting_devices())
        self.status = State.running
        self._follower = asyncio.create_task(self._follow())
        if record.idle_timeout_s is not None and self._start_process is None:
            say(
                f"attached to {record.name}. It ends after "
                f"{timedelta(seconds=record.idle_timeout_s)} without clients, attached notebooks "
                f"and Dask tasks"
            )

    async def _close(self) -> None:
        if self._follower is not None:
            self._follower.cancel()
            await asyncio.wait([self._follower])
        await super()._close()
        self._exits.close()

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
        self.status = State.closing  # so that its clients do not try to come back
        await end(self._folder, "shutdown() by a notebook")
        await self._close()

    # Requests

    async def _ask(self, name: str, *args: Any, **keywords: Any) -> None:
        """Send a request, and keep the status that answers it. Prints the cluster's messages."""
        if self._failure is not None:
            raise self._failure
        if self.scheduler_comm is None or self.status not in (State.starting, State.running):
            raise UsageError(f'this object is detached: hpcdask.attach("{self.name}") again')
        try:
            async with asyncio.timeout(None if name == "scale" else ANSWER_S):
                seen = await ask(self.scheduler_comm, name, self._seen.told, *args, **keywords)
                # distributed's own way to follow the workers is for one object only
                info = await self.scheduler_comm.identity(n_workers=-1)
        except OSError as error:  # TimeoutError is one
            raise await self._why_lost(error) from None
        news = seen.told - self._seen.told  # another answer may have told some of them
        for line in seen.lines[-news:] if news > 0 else ():
            say(line)
        self._seen, self.scheduler_info = seen, SchedulerInfo(info)
        self.dashboard_link, self.tunnel, self.adapts = seen.dashboard, seen.tunnel, seen.adapts

    async def _follow(self) -> None:
        """Ask for the status again and again, and print the cluster's messages."""
        silent = False
        while self.status == State.running:
            began, pause_s = time.monotonic(), LOOK_PAUSE_S
            try:
                await self._ask("status")
                pause_s = max(pause_s, LOOK_SHARE * (time.monotonic() - began))
                silent = False
            except Exception as error:  # a network that is away, an answer that makes no sense
                if not silent and self.status == State.running:
                    problem = f"{self.name} cannot be followed: {root_cause(error)}"
                    say(f"warning: {problem}; trying again")
                silent = True
            await asyncio.sleep(pause_s)

    async def _why_lost(self, error: OSError) -> HpcdaskError:
        """Return why the cluster does not answer, and end its jobs; NoAnswer: it may come back."""
        folder = self._folder
        why, advice = "", f"See whether this machine reaches it{detached.see_log(folder)}"
        try:
            why = (await detached.settle(folder)).why
        except Exception as problem:  # an answer of the queue may make no sense
            advice = root_cause(problem)
        if not why:
            silent = f"{folder.name} does not answer at {self.scheduler_address}"
            return NoAnswer(f"{silent}: {root_cause(error)}. {advice}")
        if self._failure is None:
            self._failure = ended(folder, why)
            if self.status == State.running:
                self.status = State.closing  # so that its clients do not try to come back
                say(f"error: {self._failure}")
        return self._failure

    def scale(self, *args: Any, **keywords: Any) -> Any:
        """Ask for a number of workers; see `JobCluster.scale`."""
        return self._request("scale", self._ask, "scale", *args, **keywords)

    def adapt(self, **bounds: Any) -> Any:  # type: ignore[override]
        """Make the number of workers follow the work, until ``stop()`` of what this returns.

        The keywords are those of `JobCluster.adapt`.
        """
        self._request("adapt", self._ask, "adapt", **bounds)
        known = {name: bounds.get(name) for name in ("minimum", "maximum")}  # for JupyterLab
        return SimpleNamespace(**known, stop=self.stop_adapting)

    def stop_adapting(self) -> Any:
        """End adaptive scaling, which any attached notebook may have started."""
        return self._request("adapt", self._ask, "stop_adapting")

    def most_workers(self) -> float:
        return 0 if self._failure else self._seen.most_workers

    # What it shows

    def job_script(self, group: str | None = None) -> str:
        """Return the exact script of every job, or of a group's. Default: the first one's."""
        groups = self._seen.groups
        name = groups[0] if group is None else group
        if name not in groups:
            raise UsageError(f"job_script: no group {name}. There are {', '.join(groups)}")
        return self._folder.script(name).read_text()

    def jobs(self) -> JobTable:
        return JobTable(self._seen.jobs, self._seen.problem)

    def gpus(self) -> GpuTable:
        return GpuTable(self._seen.gpus)

    @property
    def failure(self) -> HpcdaskError | None:
        return self._failure or to_error(self._seen.failure)

    @property
    def plan(self) -> set[str]:
        """Return the names of the workers that are wanted."""
        return set(self._seen.requested)


def make(cls: type[JobCluster], keywords: dict[str, Any]) -> AttachedCluster:
    """Make a detached cluster of this class, and attach to it."""
    asynchronous, loop = keywords.pop("asynchronous", False), keywords.pop("loop", None)
    keywords.pop("silence_logs", None)  # this process's
    timeout = parse_seconds(keywords.pop("scheduler_timeout", None), "scheduler_timeout")
    folder, start = prepare(cls, keywords)
    return AttachedCluster(
        folder, start, timeout=timeout or START_TIMEOUT_S, asynchronous=asynchronous, loop=loop
    )


def attach(
    name: str,
    *,
    folder: str | None = None,
    timeout: float = START_TIMEOUT_S,
    asynchronous: bool = False,
    system: str | None = None,
    **keywords: Any,
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
    system
        Queueing system, such as ``"slurm"``, for a cluster that is made if it does not run.
    **keywords
        Those of the system's cluster class, for a cluster that is made.

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
    if system not in (None, *systems()):
        raise UsageError(f"system={system!r} is not one of {', '.join(systems())}")
    try:
        found = detached.find(name, folder)
        if found.ended is None or system is None:
            return AttachedCluster(found, timeout=timeout, asynchronous=asynchronous)
    except (UsageError, ClusterError):
        if system is None:
            raise
    made: Any = class_of(system)(name=name, detached=True, asynchronous=asynchronous, **keywords)
    return made  # type: ignore[no-any-return]
