"""Programs of benchmarks/ run unchanged on the runner and on a peer."""

from __future__ import annotations

from pathlib import Path

import pytest

from clock import PATIENCE
from launching import openmpi_launcher

pytestmark = pytest.mark.mpi
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PROGRAMS = ["submit_result.py --count 20", "transpose_sum.py"]


@pytest.mark.long
@pytest.mark.slow
def test_programs_on_the_runner_and_local_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    openmpi_launcher()  # or the test cannot be run here
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import user_programs

    clusters = user_programs.clusters(0, 2)
    peer = clusters["local"].name
    found = []
    for program, rounds in user_programs.measure(
        [clusters["hpcdask"], clusters["local"]],
        PROGRAMS,
        ["--device", "cpu", "--workers", "2", "--runs", "2", "--seconds", "600"],
        rounds=1,
        deadline_s=PATIENCE * 30,
    ):
        found += user_programs.rows(program, rounds, [peer])
    failed = [row for row in found if "ours_failed" in row or "theirs_failed" in row]
    assert not failed
    assert [(row["case"], row["phase"]) for row in found] == [
        (program, phase) for program in PROGRAMS for phase in ("first", "later")
    ]
    assert all(row["ratio"] > 0 for row in found)
