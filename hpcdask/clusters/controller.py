"""Keeps as many jobs as are wanted: when to query the queue, and when to act, for all groups."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass, field
from typing import Any

from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.scheduler import TaskState

from hpcdask.client.defaults import send_at_once
from hpcdask.errors import ClusterError, HpcdaskError, QueueError, root_cause
from hpcdask.jobs.folder import ClusterFolder
from hpcdask.jobs.state import OVER, ClusterReport
from hpcdask.logs import DIED, say
from hpcdask.queues.base import Queue
from hpcdask.queues.job_state import QueueStatus

from . import retire
from .group import Group
from .job import Job, Policy

#: Why a cluster ends that nobody closed.
SHUT_DOWN = (
    "the scheduler was shut down, such as by Client.shutdown, so its jobs are cancelled and this "
    "cluster is closed: make a new one"
)
#: Longest pause between two queries of a queue that does not answer.
BACK_OFF_S = 120.0
#: Pause after a step in seconds for each job, and at most: a step looks at all jobs and takes about
#: 0.015 ms for each, and many workers may come at once.
STEP_PAUSE_S, STEP_PAUSE_MAX_S = 1e-3, 1.0
#: Least seconds between two writings of the jobs' reports.
REPORT_PAUSE_S = 0.5
#: Seconds that jobs get to end by themselves when their scheduler closes; seconds between two
#: requests to cancel them; seconds until all must be gone.
END_S, REPEAT_S, CLOSE_S = 3.0, 10.0, 60.0


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


@dataclass(eq=False)
class Controller:
    """Control of the jobs of a cluster, which come in groups.

    Three tasks run: one queries the queue once per interval, one submits, cancels and retires what
    each group wants, and one writes the jobs' reports where `hpcdask list --jobs` reads them.
    Commands of the queue run in threads. `closing`: from now on, the end of a worker or a job is
    meant. `settled` is notified after each step. `over` is called when somebody else closes the
    scheduler.
    """

    scheduler: Scheduler
    queue: Queue
    folder: ClusterFolder
    poll_interval_s: float
    say: Callable[[str], None]
    over: Callable[[], None] = lambda: None
    groups: dict[str, Group] = field(default_factory=dict)
    closing: bool = False
    settled: asyncio.Condition = field(default_factory=asyncio.Condition)
    _warned: set[str] = field(default_factory=set)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _reporting: asyncio.Event = field(default_factory=asyncio.Event)
    _nannies: dict[str, str] = field(default_factory=dict)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def add_group(self, name: str, size: int, policy: Policy, **resources: float) -> Group:
        """Add a group of jobs of `size` workers, each of which has these resources."""
        self.groups[name] = Group(self, name, size, policy, resources)
        return self.groups[name]

    # What the cluster asks

    def start(self) -> None:
        """Begin to watch. The queue is not asked before there is a job."""
        retire.ignore_removed(self.scheduler)
        self.scheduler.add_plugin(WorkerEvents(self))
        for work in (self._act(), self._query(), self._report()):
            self.spawn(work)

    def jobs(self) -> list[Job]:
        """Return all jobs of all groups, including those that are over."""
        both = (some for group in self.groups.values() for some in (group.past, group.jobs))
        return [job for some in both for job in some.values()]

    @property
    def failure(self) -> HpcdaskError | None:
        """Return the error of the first group that submits no more jobs; None while all is well."""
        return next(filter(None, (group.failure for group in self.groups.values())), None)

    @property
    def waits(self) -> str:
        """Return why jobs may wait for ever; empty if none does."""
        return "; ".join(filter(None, (group.waits for group in self.groups.values())))

    def wake(self) -> None:
        """Decide again, since something has changed."""
        self._changed.set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Start a task that ends with the controller."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def warn(self, subject: str, text: str) -> None:
        """Tell about a state of things once, until `clear_warnings`."""
        if subject not in self._warned:
            self._warned.add(subject)
            self.say(f"warning: {text}")

    def clear_warnings(self, *subjects: str) -> None:
        """Forget these states of things, which are over; without any, all."""
        self._warned.difference_update(subjects or tuple(self._warned))

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
            await group.finish_submission()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            await self._end_jobs()
        finally:  # from now on only the queue tells of the jobs
            with contextlib.suppress(OSError, RuntimeError):
                await asyncio.to_thread(self.folder.write_report, ClusterReport())

    # The queue

    def _live(self) -> list[str]:
        return [job_id for group in self.groups.values() for job_id in group.live()]

    async def _query(self) -> None:
        """Query the queue about all jobs, one interval apart, or more while it does not answer."""
        failed = 0
        while True:
            pause_s = min(BACK_OFF_S, self.poll_interval_s * 2 ** min(failed, 10))
            await asyncio.sleep(max(self.poll_interval_s, pause_s))
            self.wake()  # for what is put off, and for Dask tasks that would wait for ever
            if not (ids := self._live()):
                continue
            try:
                self.observe(set(ids), await self.ask(ids))
                failed = 0
                self.clear_warnings("query")
            except Exception as error:  # an answer that makes no sense may be any exception
                failed += 1
                unknown = "What the jobs do is unknown until it answers"
                self.warn("query", f"{_words(error)}. {unknown}")

    async def ask(self, ids: Collection[str]) -> dict[str, QueueStatus]:
        """Query the queue, and its accounting for the jobs that have left it."""
        seen = await self.queue.query(ids)
        if gone := [job_id for job_id in ids if job_id not in seen]:
            try:
                seen |= await self.queue.departed(gone)
                self.clear_warnings("accounting")
            except Exception as error:  # must not hide what the queue has shown
                unknown = "How jobs ended is not known without it"
                self.warn("accounting", f"{_words(error)}. {unknown}")
        return seen

    def observe(self, asked: Collection[str], seen: dict[str, QueueStatus]) -> None:
        """Fold in the queue's answer and the connected workers."""
        for group in self.groups.values():
            group.observe(asked, seen)
        self._reporting.set()

    async def _end_jobs(self) -> None:
        start, pause, problem, due_s = time.monotonic(), 0.1, "", 0.0
        while ids := self._live():
            passed_s = time.monotonic() - start
            try:
                if passed_s >= due_s:
                    # those that run were told by the scheduler to end, and do so in better order
                    spared = set() if due_s else {job.id for job in self.jobs() if job.arrived}
                    due_s += REPEAT_S if due_s else END_S
                    if chosen := [job_id for job_id in ids if job_id not in spared]:
                        await self.queue.cancel(chosen)
                        for group in self.groups.values():
                            group.mark(chosen, cancelled=True)
                self.observe(set(ids), await self.ask(ids))
            except QueueError as error:
                problem = f" ({error})"
            if passed_s > CLOSE_S and (left := self._live()):
                raise QueueError(
                    f"these jobs are still in the queue {CLOSE_S:g} s after they were cancelled"
                    f"{problem}: {', '.join(left)}. See them with: hpcdask list --jobs, and end "
                    f"them with: hpcdask down {self.folder.name}"
                )
            await asyncio.sleep(pause if self._live() else 0)
            pause = min(1.5 * pause, 2.0)

    # Acting

    async def _act(self) -> None:
        while not self.closing:
            await self._changed.wait()
            self._changed.clear()
            try:
                self._step()
            except Exception as error:  # a mistake here must not leave the jobs unwatched
                self.say(f"error: {type(error).__name__}: {error}")
                await asyncio.sleep(self.poll_interval_s)
            async with self.settled:
                self.settled.notify_all()
            await asyncio.sleep(min(STEP_PAUSE_MAX_S, STEP_PAUSE_S * len(self._live())))

    def _step(self) -> None:
        self.observe(set(), {})
        if not self.closing:
            for group in self.groups.values():
                group.act()
            self._fail_hopeless()

    def _fail_hopeless(self) -> None:
        """Fail the Dask tasks that only groups without jobs could run which submit no more."""
        groups = list(self.groups.values())
        ended = [group for group in groups if group.failure is not None and not group.live()]

        def hopeless(ts: TaskState) -> bool:
            able = [group for group in groups if group.can_run(ts)]
            return bool(able) and all(group in ended for group in able)

        for group in ended:
            assert group.failure is not None
            if len(ended) < len(groups):
                retire.fail_waiting(self.scheduler, group.failure, hopeless)
            elif not self.scheduler.workers:
                retire.fail_waiting(self.scheduler, group.failure)

    # Telling other processes

    async def _report(self) -> None:
        """Write the jobs' reports when they change, in a thread and one writing at a time."""
        last: ClusterReport | None = ClusterReport(address=self.scheduler.address)
        while True:
            await self._reporting.wait()
            self._reporting.clear()
            failed = f"the cluster submits no more jobs: {self.failure}" if self.failure else ""
            report = ClusterReport(
                tuple(job.report() for job in self.jobs() if job.state not in OVER),
                self.scheduler.address,
                self._known_nannies(),
                failed or self.waits,
            )
            if report == last:
                continue
            last = report
            try:
                await asyncio.to_thread(self.folder.write_report, report)
                self.clear_warnings("reports")
            except RuntimeError:  # at the end of Python there are no threads
                return
            except Exception as error:  # the jobs go on without
                last = None
                self.warn("reports", f"hpcdask list cannot be told of the jobs: {error}")
            await asyncio.sleep(REPORT_PAUSE_S)

    def _known_nannies(self) -> dict[str, str]:
        """Return the nannies of workers that are or were there, while their jobs are not over."""
        live, groups = set(self._live()), self.groups.values()
        now = {str(ws.name): ws.nanny or "" for ws in self.scheduler.workers.values()}
        known = (self._nannies | now).items()
        self._nannies = {
            name: nanny for name, nanny in known if any(one.job_of(name) in live for one in groups)
        }
        return self._nannies


def _words(error: Exception) -> str:
    """Return the error of a query; an answer that makes no sense may be any exception."""
    return str(error) if isinstance(error, QueueError) else root_cause(error)
