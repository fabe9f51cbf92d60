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
    import peers

    clusters = peers.clusters(0, 2)
    arguments = ["--device", "cpu", "--workers", "2", "--runs", "2", "--seconds", "600"]
    sides = [clusters["hpcdask"], clusters["local"]]
    every = [peers.program_case(one, sides, arguments, PATIENCE * 30) for one in PROGRAMS]
    found = [records for _, records, _ in peers.measure(every, rounds=1)]
    for (record,), program in zip(found, PROGRAMS, strict=True):
        assert record.case == program
        assert record.failure("ours") == record.failure("theirs") == ""
        assert all(record.ratios(phase) for phase in peers.PHASES)
