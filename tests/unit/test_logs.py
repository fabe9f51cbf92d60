"""Logs of many jobs as one, in order."""

from __future__ import annotations

import io
import logging
import os
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from hpcdask.client import scheduler_file
from hpcdask.jobs.folder import ClusterFolder
from hpcdask.jobs.logs import ClusterLogs
from hpcdask.logs import USUAL_FORMAT, sign_lines
from hpcdask.stacks.command import logs

FIRST = """hpcdask: job 1 on n1: 1 worker on 2 cores, tcp
2026-11-23 10:00:02,500 - n1 - c-1-0-0 - WARNING - distributed.worker - late
printed
Traceback:
2026-11-23 10:00:09,000 - distributed.nanny - ERROR - it died
"""
SECOND = """2026-11-23 10:00:01,000 - n2 - c-2-0-0 - INFO - distributed.worker - early
2026-11-23 10:00:03,000 - n2 - c-2-0-0 - INFO - distributed.worker - between
hpcdask: error: job 2 on n2: no scheduler
"""


@pytest.fixture
def folder(tmp_path: Path) -> ClusterFolder:
    found = ClusterFolder.create("c", "local", tmp_path / "base")
    found.record(["1", "2"])
    submitted = time.mktime((2026, 11, 23, 10, 0, 0, 0, 0, -1))
    (found.path / "jobs").write_text(f"1 {submitted}\n2 {submitted}\n")
    found.log_path("1").write_text(FIRST)
    found.log_path("2").write_text(SECOND)
    return found


MERGED = """2026-11-23 10:00:00 n1 job-1 - hpcdask: job 1 on n1: 1 worker on 2 cores, tcp
2026-11-23 10:00:01 n2 c-2-0-0 INFO distributed.worker - early
2026-11-23 10:00:02 n1 c-1-0-0 WARNING distributed.worker - late
2026-11-23 10:00:02 n1 c-1-0-0 - printed
2026-11-23 10:00:02 n1 c-1-0-0 - Traceback:
2026-11-23 10:00:03 n2 c-2-0-0 INFO distributed.worker - between
2026-11-23 10:00:03 n2 c-2-0-0 ERROR hpcdask: error: job 2 on n2: no scheduler
2026-11-23 10:00:09 n1 c-1-0-0 ERROR distributed.nanny - it died
"""


def test_lines_of_all_jobs_are_in_order(folder: ClusterFolder):
    reader = ClusterLogs(folder)
    assert "".join(f"{line}\n" for line in reader.read()) == MERGED
    assert not reader.read()
    with folder.log_path("2").open("a") as file:
        file.write("half a")
        file.flush()
        assert not reader.read()
        file.write(" line\n")
    (line,) = reader.read()
    assert str(line) == "2026-11-23 10:00:03 n2 c-2-0-0 - half a line"


def test_a_read_lists_the_logs_once_however_many_jobs_there_are(
    folder: ClusterFolder, monkeypatch: pytest.MonkeyPatch
):
    """Regression: 2,000 jobs took 9 s a read, as the folder was listed for each."""
    ids = [f"7_{number}" for number in range(300)]
    folder.record(ids)
    for job_id in ids:
        folder.log_path(job_id).write_text("one\n")
    listed, listdir = [], os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: listed.append(path) or listdir(path))
    reader = ClusterLogs(folder)
    assert len([line for line in reader.read() if line.text == "one"]) == 300
    assert listed.count(folder.path / "logs") == 1
    assert set(folder.tails(ids)) == set(ids)
    assert listed.count(folder.path / "logs") == 2


def test_the_command_shows_a_cluster_that_has_ended(folder: ClusterFolder):
    folder.mark_ended()
    base = str(folder.path.parent)
    done = CliRunner().invoke(logs, ["--folder", base, "c"])
    assert (done.exit_code, done.output) == (0, MERGED)
    done = CliRunner().invoke(logs, ["--folder", base, "-f", "-n", "1", "c"])
    assert done.output == MERGED.splitlines()[-1] + "\n"


def test_a_worker_s_lines_say_whose_they_are():
    stream, logger = io.StringIO(), logging.getLogger("distributed.worker")
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter(USUAL_FORMAT))
    logger.addHandler(handler)
    formatters = {one: one.formatter for one in logging.getLogger("distributed").handlers}
    try:
        sign_lines("n1", "100%-0")
        logger.warning("slow")
    finally:
        logger.removeHandler(handler)
        for one, formatter in formatters.items():
            one.setFormatter(formatter)
    assert stream.getvalue().partition(" - ")[2] == (
        "n1 - 100%-0 - WARNING - distributed.worker - slow\n"
    )


def test_a_run_has_its_log_elsewhere(tmp_path: Path):
    path = str(tmp_path / "cluster.json")
    scheduler_file.write(path, "tcp://127.0.0.1:9", {}, job=None)
    error = CliRunner().invoke(logs, [path]).exception
    assert "The log of a run is the output of its launcher" in str(error)


def test_lines_that_come_just_before_the_end_are_shown(
    folder: ClusterFolder, monkeypatch: pytest.MonkeyPatch
):
    def lives(self: ClusterFolder) -> bool:
        with self.log_path("2").open("a") as file:
            file.write("the last words\n")
        return False

    monkeypatch.setattr(ClusterFolder, "lives", lives)
    done = CliRunner().invoke(logs, ["--folder", str(folder.path.parent), "--follow", folder.name])
    assert done.output.endswith("the last words\n"), done.output


@pytest.mark.parametrize(("lives", "said"), [(True, "logged yet"), (False, "logged")])
def test_no_line_at_all_is_told(
    folder: ClusterFolder, monkeypatch: pytest.MonkeyPatch, lives: bool, said: str
):
    monkeypatch.setattr(ClusterFolder, "lives", lambda self: lives)
    for job_id in ("1", "2"):
        folder.log_path(job_id).write_text("")
    done = CliRunner().invoke(logs, ["--folder", str(folder.path.parent), folder.name])
    assert done.output.endswith(f"hpcdask: nothing was {said}\n"), done.output
