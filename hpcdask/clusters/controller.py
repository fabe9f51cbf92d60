"""Control of a cluster's jobs, which come in groups: as many as are wanted, and no more."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.scheduler import TaskState, WorkerState

from hpcdask.errors import ClusterError, HpcdaskError, NoAnswer, NotHere, QueueError, Refused
from hpcdask.jobs.detached import scheduler_job
from hpcdask.jobs.folder import ClusterFolder
from hpcdask.jobs.state import ClusterReport, lasting
from hpcdask.logs import DIED, say
from hpcdask.queues.base import Queue
from hpcdask.queues.job_state import JobState
from hpcdask.spec.names import group_id, job_of_worker
from hpcdask.upstream.distributed import send_at_once

from . import display, retire
from .job import Actions, Answer, Job, Policy, ends_at, margin_s, observe, plan, went_wrong

#: Why a cluster ends that nobody closed.
SHUT_DOWN = (
    "the scheduler was shut down, such as by Client.shutdown, so its jobs are cancelled and this "
    "cluster is closed: make a new one"
)
#: Longest pause between two queries of a queue that does not answer.
BACK_OFF_S = 120.0
#: Seconds between two attempts to submit at a limit of the site.
RETRY_S = 60.0
#: Pause after a step in seconds for each job, at most 1 s in all: a step takes about 0.015 ms for
#: each, and many workers may come at once.
STEP_PAUSE_S = 1e-3
#: Ended jobs of a group that are remembered.
ENDED_MAX = 1000
#: Seconds in which a warning on the same subject is not repeated.
WARNED_S = 3600.0
#: Part of the margin before the walltime in which workers that nobody could relieve are given up.
LAST_PART = 0.05
#: Seconds for one attempt to hand over where there is no hurry.
ATTEMPT_S = 60.0
#: Seconds that a cancelled job gets to end before it is cancelled again.
LEAVE_S = 15.0
#: Seconds that jobs get to end by themselves when their scheduler closes, and until all must be
#: gone.
END_S, CLOSE_S = 3.0, 60.0


@dataclass(eq=False)
class Group:
    """Group of equal jobs, which fail, end and are limited by themselves.

    A cluster without groups has one, whose name is empty. Each job has `size` workers, each worker
    `resources`. `jobs` includes the latest of those that are over. `emptied`: the user asked for
    none, so nobody is left to hold results. `failure` says why nothing more is submitted. A queue
    that is at a limit, or silent, gets no submission before `retry_at`, in unix time. After an
    `unanswered` submission it may have jobs whose ids it did not tell.
    """

    controller: Controller
    name: str
    size: int
    policy: Policy
    resources: Mapping[str, float]
    jobs: dict[str, Job] = field(default_factory=dict)
    wanted: int = 0
    emptied: bool = False
    failure: HpcdaskError | None = None
    submission: asyncio.Task[None] | None = None
    retry_at: float = 0.0
    unanswered: bool = False
    _waiting_users: int = 0

    # Its jobs and workers

    @property
    def prefix(self) -> str:
        """Return the beginning of the names of the group's workers."""
        return group_id(self.controller.folder.name, self.name)

    def enter(self, ids: Collection[str]) -> None:
        """Add jobs that are not known yet."""
        for job_id in ids:
            if job_id not in self.jobs:
                self.jobs[job_id] = Job(job_id, self.size, time.time(), group=self.name)

    def mark(self, ids: Collection[str], **facts: Any) -> None:
        """Note something about these jobs."""
        for job_id in ids:
            self.jobs[job_id] = replace(self.jobs[job_id], **facts)

    def active(self) -> list[Job]:
        """Return the jobs that are to stay."""
        return [job for job in self.jobs.values() if job.counts]

    def names(self) -> list[str]:
        """Return a name for each worker that is to stay, or that no job was submitted for yet."""
        names = [name for job in self.active() for name in job.worker_names(self.prefix)]
        missing = self.wanted * self.size - len(names)
        return names + [f"{self.prefix}-unsubmitted-{number}" for number in range(missing)]

    def job_of(self, name: str) -> str | None:
        """Return the id of a worker's job; None for other people's workers."""
        return job_of_worker(self.prefix, name)

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

    def waits(self) -> dict[str, str]:
        """Return a text on jobs that may wait for ever, by the queue's reasons."""
        reports = [job.report() for job in self.active()]
        found = lasting(reports, type(self.controller.queue))
        return {reason: self._named(text) for reason, text in found.items()}

    def _named(self, error: HpcdaskError | str) -> str:
        """Return a text with the group's name, if it has one."""
        return f"group {self.name}: {error}" if self.name else str(error)

    # What the cluster asks

    def want(self, n: int, *, emptied: bool = False) -> None:
        """Wish for jobs with this many workers in all."""
        self.wanted, self.emptied = math.ceil(n / self.size), emptied
        self.controller.wake()

    def reset_failures(self) -> None:
        """Forget earlier failures: the user asks again."""
        self.failure = None
        self.retry_at = 0.0
        self.mark(self.jobs, died=None)
        self.controller.warned.clear()

    async def scale(self, n: int) -> None:
        """Wish for workers as the user does, and wait until the queue has their jobs.

        Raises the error that keeps them from being submitted. A user who waits is told of a queue
        that is silent; for others it is tried again.
        """
        self.reset_failures()
        self.want(n, emptied=not n)
        self._waiting_users += 1
        try:
            self.act()
            while self.submission is not None:
                await asyncio.wait([self.submission])
        finally:
            self._waiting_users -= 1
        if self.failure is not None:
            raise self.failure

    # What the controller asks

    def observe(self, answer: Answer) -> None:
        """Fold in the queue's answer and the connected workers."""
        now, controller, workers = time.time(), self.controller, self.connected()
        mine = [answer[job_id] for job_id in answer.keys() & self.jobs]
        # of a submission that got no answer, or made by the queue
        self.enter([*workers, *(copy for seen in mine if seen for copy in seen.copies)])
        for job_id, before in list(self.jobs.items()):
            states = workers.get(job_id, [])
            if before.is_over and not (states or before.workers):
                continue
            held = {str(ws.name): ws.nbytes for ws in states}
            self.jobs[job_id] = after = observe(before, answer, held, now, self.policy)
            meant = controller.closing or after.cancelled or after.leaving
            ended = after.is_over and not before.is_over
            stuck = after.stuck and not (before.stuck or after.cancelled)
            if stuck or (ended and not meant and after.state is not JobState.COMPLETED):
                controller.say(display.job_ended(after, controller.folder))
        past = [job.id for job in self.jobs.values() if job.is_over and not job.workers]
        for job_id in past[:-ENDED_MAX]:
            del self.jobs[job_id]
        if answer and not controller.closing:
            for reason, text in self.waits().items():
                controller.warn(f"waits {reason.partition(',')[0]} {self.name}", text)

    def act(self) -> None:
        """Submit, cancel and retire what `plan` says."""
        actions = self._plan()
        if actions.cancel:
            self.mark(actions.cancel, cancelled=True)
            self.controller.spawn(self._cancel(actions.cancel))
        self.mark(actions.retire, leaving=True)
        for job_id in actions.retire:
            self.controller.spawn(self._retire(job_id, self.jobs[job_id].restarts))
        due = actions.failed or (actions.submit and time.time() >= self.retry_at)
        if due and self.submission is None and self.failure is None:
            self.submission = asyncio.create_task(self._submit())

    def _plan(self) -> Actions:
        counting = self.active()
        crowded = len(counting) > self.wanted and any(job.workers for job in counting)
        idle = retire.closable(self.controller.scheduler, self.job_of) if crowded else []
        return plan(self.wanted, self.jobs.values(), time.time(), self.policy, idle)

    # Submitting

    async def _submit(self) -> None:
        """Submit the jobs that are missing, or fail where too many have gone wrong."""
        controller = self.controller
        try:
            if self._plan().failed:
                starts, died = went_wrong(self.jobs.values(), time.time())
                facts = starts, died, self.policy, controller.folder
                raise await asyncio.to_thread(display.jobs_failed, *facts)  # its disk may be slow
            await self._submit_missing()
        except Exception as error:
            silent = isinstance(error, NoAnswer) and self._waiting_users
            if isinstance(error, QueueError) and error.for_now and not silent:
                there = f"{len(self.active())} of {self.wanted} jobs are there"
                text = f"{self._named(error)}. {there}; trying again later"
                controller.warn(f"limit {self.name}", text)
                self.retry_at = time.time() + RETRY_S
            else:
                self._fail(error)
        finally:
            self.submission = None
            controller.wake()

    async def _submit_missing(self) -> None:
        """Submit jobs, as many with one command as the queue takes."""
        queue, folder = self.controller.queue, self.controller.folder
        try:
            if self.unanswered:
                await self.adopt()
            largest = max(1, await queue.limit())
        except NotHere:
            raise
        except QueueError as error:  # no job was asked for yet, so that it is tried again
            raise NoAnswer(str(error)) from error
        while not self.controller.closing and (count := min(self._plan().submit, largest)) > 0:
            # the shared file system may be slow
            script = await asyncio.to_thread(folder.begin_submission, self.name)
            try:
                ids = await queue.submit(str(script), count)
            except Refused as error:
                if not error.fewer or count == 1:
                    raise
                largest = count // 2
            except QueueError:
                self.unanswered = True
                with contextlib.suppress(QueueError):
                    if await self.adopt():
                        continue
                raise
            else:
                await self._add(ids)

    async def _add(self, ids: Collection[str]) -> None:
        """Add submitted jobs, and record them."""
        self.enter(ids)
        await asyncio.to_thread(self.controller.folder.record, ids, self.name)

    async def adopt(self) -> bool:
        """Add the jobs that a command without an answer made; return whether there are some."""
        tagged, mine = await self.controller.queue.tagged(), f"hpcdask:{self.prefix}"
        found = [one for one, tag in tagged.items() if tag == mine and one not in self.jobs]
        if found:
            await self._add(found)
        return bool(found)

    def _fail(self, error: Exception) -> None:
        if self.controller.closing:  # such as threads that have ended with the program
            return
        if not isinstance(error, HpcdaskError):  # such as a full disk: not tried for ever
            error = QueueError(f"cannot submit: {type(error).__name__}: {error}")
        text = str(error)
        denied = isinstance(error, QueueError) and self.controller.queue.denied.search(text)
        if (denied or isinstance(error, NotHere)) and scheduler_job(self.controller.folder):
            text = f"{text.rstrip('. ')}. {display.FROM_LOGIN_NODE}"
        error.args = (self._named(text),)
        self.failure = error
        if not self._waiting_users:  # they are told by the exception
            joint = "\n" if "\n" in text else ". "  # its end may be that of a log
            then = "Nothing more is submitted until scale() or adapt() asks again"
            self.controller.say(f"error: {error}{joint}{then}")

    # Ending

    async def _cancel(self, ids: Collection[str]) -> None:
        """Cancel jobs, and again later while the queue still shows them or does not answer."""
        while ids:
            try:
                await self.controller.queue.cancel(ids)
            except Exception as error:  # whatever it is, the jobs must not stay
                self.controller.warn("cancel", str(error))
            await asyncio.sleep(LEAVE_S)
            # a job that the queue has started again has a life of its own
            jobs = [self.jobs[job_id] for job_id in self.jobs.keys() & ids]
            ids = [job.id for job in jobs if job.cancelled and not job.is_over]

    async def _retire(self, job_id: str, life: int) -> None:
        """Make a job's workers hand over what they hold, so that the job ends."""
        controller = self.controller
        scheduler = controller.scheduler
        try:
            while (job := self.jobs[job_id]).leaving and job.restarts == life and job.workers:
                early_s = LAST_PART * margin_s(job, self.policy)  # before the queue kills it
                left_s = ends_at(job, self.policy) - early_s - time.time()
                if left_s <= 0:
                    controller.say(
                        f"job {job.id} reaches its walltime and nobody could take over in time: "
                        f"what it holds or runs is computed again"
                    )
                    await retire.force_out(scheduler, job.workers, expected=False)
                    return
                deadline_s = left_s if job.expiring else min(left_s, ATTEMPT_S)
                gone = await retire.retire(scheduler, job.workers, deadline_s=deadline_s)
                if gone >= job.workers:
                    return
                if not job.expiring and len(self.active()) < self.wanted:
                    self.mark([job_id], leaving=False)  # there is work for it again
                    controller.wake()
                elif self.emptied and not any(other.workers for other in self.active()):
                    await retire.force_out(scheduler, job.workers)
                else:
                    await asyncio.sleep(1.0)  # until somebody can take what it holds
        except Exception as error:  # a job must not stay for ever as one that leaves
            problem = f"job {job_id} cannot hand over what it holds, and is asked again"
            controller.warn("retire", f"{problem}: {_words(error)}")
            self.mark([job_id], leaving=False)


@dataclass(eq=False)
class Controller:
    """Control of the jobs of a cluster, which come in groups.

    Two tasks run: one queries the queue once per interval, and writes the jobs' reports where
    `hpcdask list --jobs` reads them; one submits, cancels and retires what each group wants.
    Commands of the queue run in threads. `closing`: from now on, the end of a worker or a job is
    meant. `over` is called when somebody else closes the scheduler.
    """

    scheduler: Scheduler
    queue: Queue
    folder: ClusterFolder
    poll_interval_s: float
    say: Callable[[str], None]
    over: Callable[[], None] = lambda: None
    groups: dict[str, Group] = field(default_factory=dict)
    closing: bool = False
    warned: dict[str, float] = field(default_factory=dict)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _nannies: dict[str, str] = field(default_factory=dict)
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    # What the cluster asks

    def start(self) -> None:
        """Begin to watch. The queue is not asked before there is a job."""
        retire.ignore_removed(self.scheduler)
        self.scheduler.add_plugin(WorkerEvents(self))
        self.spawn(self._act())
        self.spawn(self._watch())

    def jobs(self) -> list[Job]:
        """Return all jobs of all groups, including those that are over."""
        return [job for group in self.groups.values() for job in group.jobs.values()]

    def live(self) -> list[str]:
        """Return the ids of the jobs that are not over."""
        return [job.id for job in self.jobs() if not job.is_over]

    @property
    def failure(self) -> HpcdaskError | None:
        """Return the error of the first group that submits no more jobs; None while all is well."""
        return next(filter(None, (group.failure for group in self.groups.values())), None)

    @property
    def waits(self) -> str:
        """Return why jobs may wait for ever; empty if none does."""
        return "; ".join(text for group in self.groups.values() for text in group.waits().values())

    def wake(self) -> None:
        """Decide again, since something has changed."""
        self._changed.set()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Start a task that ends with the controller."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def warn(self, subject: str, text: str) -> None:
        """Tell about a state of things, but not again and again."""
        now = time.monotonic()
        if now - self.warned.get(subject, -math.inf) >= WARNED_S:
            self.warned[subject] = now
            self.say(f"warning: {text}")

    def expect_end(self) -> None:
        """Take the end of a worker or a job for meant from now on."""
        self.closing = True
        self.wake()

    async def close(self) -> None:
        """Cancel every job, and see that they are gone.

        Raises QueueError if some are still in the queue; the message names them. It may be called
        again then.
        """
        self.expect_end()
        for group in self.groups.values():
            if group.submission is not None:
                await asyncio.wait([group.submission])
            if group.unanswered:
                with contextlib.suppress(QueueError):
                    await group.adopt()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            await self._end_jobs()
        finally:  # from now on only the queue tells of the jobs
            with contextlib.suppress(OSError, RuntimeError):
                await asyncio.to_thread(self.folder.write_report, ClusterReport())

    async def _end_jobs(self) -> None:
        start, pause_s, problem = time.monotonic(), 0.0, ""
        # those that run were told by the scheduler to end, and do so in better order
        due_s = {job.id: END_S if job.arrived_at else 0.0 for job in self.jobs()}
        while ids := self.live():
            await asyncio.sleep(pause_s)
            pause_s = min(1.5 * pause_s + 0.1, 2.0)
            passed_s = time.monotonic() - start
            if passed_s > CLOSE_S:
                raise QueueError(
                    f"these jobs are still in the queue {CLOSE_S:g} s after they were cancelled"
                    f"{problem}: {', '.join(ids)}. See them with: hpcdask list --jobs, and end "
                    f"them with: hpcdask down {self.folder.name}"
                )
            try:
                if due := [job_id for job_id in ids if due_s.get(job_id, 0.0) <= passed_s]:
                    await self.queue.cancel(due)
                    due_s |= dict.fromkeys(due, passed_s + LEAVE_S)
                    for group in self.groups.values():
                        group.mark(group.jobs.keys() & due, cancelled=True)
                self.observe(await self.ask(ids))
            except QueueError as error:
                problem = f" ({error})"

    # Watching

    async def _watch(self) -> None:
        """Query the queue about all jobs, one interval apart, or more while it does not answer."""
        pause_s, told = self.poll_interval_s, ClusterReport(address=self.scheduler.address)
        while True:
            await asyncio.sleep(pause_s)
            try:
                if ids := self.live():
                    self.observe(await self.ask(ids))
                pause_s = self.poll_interval_s
            except Exception as error:  # an answer that makes no sense may be any exception
                pause_s = max(pause_s, min(2 * pause_s, BACK_OFF_S))
                unknown = "What the jobs do is unknown until it answers"
                self.warn("query", f"{_words(error)}. {unknown}")
            self.wake()  # for what is put off, and for Dask tasks that would wait for ever, too
            try:
                if (report := self.report()) != told:
                    await asyncio.to_thread(self.folder.write_report, report)
                    told = report
            except Exception as error:  # the jobs go on without
                self.warn("reports", f"hpcdask list cannot be told of the jobs: {error}")

    def report(self) -> ClusterReport:
        """Return what other processes are told of the cluster.

        Nannies are known until their job is over, even if their worker is gone.
        """
        live = [job for job in self.jobs() if not job.is_over]
        names = {name for job in live for name in job.worker_names(self.groups[job.group].prefix)}
        now = {str(ws.name): ws.nanny or "" for ws in self.scheduler.workers.values()}
        known = (self._nannies | now).items()
        self._nannies = {name: nanny for name, nanny in known if name in names}
        failed = f"the cluster submits no more jobs: {self.failure}" if self.failure else ""
        jobs = tuple(job.report() for job in live)
        return ClusterReport(jobs, self.scheduler.address, self._nannies, failed or self.waits)

    async def ask(self, ids: Collection[str]) -> Answer:
        """Query the queue, and its accounting for the jobs that have left it."""
        seen = await self.queue.query(ids)
        if gone := [job_id for job_id in ids if job_id not in seen]:
            try:
                seen |= await self.queue.departed(gone)
            except Exception as error:  # must not hide what the queue has shown
                unknown = "How jobs ended is not known without it"
                self.warn("accounting", f"{_words(error)}. {unknown}")
        return dict.fromkeys(ids) | seen

    def observe(self, answer: Answer) -> None:
        """Fold in the queue's answer and the connected workers."""
        for group in self.groups.values():
            group.observe(answer)

    # Acting

    async def _act(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                self.step()
            except Exception as error:  # a mistake here must not leave the jobs unwatched
                self.say(f"error: {type(error).__name__}: {error}")
                await asyncio.sleep(self.poll_interval_s)
            await asyncio.sleep(min(1.0, STEP_PAUSE_S * len(self.live())))

    def step(self) -> None:
        """Look at the workers, and do what is to be done for each group."""
        self.observe({})
        if not self.closing:
            for group in self.groups.values():
                group.act()
            self._fail_hopeless()

    def _fail_hopeless(self) -> None:
        """Fail the Dask tasks that only groups without jobs could run which submit no more."""
        groups = list(self.groups.values())
        ended = [
            group
            for group in groups
            if group.failure is not None and all(job.is_over for job in group.jobs.values())
        ]
        all_ended = len(ended) == len(groups)

        def is_hopeless(ts: TaskState) -> bool:
            able = [group for group in groups if group.can_run(ts)]
            return all_ended or (bool(able) and all(group in ended for group in able))

        if ended and not (all_ended and self.scheduler.workers):
            assert ended[0].failure is not None
            retire.fail_waiting(self.scheduler, ended[0].failure, is_hopeless)


class WorkerEvents(SchedulerPlugin):
    """Plug-in that passes on workers that come, go or die, and the scheduler's end."""

    name = "hpcdask-arrivals"

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        send_at_once(scheduler.stream_comms[worker])
        self._controller.wake()

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        self._controller.wake()

    def log_event(self, topic: str, msg: Any) -> None:
        if topic == DIED:  # a nanny's line on its worker's death
            say(str(msg))

    async def before_close(self) -> None:
        """End the cluster, since somebody else closes the scheduler, unless the end is meant."""
        controller = self._controller
        if not controller.closing:
            for group in controller.groups.values():
                group.failure = ClusterError(SHUT_DOWN)
            controller.say(f"error: {SHUT_DOWN}")
            controller.expect_end()
            controller.over()


def _words(error: Exception) -> str:
    """Return the text of an error, which may be any exception if an answer makes no sense."""
    return str(error) if isinstance(error, QueueError) else f"{type(error).__name__}: {error}"
