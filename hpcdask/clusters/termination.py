"""Ends jobs: at once, after their workers have handed over, or all of them."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass, field
from typing import Any

from hpcdask.errors import QueueError, root_cause
from hpcdask.jobs.state import OVER
from hpcdask.queues.base import Queue

from . import retire
from .job import Job
from .state import ClusterState
from .walltime import ends_at, margin_s

#: Seconds before the walltime at which workers that nobody could relieve are given up, at most; and
#: that part of the margin.
LAST_MOMENT_S = 5.0
LAST_PART = 0.25
#: Seconds for one attempt to hand over where there is no hurry.
ATTEMPT_S = 60.0
#: Seconds that a job gets to end by itself once its workers have retired.
LEAVE_S = 15.0
#: Seconds that jobs get to end by themselves when their scheduler closes.
END_S = 3.0
#: Seconds between two requests to cancel the same jobs, while they do not end.
REPEAT_S = 10.0
#: Seconds until all jobs must be gone after a cluster was closed.
CLOSE_S = 60.0


@dataclass
class JobTerminator:
    """Ends jobs of one group, and calls `wake` when something has changed."""

    state: ClusterState
    queue: Queue
    wake: Callable[[], None]
    _retiring: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _ending: dict[str, float] = field(default_factory=dict)  # since when, in unix time
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def stop(self) -> list[asyncio.Task[None]]:
        """Give up what is under way, and return it to be awaited."""
        for task in self._tasks:
            task.cancel()
        return list(self._tasks)

    # At once

    def cancel(self, ids: Collection[str]) -> None:
        """Cancel jobs, and again later while the queue still shows them or does not answer."""
        jobs = self.state.jobs
        ids = [
            job_id
            for job_id in dict.fromkeys(ids)
            if jobs[job_id].state not in OVER or jobs[job_id].missed  # it might still be there
        ]
        for job_id in ids:
            self.state.mark(job_id, cancelled=True)
            self._ending.pop(job_id, None)
        if ids:
            self._spawn(self._cancel(ids))

    async def _cancel(self, ids: Collection[str]) -> None:
        again = list(ids)
        try:
            await self.queue.cancel(ids)
            self.state.clear_warning("cancel")
            again = [job_id for job_id in ids if self.state.jobs[job_id].state not in OVER]
        except Exception as error:  # whatever it is, the jobs must not stay
            self.state.warn("cancel", str(error))
        self._expect_end(again)

    def _expect_end(self, ids: Collection[str]) -> None:
        """Give jobs `LEAVE_S` to end."""
        self._ending.update(dict.fromkeys(ids, time.time()))
        self._wake_after(LEAVE_S)

    def cancel_stragglers(self) -> None:
        """Cancel the jobs that should have ended by now."""
        now, jobs = time.time(), self.state.jobs
        due = [job_id for job_id, since in self._ending.items() if now > since + LEAVE_S]
        for job_id in due:
            del self._ending[job_id]
        # A job that the queue has started again has a life of its own.
        self.cancel([one for one in due if jobs[one].leaving or jobs[one].cancelled])

    # In good order

    def retire(self, job_id: str) -> None:
        """Make the job's workers hand over what they hold, then end the job."""
        if job_id not in self._retiring:
            self.state.mark(job_id, leaving=True)
            task = self._spawn(self._retire(job_id))
            self._retiring[job_id] = task
            task.add_done_callback(lambda _: self._retiring.pop(job_id, None))

    async def _retire(self, job_id: str) -> None:
        try:
            await self._see_off(job_id)
            self.state.clear_warning("retire")
        except Exception as error:  # a job must not stay for ever as one that leaves
            self.state.warn(
                "retire",
                f"job {job_id} cannot hand over what it holds, and is asked again: "
                f"{root_cause(error)}",
            )
            self.state.mark(job_id, leaving=False)

    async def _see_off(self, job_id: str) -> None:
        state = self.state
        while (job := state.jobs[job_id]).state not in OVER and job.workers:
            last = self._last_moment(job)
            left = math.inf if last is None else last - time.time()
            if left <= 0:
                await self._force_out(job)
                break
            deadline_s = left if job.expiring else min(left, ATTEMPT_S)
            gone = await retire.retire(state.scheduler, job.workers, deadline_s=deadline_s)
            if gone >= job.workers:
                break
            if not job.expiring:
                if len(state.active()) < state.wanted:  # there is work for it again
                    state.mark(job_id, leaving=False)
                    self.wake()
                    return
                if state.emptied and not self._others(job_id):
                    await retire.force_out(state.scheduler, job.workers, reason="scaled-to-0")
                    break
            left = math.inf if last is None else last - time.time()
            await asyncio.sleep(min(1.0, max(0.0, left)))  # until somebody can take what it holds
        self._expect_end([job_id])

    def _wake_after(self, seconds: float) -> None:
        asyncio.get_running_loop().call_later(seconds + 0.1, self.wake)

    def _others(self, job_id: str) -> bool:
        return any(job.workers for job in self.state.active() if job.id != job_id)

    def _last_moment(self, job: Job) -> float | None:
        """Return the unix time at which to give the job up, a little before the queue kills it."""
        end = ends_at(job, self.state.policy)
        early = min(LAST_MOMENT_S, LAST_PART * margin_s(job, self.state.policy))
        return None if end is None else end - early

    async def _force_out(self, job: Job) -> None:
        """Remove the job's workers, whose results and Dask tasks are computed again elsewhere."""
        self.state.say(
            f"job {job.id} reaches its walltime and nobody could take over in time: what it holds "
            f"or runs is computed again"
        )
        scheduler, workers = self.state.scheduler, job.workers
        await retire.force_out(scheduler, workers, reason="walltime", expected=False)

    # All of them

    async def end_all(self, look: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Cancel every job, and see that they are gone; `look` asks the queue how they are.

        Raises QueueError if some are still in the queue after `CLOSE_S`; the message names them.
        """
        state, start, pause, problem = self.state, time.monotonic(), 0.1, ""
        asked: dict[str, float] = {}
        while ids := state.live():
            now = time.monotonic()
            # those that run were told by the scheduler to end, and do so in better order
            due = [
                job_id
                for job_id in ids
                if (now > start + END_S or not state.jobs[job_id].arrived)
                and now > asked.get(job_id, -REPEAT_S) + REPEAT_S
            ]
            try:
                if due:
                    await self.queue.cancel(due)
                    asked.update(dict.fromkeys(due, now))
                    for job_id in due:
                        state.mark(job_id, cancelled=True)
                await look()
            except QueueError as error:
                problem = f" ({error})"
            if not state.live():
                return
            if time.monotonic() > start + CLOSE_S:
                raise QueueError(
                    f"these jobs are still in the queue {CLOSE_S:g} s after they were cancelled"
                    f"{problem}: {', '.join(state.live())}. See them with: hpcdask jobs, and end "
                    f"them with: hpcdask cleanup {state.cluster}"
                )
            await asyncio.sleep(pause)
            pause = min(1.5 * pause, 2.0)
