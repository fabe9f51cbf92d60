"""What ``hpcdask jobs`` and ``hpcdask cleanup`` print, with a stand-in for the queues."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from hpcdask import __version__, cli
from hpcdask.bench.command import bench
from hpcdask.jobs import command as jobs_command
from hpcdask.jobs.detached import record_job
from hpcdask.jobs.discovery import ClusterRecord
from hpcdask.jobs.folder import ClusterFolder
from hpcdask.jobs.state import JobReport, JobState, from_json, to_json
from hpcdask.queues.job_state import QueueState, QueueStatus
from hpcdask.runner.options import command as runner


def test_the_package_is_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "hpcdask", "--version"], capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stdout) == (0, f"hpcdask {__version__}\n"), done.stderr


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (
            "jobqueue:\n  slurm:\n    cores: [16\n  pbs: {}\n",
            "in line 3, column 12: expected ',' or ']', but got ':' in line 4, column 6",
        ),
        ("hpcdask\n", "config files must have a dict as the top level object, got a str instead"),
    ],
)
@pytest.mark.parametrize("words", [["hpcdask", "doctor"], ["hpcdask.run", "--device", "cpu"]])
def test_a_file_that_dask_cannot_read(tmp_path: Path, words: list[str], text: str, what: str):
    (tmp_path / "site.yaml").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", *words],
        env={**os.environ, "DASK_CONFIG": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.startswith(f"hpcdask: error: {tmp_path}/site.yaml is not what Dask reads")
    assert f"{what}. Correct that file" in done.stderr
    assert done.stderr.count("\n") == 1


def commands_in(group: click.Group, *before: str) -> list[list[str]]:
    """The words of each command with a help text of its own."""
    found = [[*before]]
    for name, one in group.commands.items():
        if one.add_help_option:
            found += commands_in(one, *before, name) if hasattr(one, "commands") else [[name]]
    return found


HELP = [(cli.main, words) for words in commands_in(cli.main)]
HELP += [(bench, words) for words in commands_in(bench)]
HELP += [(runner(), [])]


@pytest.mark.parametrize(("group", "words"), HELP)
def test_help_is_whole_at_80_columns(group: click.Group, words: list[str]):
    done = CliRunner().invoke(group, [*words, "--help"], terminal_width=80, prog_name="hpcdask")
    assert done.exit_code == 0, done.output
    shown = re.sub(r"\[(ARGUMENTS|ARGS|CLUSTER|PROGRAM)\]\.\.\.", "", done.output)
    assert "..." not in shown
    assert max(map(len, done.output.splitlines())) <= 80
    assert "default: (" not in shown
    if "  Example: " in shown:  # to copy
        assert shown.rstrip().splitlines()[-1].startswith("  Example: ")


@pytest.mark.parametrize("words", [["--help"], ["--", "--nthreads"], ["-m", "pack", "--", "-h"]])
def test_run_hands_its_words_on(monkeypatch: pytest.MonkeyPatch, words: list[str]):
    calls = []
    monkeypatch.setattr(os, "execv", lambda program, command: calls.append((program, command)))
    assert CliRunner().invoke(cli.main, ["run", *words]).exit_code == 0
    ((program, command),) = calls
    assert program == command[0] == sys.executable
    assert command[command.index("-m") :] == ["-m", "hpcdask.run", *words]


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
    words = {"jobs": "  hpcdask submit", "cleanup": "kept 1 job of hpcdask submit"}
    assert (words[command] in done.output) == batch


def test_cleanup_of_a_cluster_without_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = ClusterFolder.create("ab-1", "local", base=tmp_path)
    monkeypatch.setattr(ClusterFolder, "lives", lambda self: False)
    done = CliRunner().invoke(cli.main, ["cleanup", "--folder", str(tmp_path), "--yes"])
    assert done.exit_code == 0, done.output
    assert done.output == "ab-1: no jobs and no keys are left\n"
    assert ClusterFolder.open(folder.path).ended is not None


@pytest.mark.parametrize("over", ["marked", "dead", "lives", "detached"])
def test_list_is_no_failure_for_a_queue_that_no_living_cluster_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, over: str
):
    folder = ClusterFolder.create("ab-1", "slurm", base=tmp_path)
    folder.write_script("")
    folder.new_submission().record(["1"])
    if over == "marked":
        folder.mark_ended()
    if over == "detached":
        record_job(folder, "2")
    monkeypatch.setattr(ClusterFolder, "lives", lambda self: over == "lives")
    commands = tmp_path / "bin"
    commands.mkdir()
    for name in ("sbatch", "squeue", "scancel"):
        (commands / name).write_text("#!/bin/sh\necho no configuration >&2\nexit 1\n")
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(commands), prepend=os.pathsep)
    done = CliRunner().invoke(cli.main, ["list", "--folder", str(tmp_path)])
    used = over in ("lives", "detached")
    assert done.exit_code == used, done.output
    kind = "error" if used else "warning"
    assert f"hpcdask: {kind}: squeue failed: no configuration" in done.output


def report(job_id: str, state: JobState, workers: int = 0, reason: str = "") -> JobReport:
    return JobReport(job_id, state, reason, workers, 2, "n1", 1000.0)


def test_reports_cross_the_process_boundary(tmp_path: Path):
    folder = ClusterFolder.create("ab-1", "slurm", base=tmp_path)
    assert folder.reports() == {}
    reports = [report("7_1", JobState.RUNNING, 2, "SUSPENDED"), report("7_2", JobState.PENDING)]
    folder.write_reports(reports)
    path = folder.path / "jobs.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert from_json(to_json(reports)) == folder.reports() == {one.id: one for one in reports}
    for broken in ("", "{}1", "[1]", '[{"state": "running"}]', '[{"state": "no such"}]', "{"):
        path.write_text(broken)
        assert folder.reports() == {}


@pytest.mark.parametrize("as_json", [True, False])
@pytest.mark.parametrize(
    ("lives", "state", "said", "shown", "by_cluster"),
    [
        (True, JobState.STARTING, QueueState.RUNNING, "starting", True),
        (True, JobState.RUNNING, QueueState.RUNNING, "running", True),
        (True, JobState.LOST, QueueState.RUNNING, "lost", True),
        (True, JobState.REQUEUED, QueueState.PENDING, "requeued", True),
        (True, JobState.UNKNOWN, None, "unknown", True),
        (True, JobState.PENDING, None, "pending", True),  # in the notebook's own process
        (True, JobState.RUNNING, None, None, True),  # it has just ended
        (None, JobState.RUNNING, QueueState.RUNNING, "running", True),
        (None, JobState.PENDING, QueueState.RUNNING, "running", False),
        (None, JobState.RUNNING, QueueState.REQUEUED, "requeued", False),
        (None, JobState.PENDING, None, None, True),
        (False, JobState.STARTING, QueueState.RUNNING, "running", False),
        (False, JobState.PENDING, QueueState.PENDING, "pending", False),
    ],
)
def test_who_says_how_a_job_is(
    tmp_path, monkeypatch, lives, state, said, shown, by_cluster, as_json
):
    folder = ClusterFolder.create("ab-1", "slurm", base=tmp_path)
    folder.write_reports([report("7", state, 1)])
    monkeypatch.setattr(ClusterFolder, "lives", lambda self: lives)

    async def survey(base: str | None) -> tuple[list[ClusterRecord], dict[str, str]]:
        found = ClusterRecord("ab-1", "slurm", folder)
        if said is not None:
            found.jobs["7"] = QueueStatus("7", said)
        return [found], {}

    monkeypatch.setattr(jobs_command, "survey", survey)
    done = CliRunner().invoke(cli.main, ["jobs", *(["--json"] if as_json else [])])
    assert done.exit_code == 0, done.output
    if as_json:
        rows = json.loads(done.output)
        told = [(row["state"], row["told_by"], row["workers"]) for row in rows]
        who = ("cluster", 1) if by_cluster else ("queue", None)
        assert told == ([] if shown is None else [(shown, *who)])
    else:
        assert (f" {shown} " in done.output) == (shown is not None)
        assert ("says the queue" in done.output) == (not by_cluster)
