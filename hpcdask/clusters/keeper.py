"""Keeps as many jobs as are wanted: carries out what `hpcdask.reconcile` decides.

One loop asks the queue at most once per interval, folds in which workers the scheduler has, and
acts. Commands of the queue run in threads; workers retire in tasks of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable, Collection, Coroutine
from typing import Any

from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin

from hpcdask.errors import HpcdaskError, JobsFailed, QueueError, Refused
from hpcdask.nanny import BATCH_INTERVAL_S
from hpcdask.queues.base import Queue
from hpcdask.queues.folder import ClusterFolder
from hpcdask.reconcile import (
    OVER,
    Actions,
    Failure,
    History,
    Job,
    Policy,
    Seen,
    State,
    ends_at,
    margin_s,
    observe,
    parse_worker_name,
    plan,
    record,
    worker_names,
)

from . import retire
from .submitter import Submitter

#: Seconds before the walltime at which workers that nobody could relieve are given up, at most; and
#: that part of the margin.
LAST_MOMENT_S = 5.0
LAST_PART = 0.25
#: Seconds that a worker's process gets to end by itself once its worker has retired.
LEAVE_S = 15.0
#: Longest pause between two queries of a queue that does not answer.
BACK_OFF_S = 120.0
#: Seconds that jobs get to end by themselves when their scheduler closes.
END_S = 3.0
#: Seconds until all jobs must be gone after a cluster was closed.
CLOSE_S = 60.0


class Arrivals(SchedulerPlugin):
    """Tells the keeper of every worker that comes or goes."""

    name = "hpcdask-arrivals"

    def __init__(self, poke: Callable[[], None]) -> None:
        self._poke = poke

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """See `SchedulerPlugin.add_worker`."""
        scheduler.stream_comms[worker].interval = BATCH_INTERVAL_S
        self._poke()

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        """See `SchedulerPlugin.remove_worker`."""
        self._poke()


class Keeper:
    """The jobs of one cluster.

    Parameters
    ----------
    queue
        The door to the queueing system.
    folder
        What the cluster keeps on disk.
    scheduler
        Of the cluster, in this event loop.
    cluster
        The cluster's id, with which its workers' names begin.
    size
        Workers per job.
    policy
        Deadlines and budgets.
    poll_interval_s
        Seconds between two queries of the queue.
    say
        Tells the user one line.
    """

    def __init__(
        self,
        queue: Queue,
        folder: ClusterFolder,
        scheduler: Scheduler,
        cluster: str,
        *,
        size: int,
        policy: Policy,
        poll_interval_s: float,
        say: Callable[[str], None],
    ) -> None:
        self.queue = queue
        self.folder = folder
        self.scheduler = scheduler
        self.cluster = cluster
        self.size = size
        self.policy = policy
        self.poll_interval_s = poll_interval_s
        self.say = say
        self.jobs: dict[str, Job] = {}
        self.wanted = 0
        self._emptied = (
            False  # whether the user wants no worker, so that nobody is left to hold results
        )
        self.failure: HpcdaskError | None = None
        self._history = History()
        self._changed = asyncio.Event()
        self._settled = asyncio.Condition()
        self._queries_failed = 0
        self._next_query = 0.0
        self._submitter = Submitter(queue, folder, f"hpcdask:{cluster}", self._add)
        self._warned: set[str] = set()
        self._submission: asyncio.Task[None] | None = None
        self._retiring: dict[str, asyncio.Task[None]] = {}
        self._left: dict[str, float] = {}
        self._cancels: list[asyncio.Task[None]] = []
        self._cut_off = retire.CutOff()
        self._loop: asyncio.Task[None] | None = None
        self._closing = False

    # What the cluster asks

    def start(self) -> None:
        """Begin to watch. Nothing is asked of the queue before there is a job."""
        self.scheduler.add_plugin(Arrivals(self.poke))
        self._loop = asyncio.create_task(self._watch())

    def poke(self) -> None:
        """Something has changed: decide again."""
        self._changed.set()

    def want(self, jobs: int) -> None:
        """Wish for this many jobs. Forgets earlier failures: the user asks again."""
        self.failure = None
        self._history = History()
        self._submitter.retry_at = 0.0
        self._warned.clear()
        self.wanted = jobs
        self._emptied = jobs == 0
        self.poke()

    async def settle(self) -> None:
        """Wait until the wanted jobs are submitted, or cannot be. Raises why they cannot."""
        async with self._settled:
            await self._settled.wait_for(
                lambda: self.failure is not None or (self._asked() and self._submission is None)
            )
        if self.failure is not None:
            raise self.failure

    def _asked(self) -> bool:
        waiting = time.time() < self._submitter.retry_at
        return self._closing or waiting or len(self.counting()) >= self.wanted

    def counting(self) -> list[Job]:
        """Jobs that are there or asked for, and are to stay."""
        return [
            job
            for job in self.jobs.values()
            if job.state not in OVER and not job.cancelled and not job.leaving
        ]

    def names(self) -> list[str]:
        """A name for each worker that is there or asked for."""
        names = [name for job in self.counting() for name in worker_names(self.cluster, job)]
        missing = self.wanted * self.size - len(names)
        return names + [f"{self.cluster}-unsubmitted-{number}" for number in range(missing)]

    def connected(self) -> dict[str, str]:
        """Names of the cluster's workers that the scheduler has -> the ids of their jobs."""
        found = {}
        for state in self.scheduler.workers.values():
            parsed = parse_worker_name(self.cluster, str(state.name))
            if parsed is not None:
                found[str(state.name)] = parsed[0]
        return found

    def dismiss(self, names: Collection[str]) -> None:
        """End the jobs all of whose workers are named: pending ones at once, others in order."""
        names = set(names)
        counting = self.counting()
        jobs = [job for job in counting if names >= set(worker_names(self.cluster, job))]
        dropped = sum("-unsubmitted-" in name for name in names) // self.size
        unsubmitted = max(0, self.wanted - len(counting))
        self.wanted = len(counting) - len(jobs) + max(0, unsubmitted - dropped)
        self._cancel([job.id for job in jobs if not job.workers])
        for job in jobs:
            if job.workers:
                self._retire(job.id)

    # The loop

    async def _watch(self) -> None:
        while not self._closing:
            pause = max(0.0, self._next_query - time.monotonic()) if self._live() else None
            if time.time() < self._submitter.retry_at:
                pause = min(pause or BACK_OFF_S, self._submitter.retry_at - time.time())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._changed.wait()
            self._changed.clear()
            try:
                await self._step()
            except Exception as error:  # a mistake here must not leave the jobs unwatched
                self.say(f"error: {type(error).__name__}: {error}")
                self._next_query = time.monotonic() + self.poll_interval_s
            async with self._settled:
                self._settled.notify_all()

    def _live(self) -> list[str]:
        return [job.id for job in self.jobs.values() if job.state not in OVER]

    async def _step(self) -> None:
        ids = self._live()
        asked = bool(ids) and time.monotonic() >= self._next_query
        seen: dict[str, Seen] = {}
        if asked:
            try:
                seen = await self._query(ids)
            except QueueError as error:
                asked = False
                self._queries_failed += 1
                self._warn("query", f"{error}. What the jobs do is unknown until it answers")
            else:
                self._queries_failed = 0
                self._warned.discard("query")
            pause = self.poll_interval_s * 2 ** min(self._queries_failed, 10)
            self._next_query = time.monotonic() + min(pause, max(BACK_OFF_S, self.poll_interval_s))
        self._observe(set(ids) if asked else set(), seen)
        if not self._closing:
            self._act()

    async def _query(self, ids: Collection[str]) -> dict[str, Seen]:
        """One query, and one more for the jobs that have left the queue."""
        seen = await self.queue.query(ids)
        gone = [job_id for job_id in ids if job_id not in seen]
        if gone:
            seen |= await self.queue.departed(gone)
        return seen

    def _observe(self, asked: set[str], seen: dict[str, Seen]) -> None:
        now = time.time()
        workers: dict[str, list[str]] = {}
        for name, job_id in self.connected().items():
            workers.setdefault(job_id, []).append(name)
        for job_id, before in list(self.jobs.items()):
            names = workers.get(job_id, [])
            after = observe(
                before,
                seen.get(job_id),
                asked=job_id in asked,
                workers=names,
                held=retire.held(self.scheduler, names) if names else 0,
                now=now,
                policy=self.policy,
            )
            self.jobs[job_id] = after
            self._history = record(self._history, before, after, now, self.policy)
            if after.state in OVER and before.state not in OVER:
                self._left.pop(job_id, None)
                self._tell_end(after)

    def _tell_end(self, job: Job) -> None:
        if self._closing or job.cancelled or job.leaving or job.state == State.COMPLETED:
            return
        code = "" if job.exit_code is None else f", exit code {job.exit_code}"
        reason = f" ({job.reason})" if job.reason else ""
        self.say(f"job {job.id} has ended: {job.state}{reason}{code}. Log: {self.log_of(job.id)}")

    def log_of(self, job_id: str) -> str:
        """Path of a job's own log."""
        return str(self.folder.log_path(job_id))

    def _act(self) -> None:
        now = time.time()
        jobs = {
            job_id: job
            for job_id, job in self.jobs.items()
            if job.state not in OVER or job.missed  # what the queue forgot might come back
        }
        actions = plan(
            self.wanted,
            jobs,
            self._history,
            closable=self._closable(),
            now=now,
            policy=self.policy,
        )
        if actions.failure is not None and self.failure is None:
            self._give_up(actions.failure)
        stale = [job_id for job_id, at in self._left.items() if now > at + LEAVE_S]
        for job_id in stale:
            del self._left[job_id]
        self._cancel([*actions.cancel, *(job_id for job_id in stale if job_id in jobs)])
        for job_id in actions.retire:
            self._retire(job_id)
        self._submit(actions, now)
        if self.failure is not None and not self._live() and not self.scheduler.workers:
            retire.fail_waiting(self.scheduler, self.failure)

    def _closable(self) -> list[str]:
        def job_of(name: str) -> str | None:
            parsed = parse_worker_name(self.cluster, name)
            return None if parsed is None else parsed[0]

        counting = [job.id for job in self.counting() if job.workers]
        if len(self.counting()) <= self.wanted:
            return []
        idle = retire.closable(self.scheduler, job_of)
        busy = sorted(set(counting) - set(idle), key=lambda job_id: self.jobs[job_id].held)
        return [job_id for job_id in [*idle, *busy] if job_id in counting]

    # Submitting

    def _submit(self, actions: Actions, now: float) -> None:
        idle = self._submission is None and self.failure is None
        if actions.submit and idle and now >= self._submitter.retry_at:
            self._submission = asyncio.create_task(self._submit_all(actions.submit))

    async def _submit_all(self, count: int) -> None:
        try:
            await self._submitter.submit(count, self.jobs)
            self._warned.discard("limit")
        except QueueError as error:
            if isinstance(error, Refused) and error.for_now:
                there = f"{len(self.counting())} of {self.wanted} jobs are there"
                self._warn("limit", f"{error}. {there}; trying again later")
            else:
                self._fail(error)
        finally:
            self._submission = None
            self.poke()

    def _add(self, ids: Collection[str]) -> None:
        now = time.time()
        for job_id in ids:
            self.jobs[job_id] = Job(job_id, self.size, now)
        self._next_query = max(self._next_query, time.monotonic() + self.poll_interval_s)

    # Failing

    def _warn(self, subject: str, text: str) -> None:
        """Tell about a state of things once, until it has changed."""
        if subject not in self._warned:
            self._warned.add(subject)
            self.say(f"warning: {text}")

    def _fail(self, error: HpcdaskError) -> None:
        self.failure = error
        self.say(f"error: {error}. Nothing more is submitted until scale() or adapt() asks again")

    def _give_up(self, failure: Failure) -> None:
        job = failure.job
        code = "unknown" if job.exit_code is None else job.exit_code
        how = f"{job.state}, {job.reason}" if job.reason else str(job.state)
        what = (
            f"{failure.count} jobs in a row ended before their workers connected"
            if failure.kind == "start"
            else f"{failure.count} jobs died within an hour"
        )
        tail = "\n".join(self.folder.tail(job.id, 10))
        self._fail(
            JobsFailed(
                f"{what}. The last was job {job.id}: {how}, exit code {code}. "
                f"Script and log are in {self.folder.path}"
                + (f", its log ends:\n{tail}\n" if tail else ", its log is empty")
            )
        )

    # Ending jobs

    def _cancel(self, ids: Collection[str]) -> None:
        """Cancel these; if the queue does not answer, they are cancelled at the next query."""
        ids = [job_id for job_id in dict.fromkeys(ids) if self.jobs[job_id].state not in OVER]
        if not ids:
            return
        for job_id in ids:
            self.jobs[job_id] = dataclasses.replace(self.jobs[job_id], cancelled=True)

        async def cancel() -> None:
            try:
                await self.queue.cancel(ids)
            except QueueError as error:
                self._warn("cancel", str(error))
                for job_id in ids:
                    self.jobs[job_id] = dataclasses.replace(self.jobs[job_id], cancelled=False)
                    self._left[job_id] = time.time()

        self._spawn(cancel())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._cancels = [task for task in self._cancels if not task.done()]
        self._cancels.append(asyncio.create_task(work))

    def _retire(self, job_id: str) -> None:
        if job_id not in self._retiring:
            self.jobs[job_id] = dataclasses.replace(self.jobs[job_id], leaving=True)
            task = asyncio.create_task(self._retire_job(job_id))
            task.add_done_callback(lambda _: self._retiring.pop(job_id, None))
            self._retiring[job_id] = task

    async def _retire_job(self, job_id: str) -> None:
        """Let the job's workers hand over what they hold, and let the job end."""
        expiring = self.jobs[job_id].expiring
        while not self._closing:
            job = self.jobs[job_id]
            if job.state in OVER or not job.workers:
                break
            last = self._last_moment(job) if expiring else None
            left = 60.0 if last is None else last - time.time()
            if left <= 0:
                await self._force_out(job)
                break
            gone = await retire.retire(self.scheduler, job.workers, deadline_s=left)
            if gone >= job.workers:
                break
            if not expiring:
                if len(self.counting()) < self.wanted:  # there is work for it again
                    self.jobs[job_id] = dataclasses.replace(self.jobs[job_id], leaving=False)
                    self.poke()
                    return
                if self._emptied and not self._others(job_id):
                    await retire.force_out(self.scheduler, job.workers, reason="scaled-to-0")
                    break
            left = 60.0 if last is None else last - time.time()
            await asyncio.sleep(min(1.0, max(0.0, left)))  # until somebody can take what it holds
        self._left[job_id] = time.time()
        self._spawn(self._poke_later())

    async def _poke_later(self) -> None:
        await asyncio.sleep(LEAVE_S + 0.1)
        self.poke()

    def _others(self, job_id: str) -> bool:
        return any(job.workers for job in self.counting() if job.id != job_id)

    def _last_moment(self, job: Job) -> float | None:
        """Unix time at which the job is given up, a little before the queue kills it."""
        end = ends_at(job, self.policy)
        early = min(LAST_MOMENT_S, LAST_PART * margin_s(job, self.policy))
        return None if end is None else end - early

    async def _force_out(self, job: Job) -> None:
        """The last moment: what these workers hold or run is computed again elsewhere."""
        self.say(
            f"job {job.id} reaches its walltime and nobody could take over in time: what it holds "
            f"or runs is computed again"
        )
        last = self._last_moment(job)
        life = None if last is None or job.started is None else last - job.started
        errors = await retire.force_out(
            self.scheduler, job.workers, reason="walltime", cut_off=self._cut_off, life_s=life
        )
        for error in errors:
            self.say(f"error: {error}")

    # The end

    def closing(self) -> None:
        """From now on, the end of a worker or a job is meant."""
        self._closing = True
        self.poke()

    async def close(self) -> None:
        """Cancel every job, and see that they are gone.

        Raises
        ------
        QueueError
            Some are still in the queue after `CLOSE_S`; the message names them.
        """
        self.closing()
        if self._submission is not None:  # its jobs' ids are needed
            with contextlib.suppress(Exception):
                await self._submission
        tasks = [self._loop, *self._retiring.values(), *self._cancels]
        for task in tasks:
            if task is not None:
                task.cancel()
        await asyncio.gather(*filter(None, tasks), return_exceptions=True)
        start, pause, problem = time.monotonic(), 0.1, ""
        while ids := self._live():
            waited = time.monotonic() - start
            try:
                # those that run were told by the scheduler to end, and do so in better order
                due = [i for i in ids if waited > END_S or not self.jobs[i].arrived]
                if due:
                    await self.queue.cancel(due)
                self._observe(set(ids), await self._query(ids))
            except QueueError as error:
                problem = f" ({error})"
            if not self._live():
                break
            if waited > CLOSE_S:
                raise QueueError(
                    f"these jobs are still in the queue {CLOSE_S:g} s after they were cancelled"
                    f"{problem}: {', '.join(self._live())}. See them with: hpcdask jobs, and end "
                    f"them with: hpcdask cleanup {self.cluster}"
                )
            await asyncio.sleep(pause)
            pause = min(1.5 * pause, self.poll_interval_s)
