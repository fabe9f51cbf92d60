"""What the end of a worker asks of a real scheduler: nothing is lost, nothing is counted wrongly.

Most tests hold scheduler, workers and client in one event loop, with the scheduler's own checks of
its state on. Dask tasks that have to run on wait at a gate.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import wraps
from operator import add
from tempfile import TemporaryDirectory
from typing import Any

import dask
import pytest
from distributed import Client, KilledWorker, Scheduler, Status, Worker, secede, wait
from distributed.diagnostics.plugin import SchedulerPlugin

from hpcdask.clusters import retire
from hpcdask.errors import JobsFailed
from launching import until

LONG_S = 60  # for what must not take long, on a busy machine


@dataclass
class Gate:
    """Dask tasks that have come to it, and whether they may pass."""

    came: list[Any] = field(default_factory=list)
    open: threading.Event = field(default_factory=threading.Event)


GATES: dict[str, Gate] = {}


def gated(gate: str, value: Any) -> Any:
    """Run until the gate is open."""
    GATES[gate].came.append(value)
    assert GATES[gate].open.wait(LONG_S)
    return value


def gated_aside(gate: str, value: Any) -> Any:
    """The same, but outside the worker's threads."""
    secede()
    return gated(gate, value)


@pytest.fixture
def gate() -> Any:
    """A gate of this test's own; opened at the end so that no thread stays."""
    name = f"gate-{len(GATES)}"
    GATES[name] = Gate()
    yield name
    GATES[name].open.set()


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def run(**kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(test(**kwargs), 2 * LONG_S))

    return run


class Site:
    """A scheduler with a client, and workers by name."""

    def __init__(self, scheduler: Scheduler, client: Client, stack: AsyncExitStack) -> None:
        self.scheduler = scheduler
        self.client = client
        self.worker_of: dict[str, Worker] = {}
        self._stack = stack

    async def worker(self, name: str, **options: Any) -> None:
        options = {"nthreads": 1, "memory_limit": 0, "dashboard": False} | options
        worker = Worker(self.scheduler.address, name=name, **options)
        self.worker_of[name] = await self._stack.enter_async_context(worker)
        await until(lambda: self.status(name) == Status.running, what="the scheduler to know it")

    def status(self, name: str) -> Status | None:
        ws = self.scheduler.workers.get(self.scheduler.aliases.get(name, ""))
        return ws and ws.status

    def runs(self, key: str) -> int:
        """How often a worker was told to compute a Dask task."""
        return sum(entry.finish == "processing" for entry in self.scheduler.story(key))

    def none_twice(self) -> bool:
        """Whether each Dask task was computed once at most."""
        log = self.scheduler.transition_log
        done = [entry.key for entry in log if entry[1:3] == ("processing", "memory")]
        return bool(done) and len(done) == len(set(done))


@asynccontextmanager
async def site(*names: str, **options: Any) -> AsyncIterator[Site]:
    """A scheduler and one-thread workers of these names."""
    config = {
        "distributed.scheduler.work-stealing": False,  # it may also move what has not begun
        "distributed.scheduler.allowed-failures": 1,
        # All workers are one process here, whose memory says nothing about any of them.
        "distributed.worker.memory.target": False,
        "distributed.worker.memory.spill": False,
        "distributed.worker.memory.pause": False,
    }
    options = {"port": 0, "dashboard": False, "validate": True} | options
    options |= {"host": "127.0.0.1"}
    with TemporaryDirectory() as folder, dask.config.set(config, temporary_directory=folder):
        async with AsyncExitStack() as stack:
            scheduler = await stack.enter_async_context(Scheduler(**options))
            client = await stack.enter_async_context(Client(scheduler.address, asynchronous=True))
            made = Site(scheduler, client, stack)
            for name in names:
                await made.worker(name)
            try:
                yield made
            finally:
                for gate in GATES.values():
                    gate.open.set()


@in_loop
async def test_results_are_handed_over() -> None:
    async with site("a", "b") as s:
        results = s.client.map(add, range(20), [1] * 20, workers="a")
        await wait(results)
        gone = await retire.retire(s.scheduler, ["a", "never-there"], deadline_s=LONG_S)

        assert gone == {"a", "never-there"}
        assert s.status("a") is None
        assert await s.client.gather(results) == list(range(1, 21))
        assert s.none_twice()


@in_loop
async def test_a_lone_worker_stays_of_use_until_it_is_relieved() -> None:
    async with site("a") as s:
        result = await s.client.scatter(1)
        for _ in range(3):
            assert await retire.retire(s.scheduler, ["a"], deadline_s=LONG_S) == frozenset()
            assert await s.client.submit(add, result, 1, pure=False) == 2
            assert s.status("a") == Status.running

        await s.worker("b")
        assert await retire.retire(s.scheduler, ["a"], deadline_s=LONG_S) == {"a"}
        assert await result == 1


@in_loop
async def test_what_runs_finishes_and_what_has_not_begun_goes_elsewhere(gate: str) -> None:
    async with site("a", "b") as s:
        there = {"workers": "a", "allow_other_workers": True}
        running = s.client.submit(gated, gate, "result", key="running", **there)
        await until(lambda: GATES[gate].came)
        behind = s.client.map(add, range(3), [1] * 3, key="behind", **there)
        await until(lambda: len(s.scheduler.workers[s.scheduler.aliases["a"]].processing) == 4)

        retiring = asyncio.create_task(retire.retire(s.scheduler, ["a"], deadline_s=LONG_S))
        assert await s.client.gather(behind) == [1, 2, 3]
        assert not retiring.done()
        GATES[gate].open.set()

        assert await retiring == {"a"}
        assert await running == "result"
        assert s.runs("running") == 1
        assert s.none_twice()


@pytest.mark.parametrize("task", [gated, gated_aside])
def test_a_worker_that_runs_beyond_the_deadline_stays(
    task: Callable[[str, Any], Any], gate: str
) -> None:
    @in_loop
    async def run() -> None:
        async with site("a", "b") as s:
            kept = s.client.submit(add, 1, 1, workers="a")
            running = s.client.submit(task, gate, 7, key="running", workers="a")
            await until(lambda: GATES[gate].came)

            # Longer than three heartbeats: it must not pass for one that has not begun.
            assert await retire.retire(s.scheduler, ["a"], deadline_s=2) == frozenset()
            await until(lambda: s.status("a") == Status.running, what="the worker to be taken back")
            GATES[gate].open.set()

            assert await s.client.gather([running, kept]) == [7, 2]
            assert await s.client.submit(add, 2, 2, workers="a") == 4
            assert s.runs("running") == 1
            assert s.none_twice()

    run()


@in_loop
async def test_forced_out_more_often_than_failures_are_allowed(gate: str) -> None:
    async with site("w0", "idle") as s:
        lost = s.client.submit(add, 1, 1, key="lost", workers="w0", allow_other_workers=True)
        await wait(lost)
        result = s.client.submit(
            gated, gate, 7, key="often", workers="w0", allow_other_workers=True
        )
        for i in range(4):  # 2 failures would be 1 too many
            await until(lambda i=i: len(GATES[gate].came) == i + 1, what="the task to run")
            on = s.scheduler.tasks["often"].processing_on.name
            await s.worker(f"w{i + 1}")
            await retire.force_out(s.scheduler, [on])
            assert s.status(on) is None
        GATES[gate].open.set()

        assert await s.client.gather([result, lost]) == [7, 2]
        assert s.runs("lost") > 1
        assert s.scheduler.tasks["often"].suspicious == 0
        assert s.scheduler.tasks["often"].prefix.suspicious == 0


@in_loop
async def test_a_task_that_no_job_can_finish_ends_with_an_error(gate: str) -> None:
    """After as many workers as ``allowed-failures`` admits; what waited behind it goes on."""
    async with site("w0") as s:
        endless = s.client.submit(gated, gate, 7, key="endless")
        await until(lambda: GATES[gate].came, what="the task to run")
        behind = s.client.map(add, range(3), [1] * 3, key="behind")
        await until(lambda: len(s.scheduler.tasks) == 4)
        for i in range(2):  # one failure is allowed
            ws = s.scheduler.workers[s.scheduler.aliases[f"w{i}"]]
            await until(lambda ws=ws: ws.executing, what="a heartbeat")
            await retire.force_out(s.scheduler, [ws.name], expected=False)
            await s.worker(f"w{i + 1}")
        with pytest.raises(KilledWorker):
            await endless
        GATES[gate].open.set()
        assert await s.client.gather(behind) == [1, 2, 3]


@in_loop
async def test_what_waits_for_workers_that_never_come_fails() -> None:
    async with site() as s:
        plain = s.client.submit(add, 1, 1)
        many = s.client.map(add, range(50), range(50))
        restricted = s.client.submit(add, 2, 2, workers="nowhere")
        resources = s.client.submit(add, 3, 3, resources={"GPU": 1})
        total = s.client.submit(sum, many)
        await until(
            lambda: {ts.state for ts in s.scheduler.tasks.values()} == {*retire.WAITING, "waiting"}
        )

        error = JobsFailed("job 4711 failed: no such partition")
        assert retire.fail_waiting(s.scheduler, error)
        assert not retire.fail_waiting(s.scheduler, error)

        for future in (plain, many[-1], restricted, resources, total):
            with pytest.raises(JobsFailed, match=str(error)):
                await future
        await s.worker("late")
        assert await s.client.submit(sum, [1, 2]) == 3


class Veto(SchedulerPlugin):
    """Keeps one worker from being closed."""

    def __init__(self, name: str) -> None:
        self.kept = name

    def valid_workers_downscaling(self, scheduler: Scheduler, workers: list[Any]) -> list[Any]:
        return [ws for ws in workers if ws.name != self.kept]


def group_of(name: str) -> str | None:
    return name.split("-")[0] if name.startswith("job") else None


@in_loop
async def test_idle_groups_may_close_least_data_first(gate: str) -> None:
    async with site() as s:
        names = [f"job{i}-{n}" for i in range(6) for n in range(2)]
        for name in [*names, "someone"]:
            await s.worker(name, memory_limit="1 GiB")
        kept = [
            s.client.submit(bytes, megabytes * 10**6, workers=name)
            for name, megabytes in [("job0-0", 2), ("job1-1", 1), ("job2-0", 3)]
        ]
        await wait(kept)
        groups = retire.closable(s.scheduler, group_of)
        assert set(groups[:3]) == {"job3", "job4", "job5"}
        assert groups[3:] == ["job1", "job0"]  # job2 keeps the results: nobody relies on "someone"

        aside = s.client.submit(gated_aside, gate, 1, workers="job3-0")
        busy = s.client.submit(gated, gate, 2, workers="job4-1")
        s.scheduler.add_plugin(Veto("job5-0"))
        long_running = s.scheduler.workers[s.scheduler.aliases["job3-0"]].long_running
        await until(lambda: len(GATES[gate].came) == 2 and long_running)
        assert retire.closable(s.scheduler, group_of) == ["job1", "job0", "job2"]
        GATES[gate].open.set()
        await wait([aside, busy])
