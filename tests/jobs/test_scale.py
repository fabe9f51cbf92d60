"""Stand-ins for many ranks and jobs meet a real rank 0 and a real job control."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_twenty_stand_ins_meet_a_real_rank_0_and_a_real_job_control(tmp_path: Path):
    results = tmp_path / "results.json"
    command = [sys.executable, BENCHMARKS / "scale.py", "--workers", "20", "--jobs", "20"]
    subprocess.run([*command, "--beat", "2", "--json", results], check=True, timeout=600)
    found = json.loads(results.read_text())
    (launch,), (jobs,) = found["launches"], found["jobs"]
    assert launch["workers"] == jobs["jobs"] == 20
    assert launch["beats_per_s"] > 2
    # a line to each rank; to each worker a stream, and at most one more connection; beside those of
    # rank 0's own worker
    assert 20 <= launch["rank0_descriptors"] - launch["rank0_descriptors_alone"] < 40
    assert 20 <= launch["scheduler_descriptors"] - launch["scheduler_descriptors_alone"] < 60
    assert 0 < jobs["join_steps"] <= 100
