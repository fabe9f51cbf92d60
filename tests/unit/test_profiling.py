"""Profiles: where they cannot be written, and the time to write them."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hpcdask.errors import UsageError
from hpcdask.node import profiling
from hpcdask.runner import runner as runners
from hpcdask.runner.runner import Runner
from hpcdask.spec.specs import WorkerSpec


def test_a_folder_that_cannot_be_made_and_a_missing_py_spy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    spec = WorkerSpec(profile="py-spy", profile_folder=str(tmp_path / "file" / "profiles"))
    monkeypatch.setattr(profiling, "find_spy", lambda: "py-spy")
    with pytest.raises(UsageError, match="file/profiles cannot be made"):
        profiling.check(spec)
    monkeypatch.setattr(profiling, "find_spy", lambda: None)
    with pytest.raises(UsageError, match="pip install py-spy"):
        profiling.check(spec)


@pytest.mark.parametrize(("profile", "code"), [("none", -9), ("py-spy", 0)])
def test_a_runner_lets_its_rank_write_profiles(
    profile: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runners, "CLOSE_DEADLINE_S", 0.01)
    runner = Runner(device="cpu", profile=profile)
    line, theirs = socket.socketpair()
    with theirs:
        program = "import asyncio, sys; sys.stdin.read(); import distributed"
        with subprocess.Popen([sys.executable, "-c", program], stdin=theirs) as process:
            runner._line, runner._process = line, process
            runner.close()
    assert process.returncode == code


@pytest.mark.parametrize(
    ("number", "hint"), [(signal.SIGTERM, "srun -K"), (signal.SIGKILL, "memory")]
)
def test_a_runner_whose_rank_was_killed_says_what_that_may_mean(
    number: signal.Signals, hint: str, capfd: pytest.CaptureFixture[str]
) -> None:
    runner = Runner(device="cpu")
    with subprocess.Popen(["sleep", "60"]) as process:
        process.send_signal(number)
        runner._process = process
        assert runner._wait() == 128 + number
    (line,) = capfd.readouterr().err.splitlines()
    assert f"this rank was killed by {number.name}." in line
    assert hint in line
