"""Nothing that is done for each worker looks at all workers: counted, not timed."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hpcdask.bootstrap.ranks import Rank
from hpcdask.clusters import controller as controlling
from hpcdask.clusters.controller import JobController
from hpcdask.clusters.job import Policy
from hpcdask.clusters.state import ClusterState
from hpcdask.jobs.folder import ClusterFolder
from hpcdask.node.placement import Inventory
from hpcdask.queues.local import LocalQueue
from hpcdask.runner import protocol
from hpcdask.runner.link import Link
from hpcdask.runner.messages import WarmupNotes
from hpcdask.runner.plan import WantedWorkers, place_workers
from hpcdask.runner.protocol import Events, RankReport
from hpcdask.runner.scheduler import _WorkerReporter
from hpcdask.spec.specs import RunSpec
from launching import until

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


class Looks(Counter):
    """Counts how often something of a kind was looked at."""

    def growth(self, small: int, large: int) -> float:
        """How many times more looks there were for the larger number than in proportion."""
        return self[large] / self[small] / (large / small)


class Counted(str):
    """A text that counts its comparisons and hashes."""

    looks: Looks
    number: int

    def __new__(cls, text: str, looks: Looks, number: int) -> Counted:
        self = super().__new__(cls, text)
        self.looks, self.number = looks, number
        return self

    def __eq__(self, other: object) -> bool:
        self.looks[self.number] += 1
        return str.__eq__(self, other)

    def __hash__(self) -> int:
        self.looks[self.number] += 1
        return str.__hash__(self)


def test_who_works_where_is_decided_by_looking_at_each_rank_a_few_times():
    looks = Looks()
    for number in (40, 400):
        hosts = [Counted(f"n{index // 4}", looks, number) for index in range(number)]
        seen = {
            index: Inventory(index, host, index % 4, (), (0, 1, 2, 3), 2**30)
            for index, host in enumerate(hosts)
        }
        looks[number] = 0
        first = Rank(0, number, 0, 4, "n0", "srun", "launch")
        placed = place_workers(RunSpec(device="cpu"), first, seen, job=None)
        assert [one.name for one in placed[number - 1]] == [f"n{number // 4 - 1}-{number - 1}"]
    assert looks.growth(40, 400) < 1.5


def test_the_scheduler_tells_of_one_worker_at_a_time():
    told: list[protocol.Message] = []
    reporter = _WorkerReporter(told.append)
    scheduler: Any = SimpleNamespace(workers={}, stream_comms={})
    for number in range(200):
        address = f"tls://n{number}:1"
        scheduler.workers[address] = SimpleNamespace(name=f"n{number}-0", nanny=address)
        scheduler.stream_comms[address] = SimpleNamespace(interval=0.0)
        reporter.add_worker(scheduler, address)
    del scheduler.workers["tls://n7:1"]
    reporter.remove_worker(scheduler, "tls://n7:1")
    reporter.remove_worker(scheduler, "tls://stranger:1")
    assert told[-1] == protocol.WorkersChanged(came={}, gone=["n7-0"])
    assert [[*one.came] for one in told[:-1]] == [[f"n{number}-0"] for number in range(200)]
    assert max(len(json.dumps(one.to_json())) for one in told) < 100


def test_rank_0_compares_numbers_before_names():
    looks = Looks()
    for number in (40, 400):
        wanted = WantedWorkers(RunSpec())
        wanted.names = {Counted(f"n{index}", looks, number) for index in range(number)}
        notes = WarmupNotes(wanted)
        registered: set[str] = set()
        looks[number] = 0
        for index in range(number):
            assert not wanted.are_enough(registered)
            registered.add(f"n{index}")
            notes.note({"name": f"n{index}", "links": []})
        assert wanted.are_enough(registered)
        assert notes._told
    assert looks.growth(40, 400) < 1.5


def test_workers_that_come_one_by_one_are_seen_together(tmp_path: Path, monkeypatch):
    """Each step looks at all jobs, so one step for each worker was quadratic."""
    jobs, steps, plugins = 200, [], []

    async def poke() -> float:
        scheduler: Any = SimpleNamespace(workers={}, add_plugin=plugins.append, stream_handlers={})
        scheduler.stream_comms = {"tls://n1:1": SimpleNamespace(interval=0.0)}
        state = ClusterState(scheduler, "ab", size=1, policy=Policy(), say=print)
        folder = ClusterFolder.create("ab", "local", base=tmp_path)
        controller = JobController([state], LocalQueue(), folder, poll_interval_s=60)
        controller._poller.postpone()
        for number in range(jobs):
            state.enter(str(number))
        monkeypatch.setattr(controller, "_step", lambda: steps.append(1))
        controller.start()
        start = time.monotonic()
        for _ in range(jobs):
            plugins[0].add_worker(scheduler, "tls://n1:1")
            await asyncio.sleep(0.004)
        lasted = time.monotonic() - start
        before = len(steps)
        controller.wake()  # what the user asks for does not wait
        await until(lambda: len(steps) > before)
        controller._loop.cancel()
        await asyncio.gather(controller._loop, return_exceptions=True)
        return lasted

    lasted = asyncio.run(poke())
    assert 1 < len(steps) <= 3 + lasted / (controlling.STEP_PAUSE_S * jobs)


def test_the_page_and_its_picture_have_what_was_measured(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import scale_docs

    results = json.loads((BENCHMARKS / "results/scale/cpu.json").read_text())
    assert scale_docs.PAGE.read_text() == scale_docs.page(results)
    assert scale_docs.PICTURE.read_text() == scale_docs.picture(results)


def test_twenty_stand_ins_meet_a_real_rank_0_and_a_real_job_control(tmp_path: Path):
    results = tmp_path / "results.json"
    command = [sys.executable, BENCHMARKS / "scale.py", "--workers", "20", "--jobs", "20"]
    subprocess.run([*command, "--beat", "2", "--json", results], check=True, timeout=600)
    found = json.loads(results.read_text())
    (launch,), (jobs,) = found["launches"], found["jobs"]
    assert launch["workers"] == jobs["jobs"] == 20
    assert launch["beats_per_s"] > 2
    # a line to each rank; to each worker a stream, and a connection for its heartbeats; beside
    # those of rank 0's own worker
    assert 20 <= launch["rank0_descriptors"] - launch["rank0_descriptors_alone"] < 40
    assert 40 <= launch["scheduler_descriptors"] - launch["scheduler_descriptors_alone"] < 60
    assert 0 < jobs["join_steps"] <= 100


def test_what_a_thousand_ranks_lack_is_told_in_a_line():
    size = 1000
    link = Link(Rank(0, size, 0, 1, "n0", "srun", "launch"), Events())
    link.reports = {rank: RankReport(rank, f"n{rank}", 1) for rank in range(size // 2)}
    wanted = WantedWorkers(RunSpec())
    wanted.names = {f"n{rank}-{rank}" for rank in range(size)}
    missing = str(link.too_late(300)), str(wanted.too_late(["n0-0"]))
    assert "ranks 500-999 of 1000 did not arrive" in missing[0]
    assert "1 on n0, 1 on n1" in missing[0]
    assert "n1-1, " in missing[1]
    assert "and 994 more" in missing[1]
    for text in missing:
        assert "--timeout" in text
        assert len(text) < 300
