"""Jobs of one kind in a cluster, kept at the number that is wanted."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from distributed.scheduler import TaskState, WorkerState

from hpcdask.errors import HpcdaskError, NoAnswer, NotHere, QueueError, Refused, root_cause
from hpcdask.jobs.state import OVER, JobState, lasting
from hpcdask.queues.job_state import QueueStatus
from hpcdask.spec.names import group_id, parse_worker_name

from . import display, retire
from .job import Job, Policy, ends_at, margin_s, observe, worker_names
from .plan import Failure, History, plan, record

if TYPE_CHECKING:
    from .controller import Controller

#: Seconds between two attempts to submit at a limit of the site; doubled up to the second number.
RETRY_S = (15.0, 300.0)
#: Seconds before the walltime at which workers that nobody could relieve are given up, at most; and
#: that part of the margin.
LAST_MOMENT_S, LAST_PART = 5.0, 0.25
#: Seconds for one attempt to hand over where there is no hurry.
ATTEMPT_S = 60.0
#: Seconds that a cancelled job gets to end before it is cancelled again.
LEAVE_S = 15.0


@dataclass(eq=False)
class Group:
    """Group of equal jobs, which fail, end and are limited by themselves.

    A cluster without groups has one, whose name is empty. Each job has `size` workers, each worker
    `resources`. `jobs` are those that count, and `past` those that are over. `emptied`: the user
    asked for none, so nobody is left to hold results. `failure` says why nothing more is submitted,
    `waits` for what jobs may wait for ever. A queue that is at a limit, or silent, gets no
    submission before `retry_at`, in unix time.
    """

    controller: Controller
    name: str
    size: int
    policy: Policy
    resources: Mapping[str, float]
    jobs: dict[str, Job] = field(default_factory=dict)
    past: dict[str, Job] = field(default_factory=dict)
    wanted: int = 0
    emptied: bool = False
    failure: HpcdaskError | None = None
    waits: str = ""
    submission: asyncio.Task[None] | None = None
    retry_at: float = 0.0
    _retry_s: float = RETRY_S[0]
    _largest: int | None = None  # jobs of a command that a limit may admit
    _unanswered: bool = False  # the queue may have jobs whose ids it did not tell
    _history: History = field(default_factory=History)
    _failing: bool = False
    _waiting_users: int = 0
    _decided: bool = True  # what is wanted has been acted upon

    # Its jobs and workers

    @property
    def prefix(self) -> str:
        """Return the beginning of the names of the group's workers."""
        return group_id(self.controller.folder.name, self.name)

    def enter(self, ids: Collection[str]) -> None:
        """Add jobs that were just submitted."""
        for job_id in ids:
            if job_id not in self.jobs:
                self.past.pop(job_id, None)
                self.jobs[job_id] = Job(job_id, self.size, time.time(), group=self.name)
        self.controller.wake()

    def mark(self, ids: Collection[str], **facts: Any) -> None:
        """Note something about those of these jobs that are the group's."""
        for job_id in ids:
            if job_id in self.jobs:
                self.jobs[job_id] = replace(self.jobs[job_id], **facts)

    def live(self) -> list[str]:
        """Return the ids of the jobs that are not over."""
        return [job.id for job in self.jobs.values() if job.state not in OVER]

    def active(self) -> list[Job]:
        """Return the jobs that are to stay."""
        return [job for job in self.jobs.values() if job.counts]

    def names(self) -> list[str]:
        """Return a name for each worker that is to stay, or that no job was submitted for yet."""
        names = [name for job in self.active() for name in worker_names(self.prefix, job)]
        missing = self.wanted * self.size - len(names)
        return names + [f"{self.prefix}-unsubmitted-{number}" for number in range(missing)]

    def job_of(self, name: str) -> str | None:
        """Return the id of a worker's job; None for other people's workers."""
        parsed = parse_worker_name(self.prefix, name)
        return None if parsed is None else parsed[0]

    def connected(self) -> dict[str, list[WorkerState]]:
        """Return the workers that the scheduler has, by the ids of their jobs."""
        found: dict[str, list[WorkerState]] = {}
        for state in self.controller.scheduler.workers.values():
            if job_id := self.job_of(str(state.name)):
                found.setdefault(job_id, []).append(state)
        return found

    def can_run(self, ts: TaskState) -> bool:
        """Return whether the group's workers have the resources that a Dask task asks for."""
        wanted = (ts.resource_restrictions or {}).items()
        return all(self.resources.get(name, 0) >= amount for name, amount in wanted)

    # What the cluster asks

    def want(self, n: int, *, emptied: bool = False) -> None:
        """Wish for jobs with this many workers in all."""
        self.wanted, self.emptied = math.ceil(n / self.size), emptied
        self._decided = False
        self.controller.wake()

    def reset_failures(self) -> None:
        """Forget earlier failures: the user asks again."""
        self.failure = None
        self._history = History()
        self.retry_at = 0.0
        self.controller.clear_warnings()

    async def wait_submitted(self) -> None:
        """Wait until the wanted jobs are submitted, or raise why they cannot be.

        A user who waits is told of a queue that is silent; for others it is tried again.
        """
        controller = self.controller

        def settled() -> bool:
            enough = self._decided and len(self.active()) >= self.wanted
            asked = controller.closing or self.retry_at > time.time() or enough
            return self.failure is not None or (asked and self.submission is None)

        self._waiting_users += 1
        try:
            async with controller.settled:
                await controller.settled.wait_for(settled)
        finally:
            self._waiting_users -= 1
        if self.failure is not None:
            raise self.failure

    # What the controller asks

    def observe(self, asked: Collection[str], seen: Mapping[str, QueueStatus]) -> None:
        """Fold in the queue's answer and the connected workers."""
        now, closing = time.time(), self.controller.closing
        workers = self.connected()
        copies = {copy for job_id in seen.keys() & self.jobs for copy in seen[job_id].copies}
        # of a submission that got no answer, or made by the queue
        if late := (set(workers) | copies - set(self.past)) - set(self.jobs):
            self.enter(late)
        for job_id, before in list(self.jobs.items()):
            states = workers.get(job_id, [])
            after = observe(
                before,
                seen.get(job_id),
                asked=job_id in asked,
                workers=[str(ws.name) for ws in states],
                held=sum(ws.nbytes for ws in states),
                now=now,
                policy=self.policy,
            )
            ended = after.state in OVER
            if after is not before:
                self.jobs[job_id] = after
                self._history = record(self._history, before, after, now)
                meant = closing or after.cancelled or after.leaving
                fine = meant or after.state is JobState.COMPLETED
                stuck = after.stuck and after.overdue and not before.overdue
                if stuck or (ended and before.state not in OVER and not fine):
                    self.controller.spawn(self._tell_end(after))
            # what the queue forgot might come back, until it was cancelled
            if ended and not states and (after.cancelled or not after.missed):
                self.past[job_id] = self.jobs.pop(job_id)
        if asked and not closing:
            self._warn_of_waiting()

    async def _tell_end(self, job: Job) -> None:
        """Say that a job has ended, after a look at its logs, whose disk may be slow."""
        folder = self.controller.folder
        self.controller.say(await asyncio.to_thread(display.job_ended, job, folder))

    def _warn_of_waiting(self) -> None:
        """Tell once for each reason of jobs to wait that does not end by itself."""
        reports = [job.report() for job in self.active()]
        found = lasting(reports, type(self.controller.queue))
        self.waits = self._named("; ".join(found.values())) if found else ""
        for reason, text in found.items():
            self.controller.warn(f"waits {reason.partition(',')[0]} {self.name}", self._named(text))

    def act(self) -> None:
        """Submit, cancel and retire what `plan` says."""
        self._decided = True
        actions = plan(
            self.wanted,
            self.jobs,
            self._history,
            closable=self._closable(),
            now=time.time(),
            policy=self.policy,
        )
        if actions.failure is not None and self.failure is None and not self._failing:
            self._failing = True
            self.controller.spawn(self._give_up(actions.failure))
        if actions.cancel:
            self.mark(actions.cancel, cancelled=True)
            self.controller.spawn(self._cancel(actions.cancel))
        for job_id in actions.retire:
            self.mark([job_id], leaving=True)
            self.controller.spawn(self._retire(job_id, self.jobs[job_id].restarts))
        if not actions.submit:
            self._largest, self._retry_s = None, RETRY_S[0]
            self.controller.clear_warnings(f"limit {self.name}")
        elif self.submission is None and self.failure is None and time.time() >= self.retry_at:
            self.submission = asyncio.create_task(self._submit(actions.submit))

    def _closable(self) -> list[str]:
        """Return the jobs' ids in the order in which to give them up: idle ones, then others."""
        counting = self.active()
        running = [job for job in counting if job.workers]
        if len(counting) <= self.wanted or not running:
            return []
        idle = retire.closable(self.controller.scheduler, self.job_of)
        order = {job_id: number for number, job_id in enumerate(idle)}
        running.sort(key=lambda job: (order.get(job.id, len(order)), job.held))
        return [job.id for job in running]

    async def finish_submission(self) -> None:
        """Learn at the end which jobs were submitted."""
        if self.submission is not None:  # its jobs' ids are needed
            await asyncio.wait([self.submission])
        async with self.controller.settled:  # a scale() that waits for more jobs
            self.controller.settled.notify_all()
        if self._unanswered:
            with contextlib.suppress(QueueError):
                await self._adopt(self.jobs)

    # Submitting

    async def _submit(self, count: int) -> None:
        """Submit up to so many jobs with one command; the next step finds what is missing then."""
        controller = self.controller
        try:
            await self._submit_once(count)
        except QueueError as error:
            if error.for_now:
                self._largest, self.retry_at = None, time.time() + self._retry_s
                self._retry_s = min(2 * self._retry_s, RETRY_S[1])
            if error.for_now and not (self._waiting_users and isinstance(error, NoAnswer)):
                there = f"{len(self.active())} of {self.wanted} jobs are there"
                text = f"{self._named(error)}. {there}; trying again later"
                controller.warn(f"limit {self.name}", text)
            else:
                error.args = (display.no_submission(error, controller.queue, controller.folder),)
                self._fail(error)
        except Exception as error:  # such as a full disk: say it rather than try for ever
            self._fail(QueueError(f"cannot submit: {type(error).__name__}: {error}"))
        finally:
            self.submission = None
            controller.wake()

    async def _submit_once(self, count: int) -> None:
        queue, folder = self.controller.queue, self.controller.folder
        try:
            if self._unanswered:
                await self._adopt(self.jobs)
            largest = self._largest or max(1, await queue.limit())
        except NotHere:
            raise
        except QueueError as error:  # no job was asked for yet, so that it is tried again
            raise NoAnswer(str(error)) from error
        # the shared file system may be slow
        submission = await asyncio.to_thread(folder.new_submission, self.name)
        before, count = set(self.jobs), min(count, largest, self.wanted - len(self.active()))
        if count <= 0 or self.controller.closing:
            return
        try:
            ids = await queue.submit(str(submission.script), count)
        except Refused as error:
            if not error.fewer or count == 1:
                raise
            self._largest = count // 2
        except QueueError:
            self._unanswered = True
            with contextlib.suppress(QueueError):
                if await self._adopt(before) >= count:
                    return
            raise
        else:
            self.enter(ids)
            await asyncio.to_thread(submission.record, ids)

    async def _adopt(self, known: Collection[str]) -> int:
        """Add the jobs that a command without an answer made, and return their number."""
        tagged = await self.controller.queue.tagged()
        mine = [job_id for job_id, tag in tagged.items() if tag == f"hpcdask:{self.prefix}"]
        if found := [job_id for job_id in mine if job_id not in known]:
            folder = self.controller.folder
            await asyncio.to_thread(lambda: folder.new_submission(self.name).record(found))
            self.enter(found)
        return len(found)

    async def _give_up(self, failure: Failure) -> None:
        """Fail with what the last job wrote."""
        facts = failure, self.policy.start_timeout_s, self.controller.folder
        self._fail(await asyncio.to_thread(display.jobs_failed, *facts))
        self._failing = False
        self.controller.wake()

    def _named(self, error: HpcdaskError | str) -> str:
        """Return a text with the group's name, if it has one."""
        return f"group {self.name}: {error}" if self.name else str(error)

    def _fail(self, error: HpcdaskError) -> None:
        if self.controller.closing:  # such as threads that have ended with the program
            return
        error.args = (self._named(error),)
        self.failure = error
        if not self._waiting_users:  # they are told by the exception
            self.controller.say(display.stopped(error))

    # Ending

    async def _cancel(self, ids: Collection[str]) -> None:
        """Cancel jobs, and again later while the queue still shows them or does not answer."""
        while ids:
            try:
                await self.controller.queue.cancel(ids)
                self.controller.clear_warnings("cancel")
            except Exception as error:  # whatever it is, the jobs must not stay
                self.controller.warn("cancel", str(error))
            await asyncio.sleep(LEAVE_S)
            # a job that the queue has started again has a life of its own
            known = [self.jobs[job_id] for job_id in ids if job_id in self.jobs]
            ids = [job.id for job in known if job.cancelled and job.state not in OVER]

    async def _retire(self, job_id: str, life: int) -> None:
        """Make a job's workers hand over what they hold, so that the job ends."""
        try:
            while (job := self.jobs.get(job_id)) and job.leaving and job.restarts == life:
                if not job.workers or job.state in OVER or await self._hand_over(job):
                    break
            self.controller.clear_warnings("retire")
        except Exception as error:  # a job must not stay for ever as one that leaves
            problem = f"job {job_id} cannot hand over what it holds, and is asked again"
            self.controller.warn("retire", f"{problem}: {root_cause(error)}")
            self.mark([job_id], leaving=False)

    async def _hand_over(self, job: Job) -> bool:
        """Try to make a job's workers hand over, and return whether that is settled."""
        scheduler, end = self.controller.scheduler, ends_at(job, self.policy)
        # a little before the queue kills it
        early = min(LAST_MOMENT_S, LAST_PART * margin_s(job, self.policy))
        left = math.inf if end is None else end - early - time.time()
        if left <= 0:
            self.controller.say(
                f"job {job.id} reaches its walltime and nobody could take over in time: what it "
                f"holds or runs is computed again"
            )
            await retire.force_out(scheduler, job.workers, reason="walltime", expected=False)
            return True
        deadline_s = left if job.expiring else min(left, ATTEMPT_S)
        if await retire.retire(scheduler, job.workers, deadline_s=deadline_s) >= job.workers:
            return True
        if not job.expiring:
            if len(self.active()) < self.wanted:  # there is work for it again
                self.mark([job.id], leaving=False)
                self.controller.wake()
                return True
            if self.emptied and not any(one.workers for one in self.active()):
                await retire.force_out(scheduler, job.workers, reason="scaled-to-0")
                return True
        await asyncio.sleep(1.0)  # until somebody can take what it holds
        return False
