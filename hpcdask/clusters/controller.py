"""Keeps as many jobs as are wanted: carries out what `hpcdask.clusters.reconcile` decides.

One loop asks the queue at most once per interval, folds in which workers the scheduler has, and
acts. Commands of the queue run in threads; workers retire in tasks of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection
from typing import Any

from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin

from hpcdask.client.batching import BATCH_INTERVAL_S
from hpcdask.errors import ClusterError, HpcdaskError, NoAnswer, QueueError
from hpcdask.jobs.folder import ClusterFolder
from hpcdask.jobs.state import OVER, JobState
from hpcdask.queues.base import Queue
from hpcdask.queues.job_state import QueueStatus

from . import messages, retire
from .job import is_stuck
from .observe import observe
from .polling import QueuePoller
from .publishing import JobPublisher
from .reconcile import History, plan, record
from .state import ClusterState
from .submitter import Submitter
from .termination import JobTerminator

#: Seconds for each job, and at most, from a step to the next one that is for workers which come or
#: go. A step looks at all jobs and takes about 0.015 ms for each.
STEP_PAUSE_S, STEP_PAUSE_MAX_S = 1e-3, 1.0


class WorkerEvents(SchedulerPlugin):
    """Tells of every worker that comes or goes, and of the scheduler's end."""

    name = "hpcdask-arrivals"

    def __init__(self, poke: Callable[[], None], over: Callable[[], None]) -> None:
        self._poke = poke
        self._over = over

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """See `SchedulerPlugin.add_worker`."""
        scheduler.stream_comms[worker].interval = BATCH_INTERVAL_S
        self._poke()

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        """See `SchedulerPlugin.remove_worker`."""
        self._poke()

    async def before_close(self) -> None:
        """See `SchedulerPlugin.before_close`."""
        self._over()


class JobController:
    """The jobs of one cluster, kept at the number that is wanted.

    `over` is called when somebody else closes the scheduler. `failure` says why nothing more is
    submitted; it is None while all is well.
    """

    def __init__(
        self,
        state: ClusterState,
        queue: Queue,
        folder: ClusterFolder,
        *,
        poll_interval_s: float,
        over: Callable[[], None] = lambda: None,
    ) -> None:
        self.state = state
        self.folder = folder
        self.poll_interval_s = poll_interval_s
        self.failure: HpcdaskError | None = None
        self._over = over
        self._history = History()
        self._waiting_users = 0
        tag = f"hpcdask:{state.cluster}"
        self._submitter = Submitter(queue, folder, tag, self._add, self._missing)
        self._poller = QueuePoller(state, queue, interval_s=poll_interval_s, wake=self.wake)
        self._terminator = JobTerminator(state, queue, self.wake)
        self._publisher = JobPublisher(state, folder)
        self._changed = asyncio.Event()
        self._settled = asyncio.Condition()
        self._submission: asyncio.Task[None] | None = None
        self._submitted = 0.0
        self._stepped = 0.0
        self._due: asyncio.TimerHandle | None = None
        self._loop: asyncio.Task[None] | None = None

    # What the cluster asks

    def start(self) -> None:
        """Begin to watch. Nothing is asked of the queue before there is a job."""
        retire.ignore_removed(self.state.scheduler)
        self.state.scheduler.add_plugin(WorkerEvents(self._wake_soon, self._scheduler_closes))
        self._loop = asyncio.create_task(self._watch())

    def wake(self) -> None:
        """Something has changed: decide again."""
        self._changed.set()

    def _wake_soon(self) -> None:
        """A worker came or went. Others may follow: they are seen in one step, not in one each."""

        def wake() -> None:
            self._due = None
            self.wake()

        if self._due is None and not self._changed.is_set():  # else a step is about to see it
            pause = min(STEP_PAUSE_MAX_S, STEP_PAUSE_S * len(self.state.jobs))
            left = self._stepped + pause - time.monotonic()
            self._due = asyncio.get_running_loop().call_later(max(0.0, left), wake)

    def reset_failures(self) -> None:
        """Forget earlier failures: the user asks again."""
        self.failure = None
        self._history = History()
        self._submitter.retry_at = 0.0
        self.state.clear_warning()

    def set_target(self, jobs: int) -> None:
        """Wish for this many jobs."""
        self.state.want(jobs)
        self.wake()

    def dismiss(self, names: Collection[str]) -> None:
        """Do without the named workers: jobs without workers end at once, others in order."""
        jobs = self.state.drop(names)
        self._terminator.cancel([job.id for job in jobs if not job.workers])
        for job in jobs:
            if job.workers:
                self._terminator.retire(job.id)

    async def wait_submitted(self) -> None:
        """Wait until the wanted jobs are submitted, or cannot be. Raises why they cannot.

        Who waits is told of a queue that is silent; for others it is tried again.
        """
        self._waiting_users += 1
        try:
            async with self._settled:
                await self._settled.wait_for(
                    lambda: self.failure is not None or (self._asked() and self._submission is None)
                )
        finally:
            self._waiting_users -= 1
        if self.failure is not None:
            raise self.failure

    def _asked(self) -> bool:
        state, waiting = self.state, time.time() < self._submitter.retry_at
        return state.closing or waiting or len(state.active()) >= state.wanted

    def _scheduler_closes(self) -> None:
        if not self.state.closing:
            self.failure = ClusterError(messages.SHUT_DOWN)
            self.state.say(f"error: {messages.SHUT_DOWN}")
            self.closing()
            self._over()

    def closing(self) -> None:
        """From now on, the end of a worker or a job is meant."""
        self.state.closing = True
        self.wake()

    async def close(self) -> None:
        """Cancel every job, and see that they are gone.

        Raises QueueError if some are still in the queue; the message names them.
        """
        self.closing()
        if self._submission is not None:  # its jobs' ids are needed
            await asyncio.wait([self._submission])
        async with self._settled:  # a scale() that waits for more jobs
            self._settled.notify_all()
        if self._submitter.unanswered:
            with contextlib.suppress(QueueError):
                await self._submitter.adopt(self.state.jobs)
        if self._loop is not None:
            self._loop.cancel()
        loop = [] if self._loop is None else [self._loop]
        tasks = [*loop, *self._poller.stop(), *self._terminator.stop()]
        await asyncio.gather(*tasks, return_exceptions=True)

        async def look() -> None:
            ids = self.state.live()
            self._observe(set(ids), await self._poller.ask(ids))

        try:
            await self._terminator.end_all(look)
            if self.state.jobs:
                returned = await self._poller.returned(self._submitter.tag)
                for job_id in returned:
                    self.state.enter(job_id)
                if returned:
                    await self._terminator.end_all(look)
        except QueueError:
            await self._publisher.forget()
            raise
        finally:
            await asyncio.gather(*self._publisher.stop(), return_exceptions=True)

    # The loop

    async def _watch(self) -> None:
        while not self.state.closing:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pause()):
                    await self._changed.wait()
            self._changed.clear()
            try:
                self._step()
            except Exception as error:  # a mistake here must not leave the jobs unwatched
                self.state.say(f"error: {type(error).__name__}: {error}")
                await asyncio.sleep(self.poll_interval_s)
            async with self._settled:
                self._settled.notify_all()
            self._stepped = time.monotonic()

    def _pause(self) -> float | None:
        """Seconds until something is due by itself; None for never."""
        due = self._poller.pause()
        times = [] if due is None else [due]
        if time.time() < self._submitter.retry_at:
            times.append(self._submitter.retry_at - time.time())
        if self.failure is not None:  # Dask tasks that come now would wait for ever
            times.append(self.poll_interval_s)
        return max(0.0, min(times)) if times else None

    def _step(self) -> None:
        self._observe(*self._poller.take())
        if not self.state.closing:
            self._act()
            self._poller.poll()

    def _observe(self, asked: set[str], seen: dict[str, QueueStatus]) -> None:
        state, now = self.state, time.time()
        workers = state.connected()
        if late := set(workers) - set(state.jobs):  # of a submission that got no answer
            self._add(late)
        strays: set[str] = set()
        for job_id, before in list(state.jobs.items()):
            states = workers.get(job_id, [])
            names = [str(ws.name) for ws in states]
            after = observe(
                before,
                seen.get(job_id),
                asked=job_id in asked,
                workers=names,
                held=sum(ws.nbytes for ws in states),
                now=now,
                policy=state.policy,
            )
            over = after.state in OVER
            strays.update(name for name in names if over or name not in after.workers)
            if after is before:
                continue
            state.jobs[job_id] = after
            self._history = record(self._history, before, after, now, state.policy)
            meant = state.closing or after.cancelled or after.leaving
            fine = meant or after.state is JobState.COMPLETED
            if over and before.state not in OVER and not fine:
                state.say(messages.job_ended(after, self.folder))
            if after.overdue and not before.overdue and is_stuck(after):
                state.say(messages.job_stuck(after, self.folder))
        self._publisher.publish()
        if not state.closing:
            self._terminator.retire_strays(strays)

    def _act(self) -> None:
        state, now = self.state, time.time()
        jobs = {
            job_id: job
            for job_id, job in state.jobs.items()
            if job.state not in OVER or job.missed  # what the queue forgot might come back
        }
        actions = plan(
            state.wanted,
            jobs,
            self._history,
            closable=self._closable(),
            now=now,
            policy=state.policy,
        )
        if actions.failure is not None and self.failure is None:
            limit_s = state.policy.start_timeout_s
            self._fail(messages.jobs_failed(actions.failure, self.folder, limit_s))
        self._terminator.cancel(actions.cancel)
        self._terminator.cancel_stragglers()
        for job_id in actions.retire:
            self._terminator.retire(job_id)
        idle = self._submission is None and self.failure is None
        if actions.submit and idle and now >= self._submitter.retry_at:
            self._submission = asyncio.create_task(self._submit(actions.submit))
        if self.failure is not None and not state.live() and not state.scheduler.workers:
            retire.fail_waiting(state.scheduler, self.failure)

    def _closable(self) -> list[str]:
        """Ids of jobs in the order in which to give them up: idle ones, then the others."""
        state, counting = self.state, self.state.active()
        if len(counting) <= state.wanted:
            return []
        idle = retire.closable(state.scheduler, state.job_of)
        order = {job_id: number for number, job_id in enumerate(idle)}
        running = [job for job in counting if job.workers]
        running.sort(key=lambda job: (order.get(job.id, len(order)), job.held))
        return [job.id for job in running]

    # Submitting

    def _missing(self) -> int:
        """How many jobs the submission under way still has to bring."""
        if self.state.closing or self.failure is not None:
            return 0
        return max(0, self.state.wanted - len(self.state.active()))

    async def _submit(self, count: int) -> None:
        state, self._submitted = self.state, time.time()
        try:
            await self._submitter.submit(count, state.jobs)
            state.clear_warning("limit")
        except QueueError as error:
            if error.for_now and not (self._waiting_users and isinstance(error, NoAnswer)):
                there = f"{len(state.active())} of {state.wanted} jobs are there"
                state.warn("limit", f"{error}. {there}; trying again later")
            else:
                self._fail(error)
        except Exception as error:  # such as a full disk: say it rather than try for ever
            self._fail(QueueError(f"cannot submit: {type(error).__name__}: {error}"))
        finally:
            self._submission = None
            self.wake()

    def _add(self, ids: Collection[str]) -> None:
        if not self.state.live():  # a later submission must not put off the query
            self._poller.postpone()
        for job_id in ids:
            known = self.state.jobs.get(job_id)
            # one of before this submission is another job: a queue that lost its state counts anew
            if known is None or known.submitted < self._submitted:
                self.state.enter(job_id)
                self._poller.disregard(job_id)  # what is under way asks for the other one
        self.wake()

    # Failing

    def _fail(self, error: HpcdaskError) -> None:
        if self.state.closing:  # such as threads that have ended with the program
            return
        self.failure = error
        self.state.say(messages.stopped(error))
