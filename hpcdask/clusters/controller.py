"""Keeps as many jobs as are wanted: when to look, and when to act, for all groups of a cluster.

One loop asks the queue at most once per interval, folds in which workers the scheduler has, and
acts. Commands of the queue run in threads; workers retire in tasks of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin

from hpcdask.client.defaults import send_at_once
from hpcdask.errors import ClusterError, HpcdaskError, QueueError
from hpcdask.jobs.folder import ClusterFolder
from hpcdask.logs import DIED, say
from hpcdask.queues.base import Queue
from hpcdask.queues.job_state import QueueStatus

from . import messages, retire
from .demand import fail_hopeless
from .group_controller import GroupController
from .job import Job
from .polling import QueuePoller
from .publishing import JobPublisher
from .state import ClusterState

#: Seconds for each job, and at most, from a step to the next one that is for workers which come or
#: go. A step looks at all jobs and takes about 0.015 ms for each.
STEP_PAUSE_S, STEP_PAUSE_MAX_S = 1e-3, 1.0


class WorkerEvents(SchedulerPlugin):
    """Tells of every worker that comes, goes or dies, and of the scheduler's end."""

    name = "hpcdask-arrivals"

    def __init__(self, poke: Callable[[], None], over: Callable[[], None]) -> None:
        self._poke = poke
        self._over = over

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """See `SchedulerPlugin.add_worker`."""
        send_at_once(scheduler.stream_comms[worker])
        self._poke()

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        """See `SchedulerPlugin.remove_worker`."""
        self._poke()

    def log_event(self, topic: str, msg: Any) -> None:
        """See `SchedulerPlugin.log_event`: what a nanny on a node says of its worker's death."""
        if topic == DIED:
            say(str(msg))

    async def before_close(self) -> None:
        """See `SchedulerPlugin.before_close`."""
        self._over()


class JobController:
    """The jobs of one cluster, kept at the number that is wanted of each of its groups.

    A cluster without groups is one, whose name is empty. `over` is called when somebody else closes
    the scheduler.
    """

    def __init__(
        self,
        states: Sequence[ClusterState],
        queue: Queue,
        folder: ClusterFolder,
        *,
        poll_interval_s: float,
        over: Callable[[], None] = lambda: None,
    ) -> None:
        self.poll_interval_s = poll_interval_s
        self.folder = folder
        self.scheduler = states[0].scheduler
        self._over = over
        self._poller = QueuePoller(states, queue, interval_s=poll_interval_s, wake=self.wake)
        self._publisher = JobPublisher(states, folder)
        self.groups = {
            state.group: GroupController(state, queue, folder, self._poller, self.wake)
            for state in states
        }
        self._changed = asyncio.Event()
        self._settled = asyncio.Condition()
        self._stepped = 0.0
        self._due: asyncio.TimerHandle | None = None
        self._loop: asyncio.Task[None] | None = None

    # What the cluster asks

    def start(self) -> None:
        """Begin to watch. Nothing is asked of the queue before there is a job."""
        retire.ignore_removed(self.scheduler)
        self.scheduler.add_plugin(WorkerEvents(self._wake_soon, self._scheduler_closes))
        self._loop = asyncio.create_task(self._watch())

    def jobs(self) -> list[Job]:
        """All jobs of all groups."""
        return [job for group in self.groups.values() for job in group.state.jobs.values()]

    @property
    def failure(self) -> HpcdaskError | None:
        """Why a group submits no more jobs, of the first that fails; None while all is well."""
        return next(filter(None, (group.failure for group in self.groups.values())), None)

    @property
    def waits(self) -> str:
        """Why jobs may wait for ever, if they do."""
        return "; ".join(filter(None, (group.waits for group in self.groups.values())))

    @property
    def is_closing(self) -> bool:
        """Return whether the end of a worker or a job is meant."""
        return any(group.state.closing for group in self.groups.values())

    def wake(self) -> None:
        """Something has changed: decide again."""
        self._changed.set()

    def _wake_soon(self) -> None:
        """A worker came or went. Others may follow: they are seen in one step, not in one each."""

        def wake() -> None:
            self._due = None
            self.wake()

        if self._due is None and not self._changed.is_set():  # else a step is about to see it
            count = sum(len(group.state.jobs) for group in self.groups.values())
            pause = min(STEP_PAUSE_MAX_S, STEP_PAUSE_S * count)
            left = self._stepped + pause - time.monotonic()
            self._due = asyncio.get_running_loop().call_later(max(0.0, left), wake)

    async def wait_submitted(self, names: Iterable[str]) -> None:
        """Wait until the wanted jobs of these groups are submitted, or cannot be.

        Raises why the first of those that cannot be is not, once all have been tried.
        """
        waits = [self.groups[name].wait_submitted(self._settled) for name in names]
        for problem in await asyncio.gather(*waits, return_exceptions=True):
            if problem is not None:
                raise problem

    def _scheduler_closes(self) -> None:
        if not self.is_closing:
            for group in self.groups.values():
                group.failure = ClusterError(messages.SHUT_DOWN)
            self._say(f"error: {messages.SHUT_DOWN}")
            self.closing()
            self._over()

    def closing(self) -> None:
        """From now on, the end of a worker or a job is meant."""
        for group in self.groups.values():
            group.state.closing = True
        self.wake()

    async def close(self) -> None:
        """Cancel every job, and see that they are gone.

        Raises QueueError if some are still in the queue; the message names them.
        """
        self.closing()
        groups = self.groups.values()
        await asyncio.gather(*(group.finish_submission(self._settled) for group in groups))
        if self._loop is not None:
            self._loop.cancel()
        loop = [] if self._loop is None else [self._loop]
        ending = [task for group in groups for task in group.terminator.stop()]
        tasks = [*loop, *self._poller.stop(), *ending]
        await asyncio.gather(*tasks, return_exceptions=True)
        ends = (group.end_all(self._look) for group in groups)
        problems = [one for one in await asyncio.gather(*ends, return_exceptions=True) if one]
        if any(isinstance(problem, QueueError) for problem in problems):
            await self._publisher.forget()
        await asyncio.gather(*self._publisher.stop(), return_exceptions=True)
        if problems and all(isinstance(problem, QueueError) for problem in problems):
            raise QueueError("; ".join(map(str, problems)))
        for problem in problems:
            raise problem

    # The loop

    async def _watch(self) -> None:
        while not self.is_closing:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pause()):
                    await self._changed.wait()
            self._changed.clear()
            try:
                self._step()
            except Exception as error:  # a mistake here must not leave the jobs unwatched
                self._say(f"error: {type(error).__name__}: {error}")
                await asyncio.sleep(self.poll_interval_s)
            async with self._settled:
                self._settled.notify_all()
            self._stepped = time.monotonic()

    def _pause(self) -> float | None:
        """Seconds until something is due by itself; None for never."""
        dues = [self._poller.pause(), *(group.retry_s() for group in self.groups.values())]
        times = [due for due in dues if due is not None]
        if self.failure is not None:  # Dask tasks that come now would wait for ever
            times.append(self.poll_interval_s)
        return max(0.0, min(times)) if times else None

    def _step(self) -> None:
        self._observe(*self._poller.take())
        if not self.is_closing:
            for group in self.groups.values():
                group.act()
            fail_hopeless(list(self.groups.values()))
            self._poller.poll()

    def _observe(self, asked: set[str], seen: dict[str, QueueStatus]) -> None:
        for group in self.groups.values():
            group.observe(asked, seen)
        self._publisher.publish()

    async def _look(self) -> None:
        """Ask the queue now."""
        ids = self._poller.live()
        self._observe(set(ids), await self._poller.ask(ids))

    def _say(self, line: str) -> None:
        next(iter(self.groups.values())).state.say(line)
