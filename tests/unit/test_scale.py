"""Nothing that is done for each worker looks at all workers: counted, not timed."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path

from hpcdask.bootstrap.ranks import Rank
from hpcdask.node.placement import Inventory, WorkerPlacement
from hpcdask.runner.link import Link, RankReport
from hpcdask.runner.plan import WantedWorkers, make_plan
from hpcdask.spec.specs import RunSpec

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
        plan = make_plan(RunSpec(device="cpu"), first, seen, job=None)
        assert [one.name for one in plan.placements[number - 1]] == [
            f"n{number // 4 - 1}-{number - 1}"
        ]
    assert looks.growth(40, 400) < 1.5


def test_the_page_has_what_was_measured(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import scale

    results = json.loads((BENCHMARKS / "results/scale/cpu.json").read_text())
    assert scale.PAGE.read_text() == scale.page(results)


def test_what_a_thousand_ranks_lack_is_told_in_a_line():
    size = 1000
    link = Link(Rank(0, size, 0, 1, "n0", "srun", "launch"), asyncio.Queue())
    link.reports = {rank: RankReport(rank, f"n{rank}", 1) for rank in range(size // 2)}
    placements = {
        rank: [WorkerPlacement(f"n{rank}-{rank}", None, (0,), 1, 0)] for rank in range(size)
    }
    wanted = WantedWorkers(RunSpec(), placements)
    missing = str(link.too_late(300)), str(wanted.too_late(["n0-0"]))
    assert "ranks 500-999 of 1000 did not arrive" in missing[0]
    assert "1 on n0, 1 on n1" in missing[0]
    assert "n1-1, " in missing[1]
    assert "and 994 more" in missing[1]
    for text in missing:
        assert "--timeout" in text
        assert len(text) < 300
