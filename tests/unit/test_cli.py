"""``hpcdask list --jobs`` and ``hpcdask down --dead`` with a stand-in for the queues."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, call

import click
import pytest
from click.testing import CliRunner

import hpcdask
from fake_notebook import pretend
from hpcdask import __version__, cli
from hpcdask.bench.command import bench
from hpcdask.client import scheduler_file
from hpcdask.clusters import command as clusters_command
from hpcdask.clusters.detached import control, process
from hpcdask.errors import ClusterError, UsageError
from hpcdask.jobs import discovery, runs
from hpcdask.jobs.detached import (
    ENDED,
    JOB_ID,
    RECORD,
    REQUEST,
    ControlRecord,
    control_log,
    find,
    mark_ended,
)
from hpcdask.jobs.discovery import ClusterRecord
from hpcdask.jobs.folder import ClusterFolder, Owner
from hpcdask.jobs.state import ClusterReport, JobReport
from hpcdask.process import owner_text, process_start
from hpcdask.queues.job_state import JobState, QueueStatus
from hpcdask.queues.local import LocalQueue
from hpcdask.runner.options import command as runner

#: Answers the two questions that a list asks.
SQUEUE = """#!/bin/sh
case "$*" in
*Comment*) echo '7;RUNNING;hpcdask:mine-1;' ;;
*) echo '7;RUNNING;0;0;1000;5000;n1;None;' ;;
esac
"""
#: Answers what no reader expects; hangs.
ODD = "#!/bin/sh\necho '{\"RECORDS\": [7]}'\n"
HANGS = "#!/bin/sh\nexec sleep 600\n"


@pytest.fixture(autouse=True)
def on_path(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the only folder of PATH, with the commands of no queueing system."""
    folder = tmp_path_factory.mktemp("bin")
    for name in ("bash", "sleep", "timeout"):
        (folder / name).symlink_to(str(shutil.which(name)))
    monkeypatch.setenv("PATH", str(folder))
    return folder


def write_commands(folder: Path, script: str, *names: str) -> None:
    for name in names:
        (folder / name).write_text(script)
        (folder / name).chmod(0o755)


def test_the_package_is_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "hpcdask", "--version"], capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stdout) == (0, f"hpcdask {__version__}\n"), done.stderr


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("jobqueue:\n  slurm:\n    cores: [16\n", "expected ',' or ']', but got"),
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
    assert f"hpcdask: error: A dask config file at '{tmp_path}/site.yaml' is malf" in done.stderr
    assert what in done.stderr
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
    if group is not bench:  # to copy
        assert shown.rstrip().splitlines()[-1].startswith("  Example: ")


@pytest.mark.parametrize("words", [["--help"], ["--", "--nthreads"], ["-m", "pack", "--", "-h"]])
def test_run_hands_its_words_on(monkeypatch: pytest.MonkeyPatch, words: list[str]):
    calls = []
    monkeypatch.setattr(os, "execv", lambda program, command: calls.append((program, command)))
    assert CliRunner().invoke(cli.main, ["run", *words]).exit_code == 0
    ((program, command),) = calls
    assert program == command[0] == sys.executable
    assert command[command.index("-m") :] == ["-m", "hpcdask.run", *words]


@pytest.mark.parametrize("words", [["list", "--jobs"], ["down", "--dead"]])
def test_a_queue_that_hangs_and_that_no_cluster_uses_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_path: Path, words: list[str]
):
    """Regression: a cluster that was over named its system, which then had minutes to answer."""
    monkeypatch.setattr(discovery, "GUESS_TIMEOUT_S", 0.5)
    folder = ClusterFolder.create("ab-1", "slurm", base=tmp_path)
    folder.record(["1"])
    folder.mark_ended()
    write_commands(on_path, HANGS, "sbatch", "squeue", "scancel")
    said = invoke(tmp_path, *words)
    assert said.count("hpcdask: warning: squeue did not answer within 0.5 s") == 1


def test_the_answer_of_one_system_that_makes_no_sense_hides_no_other(tmp_path: Path, on_path: Path):
    """Regression: a ValueError in a reader of one system's output ended the list."""
    ClusterFolder.create("mine-1", "slurm", base=tmp_path)
    write_commands(on_path, SQUEUE, "sbatch", "squeue", "scancel")
    write_commands(on_path, ODD, "bsub", "bjobs", "bkill")
    said = invoke(tmp_path, "list", "--jobs")
    assert " 7 " in said
    assert "LSF" not in said  # its commands may be another system's wrappers
    ClusterFolder.create("other-1", "lsf", base=tmp_path)
    said = invoke(tmp_path, "list", "--jobs", code=1)
    assert " 7 " in said
    assert "error: LSF answered what hpcdask does not understand (" in said
    ClusterFolder.create("far-1", "flux", base=tmp_path)
    said = invoke(tmp_path, "list", "--jobs", code=1)
    assert " 7 " in said
    assert "error: far-1 is in a queue 'flux', which no package here knows" in said


@pytest.fixture
def survey(monkeypatch: pytest.MonkeyPatch) -> dict[str, ClusterRecord]:
    """Return the clusters of SLURM that are found, for the test to fill, and batch jobs."""
    found = {"submit-x-a1b2c3": ClusterRecord("submit-x-a1b2c3", "slurm", None)}

    async def survey(base: str | None) -> tuple[list[ClusterRecord], dict[str, Any]]:
        return list(found.values()), {}

    monkeypatch.setattr(clusters_command, "survey", survey)
    return found


@pytest.mark.parametrize("lives", [True, False])
def test_each_view_says_that_a_job_may_never_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, survey: dict[str, ClusterRecord], lives: bool
):
    """Regression: the list showed the queue's reason alone."""
    folder = ClusterFolder.create("mine-1", "slurm", base=tmp_path)
    monkeypatch.setattr(ClusterFolder, "lives", lambda self: lives)
    survey["mine-1"] = ClusterRecord("mine-1", "slurm", folder)
    for cluster in survey.values():
        cluster.jobs["1"] = QueueStatus("1", JobState.PENDING, "PartitionConfig")
    waits = "1 job waits, and may never start: PartitionConfig. What partitions have: sinfo"
    assert waits in invoke(tmp_path, "list")
    said = invoke(tmp_path, "list", "--jobs")
    assert f"mine-1: {waits}" in said
    assert f"submit-x-a1b2c3: {waits}" in said


def test_the_waiting_jobs_of_an_array_are_one_row(tmp_path: Path, survey: dict[str, ClusterRecord]):
    states = {"3_0": JobState.RUNNING, "3_1": JobState.RUNNING}
    states |= {f"3_{number}": JobState.PENDING for number in range(2, 9)}
    jobs = {job: QueueStatus(job, state) for job, state in states.items()}
    survey["submit-x-a1b2c3"].jobs = jobs
    _, *rows = invoke(tmp_path, "list", "--jobs").splitlines()
    jobs = [" ".join(row.split()[1:]).partition(" slurm")[0] for row in rows]
    assert jobs == ["3_0 running", "3_1 running", "3_2 and 6 more pending"]
    assert len(json.loads(invoke(tmp_path, "list", "--jobs", "--json"))) == 9


def test_an_error_names_a_log_only_if_there_is_one(tmp_path: Path):
    """Regression: it named logs/control.log, which no cluster has."""
    folder = detached_cluster(tmp_path, "mine-1", state=ENDED, why="nobody used it")
    mark_ended(folder, "")
    with pytest.raises(ClusterError, match=r"has ended: nobody used it$"):
        hpcdask.attach("mine", folder=str(tmp_path))
    log = control_log(folder)
    log.touch()
    with pytest.raises(ClusterError, match=rf"has ended: nobody used it\. Log: {log}$"):
        hpcdask.attach("mine", folder=str(tmp_path))


def test_the_schedulers_job_is_cancelled_by_its_tag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Regression: its recorded id was cancelled unseen, and queues use their numbers again."""
    tags, cancel = {"7": "hpcdask:another-9", "8": "hpcdask:scheduler-mine-1"}, AsyncMock()
    monkeypatch.setattr(LocalQueue, "tagged", AsyncMock(return_value=tags))
    monkeypatch.setattr(LocalQueue, "cancel", cancel)
    monkeypatch.setattr(process, "END_PAUSE_S", 0.01)
    folder = detached_cluster(tmp_path, "mine-1")
    (folder.path / JOB_ID).write_text("7")
    asyncio.run(process.end(folder, "hpcdask down"))
    assert all(one == call(["8"]) for one in cancel.await_args_list)
    cancel.assert_awaited()


def test_down_of_a_cluster_that_only_starts_spares_the_notebook(tmp_path: Path):
    """Regression: the process that had made the cluster got SIGTERM."""
    folder = detached_cluster(tmp_path, "mine-1")
    with subprocess.Popen(["sleep", "600"]) as notebook:
        pretend(folder, pid=notebook.pid, start=process_start(notebook.pid))
        folder = ClusterFolder.open(folder.path)

        async def both() -> None:
            ending = asyncio.ensure_future(process.end(folder, "hpcdask down"))
            await asyncio.sleep(0.1)
            await control.run(ClusterFolder.open(folder.path))
            await ending

        asyncio.run(both())
        assert notebook.poll() is None
        notebook.kill()
    record = ControlRecord.read(folder)
    assert (record.state, record.why) == (ENDED, "hpcdask down")


def detached_cluster(base: Path, name: str, **facts: Any) -> ClusterFolder:
    """A detached cluster of this process, which made a request."""
    folder = ClusterFolder.create(name, "local", base=base)
    ControlRecord(name.partition("-")[0], **facts).write(folder)
    (folder.path / REQUEST).write_text("{}")
    return folder


def invoke(base: Path, command: str, *words: str, code: int = 0) -> str:
    done = CliRunner().invoke(cli.main, [command, "--folder", str(base), *words])
    assert done.exit_code == code, done.output
    return done.output


def test_a_cluster_of_another_release_hides_no_other(tmp_path: Path):
    """Regression: one such record broke the list, and `down` and `attach` of all clusters."""
    detached_cluster(tmp_path, "mine-1")
    other = detached_cluster(tmp_path, "other-2")
    (other.path / RECORD).write_text('{"name": "other", "version": 99, "nodes": 3}')
    rows = {row["id"]: row for row in json.loads(invoke(tmp_path, "list", "--json"))}
    assert rows["mine-1"]["state"] == "submitted"
    assert rows["other-2"]["state"] == "unknown"
    assert "is of another release of hpcdask" in rows["other-2"]["why"]
    assert find("mine", tmp_path).name == "mine-1"
    with pytest.raises(UsageError, match="you have no detached cluster other"):
        find("other", tmp_path)


def test_down_goes_on_after_one_that_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Regression: it stopped there, and the next one kept its GPUs."""
    old = detached_cluster(tmp_path, "old-1")
    mark_ended(old, "hpcdask down")
    new = detached_cluster(tmp_path, "new-2")
    monkeypatch.setattr(Owner, "lives", lambda self: False)
    said = invoke(tmp_path, "down", "old", "none", "new", code=2)
    assert "is called old." in said
    assert "new-2 has ended; no jobs and no keys are left" in said
    assert "is called none." in said
    assert ClusterFolder.open(new.path).ended is not None


def test_what_was_asked_of_a_dead_cluster_goes_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Regression: the file with the whole configuration of Dask stayed for 30 days."""
    folder = detached_cluster(tmp_path, "mine-1", state="running")
    monkeypatch.setattr(Owner, "lives", lambda self: False)
    assert "no jobs and no keys are left" in invoke(tmp_path, "down", "--dead", "--yes")
    assert not (folder.path / REQUEST).exists()
    assert ControlRecord.read(folder).state == ENDED


def test_a_list_changes_nothing_and_down_removes_what_a_killed_run_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Regression: a list removed note, scheduler file and keys of a run that had been killed."""
    file = tmp_path / "cluster.json"
    gone = {"owner": f"{owner_text().rpartition(' ')[0]} 0", "queue": "", "program": "train.py"}
    for address in ("tls://127.0.0.1:9", "tls://127.0.0.1:10"):  # the second takes the place
        facts = {"job": None, "started": time.time(), **gone}
        scheduler_file.write(str(file), address, {"tls_ca_file": "a key"}, **facts)
        runs.enlist(str(file))
    for _ in range(2):
        (row,) = json.loads(invoke(tmp_path, "list", "--json"))
        assert (row["state"], row["address"]) == ("dead", "tls://127.0.0.1:10")
        assert row["why"].startswith("killed: its rank 0 (process ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cluster.json", "cluster.json.keys"]
    said = invoke(tmp_path, "down", "--dead", "--yes")
    assert f"{file}: removed, with its keys; killed: its rank 0 (process " in said
    assert not list(tmp_path.iterdir())
    assert json.loads(invoke(tmp_path, "list", "--json")) == []


@pytest.mark.parametrize("words", ["4 8", "gpu=1 gpu=2", "4 gpu=1"])
def test_scale_takes_one_number_for_each_group(tmp_path: Path, words: str):
    """Regression: `hpcdask scale mine 4 8` took 8 without a word."""
    said = invoke(tmp_path, "scale", "mine", *words.split(), code=2)
    assert f"hpcdask scale: {words}: give one number of workers, or GROUP=NUMBER" in said


def test_up_names_the_nearest_keyword(tmp_path: Path):
    done = CliRunner().invoke(cli.main, ["up", "mine", "--system", "slurm", "--core", "2"])
    assert (done.exit_code, "--cores" in done.output) == (2, True)


@pytest.mark.parametrize(
    ("lives", "state", "said", "shown", "by_cluster"),
    [
        (True, JobState.STARTING, JobState.RUNNING, "starting", True),
        (True, JobState.RUNNING, JobState.RUNNING, "running", True),
        (True, JobState.LOST, JobState.RUNNING, "lost", True),
        (True, JobState.REQUEUED, JobState.PENDING, "requeued", True),
        (True, JobState.UNKNOWN, None, "unknown", True),
        (True, JobState.PENDING, None, "pending", True),  # in the notebook's own process
        (True, JobState.RUNNING, None, None, True),  # it has just ended
        (None, JobState.RUNNING, JobState.RUNNING, "running", True),
        (None, JobState.PENDING, JobState.RUNNING, "running", False),
        (None, JobState.RUNNING, JobState.REQUEUED, "requeued", False),
        (None, JobState.PENDING, None, None, True),
        (False, JobState.STARTING, JobState.RUNNING, "running", False),
        (False, JobState.PENDING, JobState.PENDING, "pending", False),
    ],
)
def test_who_says_how_a_job_is(
    tmp_path, monkeypatch, survey, lives, state, said, shown, by_cluster
):
    folder = ClusterFolder.create("ab-1", "slurm", base=tmp_path)
    folder.write_report(ClusterReport((JobReport("7", state, "", 1, 2, "n1", 1000.0),)))
    monkeypatch.setattr(ClusterFolder, "lives", lambda self: lives)
    survey["ab-1"] = ClusterRecord("ab-1", "slurm", folder)
    if said is not None:
        survey["ab-1"].jobs["7"] = QueueStatus("7", said)
    rows = json.loads(invoke(tmp_path, "list", "--jobs", "--json"))
    told = [(row["state"], row["workers"]) for row in rows]
    assert told == ([] if shown is None else [(shown, 1 if by_cluster else None)])
    assert (f" {shown} " in invoke(tmp_path, "list", "--jobs")) == (shown is not None)
