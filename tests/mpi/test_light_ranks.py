"""Ranks on the CPU of one node leave their workers to rank 0."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import psutil
import pytest

from hpcdask.node import light_rank
from running import Running, Site

pytestmark = pytest.mark.mpi


def under(*names: str):
    return pytest.mark.parametrize("site", names, indirect=True)


def light(run: Running) -> list[int]:
    """Ranks whose only process is the one that the launcher started."""
    return sorted(
        rank for rank, pid in run.rank_pids().items() if not psutil.Process(pid).children()
    )


def start(site: Site, *arguments: str, **kwargs) -> tuple[Running, dict]:
    run = site.start(*arguments, "waits.py", n=3, **kwargs)
    return run, json.loads(run.line("ready"))


@under("mpich")
def test_a_light_rank_is_killed(site: Site):
    """Without the launcher's help the run would end, too: tests/slurm/test_runner.py."""
    run, found = start(site)
    assert len(found["workers"]) == 3
    assert light(run) == [1, 2]
    os.kill(run.rank_pids()[1], signal.SIGKILL)
    ended = run.end()
    assert ended.code != 0
    site.check_nothing_left(ended.at)


@under("mpich")
def test_rank_0_is_killed(site: Site):
    run, _ = start(site)
    os.kill(run.rank_pids()[0], signal.SIGKILL)
    ended = run.end()
    assert ended.code != 0
    site.check_nothing_left(ended.at)


@under("mpich")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_of_a_light_rank(site: Site, number: signal.Signals):
    """One that ends the run is told to rank 0; the others are for the program, which it has not."""
    run, _ = start(site)
    os.kill(run.rank_pids()[1], number)
    if number == signal.SIGUSR1:
        assert light(run) == [1, 2]
        run.signal(signal.SIGTERM)
    ended = run.end()
    assert ended.code != 0
    assert "SIGTERM: the run ends" in ended.err
    site.check_nothing_left(ended.at)


@pytest.mark.parametrize(
    "unlike",
    [
        "limit",
        "options",
        *(pytest.param(unlike, marks=pytest.mark.long) for unlike in ("variable", "switch")),
    ],
)
def test_a_rank_that_is_not_like_rank_0_has_its_own_worker(site: Site, unlike: str, tmp_path: Path):
    """As what a wrapper does for each rank by its number."""
    does = {
        "variable": 'export OF_ITS_OWN="$OMPI_COMM_WORLD_RANK"',
        "limit": "ulimit -n $((1000 + OMPI_COMM_WORLD_RANK))",
        "options": 'set -- "$@" --nthreads $((1 + OMPI_COMM_WORLD_RANK))',
        "switch": "export HPCDASK_LIGHT_RANKS=0",
    }[unlike]
    wrapper = tmp_path / "wrapper"
    program = '"$@" --device cpu ' + str(Path(__file__).parent / "programs/waits.py")
    wrapper.write_text(f"#!/bin/sh\n{does}\nexec {program}\n")
    wrapper.chmod(0o755)
    runner = (str(wrapper), "python", "-m", "hpcdask.run")
    process = site.launcher.popen(2, *runner, env=site.env, cwd=site.folder)
    run = Running(site, process)
    found = json.loads(run.line("ready"))
    assert len(found["workers"]) == 2
    assert light(run) == []
    run.signal(signal.SIGTERM)
    site.check_nothing_left(run.end().at)


def test_what_a_stranger_answers_counts_for_nothing(monkeypatch: pytest.MonkeyPatch):
    """Of another user's process that has taken the name."""
    from hpcdask.bootstrap.ranks import Rank

    rank = Rank(1, 2, 1, 2, "here", "openmpi", f"test-{os.getpid()}")
    with light_rank.listen(rank):
        assert light_rank.listen(rank) is None  # taken
        monkeypatch.setattr(light_rank, "peer", lambda sock: (os.getpid(), os.geteuid() + 1))
        light_rank.stay_light(rank)  # returns: it has to be a whole one
