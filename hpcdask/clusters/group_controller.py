"""Keeps as many jobs of one group as are wanted; `JobController` says when to look and to act."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine
from typing import Any

from hpcdask.errors import HpcdaskError, NoAnswer, QueueError
from hpcdask.jobs.folder import ClusterFolder
from hpcdask.jobs.state import OVER, WAITING, JobState
from hpcdask.queues.base import Queue
from hpcdask.queues.job_state import QueueStatus

from . import messages, retire
from .demand import Part
from .job import is_stuck
from .observe import observe
from .polling import QueuePoller
from .reconcile import History, plan, record
from .state import ClusterState
from .submitter import Submitter
from .termination import JobTerminator


class GroupController:
    """The jobs of one group. They fail, end and are limited by themselves.

    The poller is that of all groups. `failure` says why nothing more is submitted; it is None while
    all is well. `waits` says for what jobs may wait for ever, if they do.
    """

    def __init__(
        self,
        state: ClusterState,
        queue: Queue,
        folder: ClusterFolder,
        poller: QueuePoller,
        wake: Callable[[], None],
    ) -> None:
        self.state = state
        self.folder = folder
        self.failure: HpcdaskError | None = None
        self.waits = ""
        self.submission: asyncio.Task[None] | None = None
        self.terminator = JobTerminator(state, queue, wake)
        self._queue, self._poller = queue, poller
        self._wake = wake
        self._history = History()
        self._waiting_users = 0
        tag = f"hpcdask:{state.prefix}"
        self._submitter = Submitter(queue, folder, tag, self._add, self._missing, state.group)

    # What the cluster asks

    def reset_failures(self) -> None:
        """Forget earlier failures: the user asks again."""
        self.failure = None
        self._history = History()
        self._submitter.retry_at = 0.0
        self.state.clear_warning()

    def set_target(self, jobs: int) -> None:
        """Wish for this many jobs."""
        self.state.want(jobs)
        self._wake()

    def dismiss(self, names: Collection[str]) -> None:
        """Do without the named workers: jobs without workers end at once, others in order."""
        jobs = self.state.drop(names)
        self.terminator.cancel([job.id for job in jobs if not job.workers])
        for job in jobs:
            if job.workers:
                self.terminator.retire(job.id)

    async def wait_submitted(self, settled: asyncio.Condition) -> None:
        """Wait until the wanted jobs are submitted, or cannot be. Raises why they cannot.

        Who waits is told of a queue that is silent; for others it is tried again.
        """
        self._waiting_users += 1
        try:
            async with settled:
                await settled.wait_for(
                    lambda: self.failure is not None or (self._asked() and self.submission is None)
                )
        finally:
            self._waiting_users -= 1
        if self.failure is not None:
            raise self.failure

    def _asked(self) -> bool:
        state, waiting = self.state, self.retry_s() is not None
        return state.closing or waiting or len(state.active()) >= state.wanted

    def retry_s(self) -> float | None:
        """Seconds until a submission is tried again; None if none is put off."""
        left = self._submitter.retry_at - time.time()
        return left if left > 0 else None

    # What the loop asks

    def observe(self, asked: Collection[str], seen: dict[str, QueueStatus]) -> None:
        """Fold in what the queue says and which workers are there."""
        state, now = self.state, time.time()
        workers = state.connected()
        if late := set(workers) - set(state.jobs):  # of a submission that got no answer
            self._add(late)
        for job_id, before in list(state.jobs.items()):
            states = workers.get(job_id, [])
            after = observe(
                before,
                seen.get(job_id),
                asked=job_id in asked,
                workers=[str(ws.name) for ws in states],
                held=sum(ws.nbytes for ws in states),
                now=now,
                policy=state.policy,
            )
            if after is before:
                continue
            state.jobs[job_id] = after
            self._history = record(self._history, before, after, now, state.policy)
            meant = state.closing or after.cancelled or after.leaving
            fine = meant or after.state is JobState.COMPLETED
            if after.state in OVER and before.state not in OVER and not fine:
                state.say(messages.job_ended(after, self.folder))
            if after.overdue and not before.overdue and is_stuck(after):
                state.say(messages.job_stuck(after, self.folder))
        if asked and not state.closing:
            self._warn_of_waiting()

    def _warn_of_waiting(self) -> None:
        """Tell once for each reason of jobs to wait that does not end by itself."""
        self.waits = ""
        waiting = Counter(job.reason for job in self.state.active() if job.state in WAITING)
        for reason, count in waiting.items():
            if (advice := self._queue.lasting(reason)) is not None:
                self.waits = self._named(messages.jobs_wait(count, reason, advice))
                self.state.warn(f"waits {reason.partition(',')[0]}", self.waits)

    def act(self) -> None:
        """Submit, cancel and retire what `plan` says."""
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
        self.terminator.cancel(actions.cancel)
        self.terminator.cancel_stragglers()
        for job_id in actions.retire:
            self.terminator.retire(job_id)
        idle = self.submission is None and self.failure is None
        if actions.submit and idle and self.retry_s() is None:
            self.submission = asyncio.create_task(self._submit(actions.submit))

    def _closable(self) -> list[str]:
        """Ids of jobs in the order in which to give them up: idle ones, then the others."""
        state, counting = self.state, self.state.active()
        if len(counting) <= state.wanted:
            return []
        idle = retire.closable(Part(state), state.job_of)
        order = {job_id: number for number, job_id in enumerate(idle)}
        running = [job for job in counting if job.workers]
        running.sort(key=lambda job: (order.get(job.id, len(order)), job.held))
        return [job.id for job in running]

    async def finish_submission(self, settled: asyncio.Condition) -> None:
        """At the end: learn which jobs were submitted."""
        if self.submission is not None:  # its jobs' ids are needed
            await asyncio.wait([self.submission])
        async with settled:  # a scale() that waits for more jobs
            settled.notify_all()
        if self._submitter.unanswered:
            with contextlib.suppress(QueueError):
                await self._submitter.adopt(self.state.jobs)

    async def end_all(self, look: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Cancel every job, and see that they are gone; `look` asks the queue how they are.

        Raises QueueError if some are still in the queue; the message names them.
        """
        await self.terminator.end_all(look)

    # Submitting

    def _missing(self) -> int:
        """Return how many jobs the submission under way still has to bring."""
        if self.state.closing or self.failure is not None:
            return 0
        return max(0, self.state.wanted - len(self.state.active()))

    async def _submit(self, count: int) -> None:
        state = self.state
        try:
            await self._submitter.submit(count, state.jobs)
            state.clear_warning("limit")
        except QueueError as error:
            if error.for_now and not (self._waiting_users and isinstance(error, NoAnswer)):
                there = f"{len(state.active())} of {state.wanted} jobs are there"
                state.warn("limit", f"{self._named(error)}. {there}; trying again later")
            else:
                error.args = (messages.no_submission(error, self._queue, self.folder),)
                self._fail(error)
        except Exception as error:  # such as a full disk: say it rather than try for ever
            self._fail(QueueError(f"cannot submit: {type(error).__name__}: {error}"))
        finally:
            self.submission = None
            self._wake()

    def _add(self, ids: Collection[str]) -> None:
        if not self._poller.live():  # a later submission must not put off the query
            self._poller.postpone()
        for job_id in ids:
            if job_id not in self.state.jobs:
                self.state.enter(job_id)
        self._wake()

    # Failing

    def _named(self, error: HpcdaskError | str) -> str:
        return f"group {self.state.group}: {error}" if self.state.group else str(error)

    def _fail(self, error: HpcdaskError) -> None:
        if self.state.closing:  # such as threads that have ended with the program
            return
        error.args = (self._named(error),)
        self.failure = error
        self.state.say(messages.stopped(error))
