"""What ``hpcdask jobs`` and ``hpcdask cleanup`` print, with a stand-in for the queues."""

from __future__ import annotations

import subprocess
import sys

import pytest
from click.testing import CliRunner

from hpcdask import __version__, cli
from hpcdask.jobs import command as jobs_command
from hpcdask.jobs.discovery import ClusterRecord
from hpcdask.queues.job_state import QueueState, QueueStatus


def test_the_package_is_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "hpcdask", "--version"], capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stdout) == (0, f"hpcdask {__version__}\n"), done.stderr


@pytest.mark.parametrize(
    ("name", "batch"), [("submit-train_py-a1b2c3", True), ("submit-a1b2c3", False)]
)
@pytest.mark.parametrize("command", ["jobs", "cleanup"])
def test_a_cluster_called_submit_is_a_cluster(
    monkeypatch: pytest.MonkeyPatch, command: str, name: str, batch: bool
):
    async def survey(base: str | None) -> tuple[list[ClusterRecord], dict[str, str]]:
        found = ClusterRecord(name, "slurm", None)
        found.jobs["1"] = QueueStatus("1", QueueState.PENDING)
        return [found], {}

    monkeypatch.setattr(jobs_command, "survey", survey)
    done = CliRunner().invoke(cli.main, [command])
    assert done.exit_code == 0, done.output
    assert name in done.output
    assert ("of hpcdask submit" in done.output) == batch
