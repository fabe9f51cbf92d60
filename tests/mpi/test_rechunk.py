"""Rechunks by P2P of what stands in for device arrays, on the workers of a run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from running import Site

pytestmark = [pytest.mark.mpi, pytest.mark.slow]
TESTS = str(Path(__file__).parents[1])  # for the stand-in


@pytest.mark.parametrize(
    "phase",
    ["transfer", *(pytest.param(phase, marks=pytest.mark.long) for phase in ("unpack", "none"))],
)
def test_a_rechunk_is_right_even_if_a_worker_dies_half_way(site: Site, phase: str) -> None:
    before = filter(None, [os.environ.get("PYTHONPATH")])
    env = {"PYTHONPATH": os.pathsep.join([TESTS, *before])}
    ended = site.run("rechunks.py", phase, env=env, timeout=120)
    assert ended.code == 0, str(ended)
    (line,) = [line for line in ended.out.splitlines() if line.startswith("result ")]
    expected = {"right": True, "killed": phase != "none"}
    assert json.loads(line.removeprefix("result ")) == expected
    restarts = [line for line in ended.err.splitlines() if " restarted due to stimulus" in line]
    assert bool(restarts) is (phase != "none"), str(ended)
    site.check_nothing_left(ended.program_end)
