"""``hpcdask jobs`` and ``hpcdask cleanup``."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcdask.jobs.folder import ClusterFolder
from launching import end, leftovers, wait_for

PROGRAM = Path(__file__).with_name("notebook.py")


class User:
    """One user's clusters, in a base of their own, and what they type."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.notebooks: list[subprocess.Popen[str]] = []
        self.marker = f"HPCDASK_TEST={uuid.uuid4().hex}"
        key, value = self.marker.split("=")
        self.env = {**os.environ, key: value}

    def cluster(self, name: str = "nb", jobs: int = 2) -> ClusterFolder:
        """A cluster of local jobs with a living notebook, and no watchdog."""
        unique = f"{name}-{uuid.uuid4().hex[:8]}"
        notebook = subprocess.Popen(
            [sys.executable, PROGRAM, self.base, unique, str(jobs), "--no-watchdog"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self.env,
        )
        self.notebooks.append(notebook)
        assert notebook.stdout.readline() == "0\n"
        return ClusterFolder.open(self.base / unique)

    def left_cluster(self, name: str = "left", jobs: int = 2) -> ClusterFolder:
        """The same, with its notebook gone."""
        folder = self.cluster(name, jobs)
        self.kill()
        return folder

    def kill(self) -> None:
        """Kill the last notebook."""
        self.notebooks[-1].kill()
        self.notebooks[-1].communicate()

    def hpcdask(self, command: str, *args: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "hpcdask.cli", command, "--folder", self.base, *args],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
            env=self.env,
        )
        assert done.returncode == code, (done.stdout, done.stderr)
        assert "Traceback" not in done.stderr
        return done

    def jobs(self, *folders: ClusterFolder) -> dict[str, dict]:
        """What ``hpcdask jobs --json`` knows of these clusters, by job."""
        rows = json.loads(self.hpcdask("jobs", "--json").stdout)
        names = {folder.name for folder in folders}
        return {row["job"]: row for row in rows if row["cluster"] in names}


def processes(folder: ClusterFolder) -> list:
    return leftovers(folder.tag)


@pytest.fixture
def user(tmp_path: Path) -> Iterator[User]:
    user = User(tmp_path / "base")
    yield user
    wait_for(lambda: not end(leftovers(user.marker)) and not leftovers(user.marker))
    for notebook in user.notebooks:
        notebook.communicate()


def test_jobs_shows_where_each_job_belongs(user):
    living, left = user.cluster("living"), user.left_cluster()
    known = user.jobs(living, left)
    assert set(known) == {*living.ids(), *left.ids()}
    row = known[left.ids()[0]]
    assert (row["cluster"], row["queue"], row["state"]) == (left.name, "local", "running")
    assert (row["told_by"], row["workers"]) == ("queue", None)
    assert row["notebook"] == {"lives": False, "host": socket.gethostname(), "pid": left.owner.pid}
    assert abs(row["since"] - time.time()) < 600
    assert known[living.ids()[0]]["notebook"]["lives"] is True

    lines = user.hpcdask("jobs").stdout.splitlines()
    assert lines[0].split() == ["cluster", "job", "state", "queue", "since", "owner"]
    (line,) = (line for line in lines if left.ids()[0] in line)
    words = (
        left.name,
        left.ids()[0],
        "running (says the queue)",
        "local",
        f"process {left.owner.pid} on",
    )
    assert re.fullmatch(
        r"{} +{} +{} +{} +\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d +notebook, {} .* is gone".format(
            *map(re.escape, words)
        ),
        line.rstrip(),
    )


def test_cleanup_ends_what_was_left_and_nothing_else(user):
    living, left = user.cluster("living"), user.left_cluster()
    strangers = [
        subprocess.Popen(["sleep", "1000"], env={**user.env, **more})
        for more in ({}, {"HPCDASK_LOCAL_JOB": "1.1.1"}, {"HPCDASK_TAG": left.tag})
    ]
    try:
        done = user.hpcdask("cleanup", "--yes")
        assert [process.pid for process in processes(left)] == [strangers[2].pid]
        assert not left.keys.exists()
        assert ClusterFolder.open(left.path).ended is not None
        assert f"{left.name}: cancelling" in done.stdout
        assert all(job_id in done.stdout for job_id in left.ids())
        assert f"{left.name}: 2 jobs cancelled and gone; no keys are left" in done.stdout
        assert (
            f"{living.name}: kept 2 jobs, since its notebook (process {living.owner.pid}"
            in done.stdout
        )
        assert len(processes(living)) >= 2
        assert living.keys.exists()
        assert [process.poll() for process in strangers] == [None] * 3
    finally:
        for process in strangers:
            process.kill()
            process.wait()
    assert set(user.jobs(living, left)) == set(living.ids())
    assert "Nothing was left over." in user.hpcdask("cleanup", "--yes").stdout


def test_clusters_of_another_home_are_left_alone(user):
    """Those of people who share an account: `cleanup` said that they stay, or asked about them."""
    other = User(user.base.with_name("other base"))
    other.env = {**user.env, "HPCDASK_HOME": str(user.base.with_name("other home"))}
    theirs = other.left_cluster()
    user.notebooks += other.notebooks
    assert "No cluster of yours has jobs." in user.hpcdask("jobs").stdout
    assert "Nothing was left over." in user.hpcdask("cleanup", "--all", "--yes").stdout
    assert set(other.jobs(theirs)) == set(theirs.ids())
    other.hpcdask("cleanup", "--yes")
    assert not processes(theirs)


def test_cleanup_of_a_name(user):
    living, left = user.cluster("living"), user.left_cluster()
    done = user.hpcdask("cleanup", left.name, "no-such", "--yes", code=2)
    assert done.stderr.startswith("hpcdask: error: no cluster of yours that is not over is called ")
    assert len(done.stderr.splitlines()) == 1
    assert left.name in done.stderr
    done = user.hpcdask("cleanup", code=2)
    assert f"Cancel 2 jobs of {left.name}? Nobody is there to ask: --yes is needed" in done.stderr
    assert len(processes(left)) >= 2
    assert len(processes(living)) >= 2

    done = user.hpcdask("cleanup", living.name, "--yes")
    assert not processes(living)
    assert "still runs and may submit others" in done.stdout
    assert living.keys.exists()  # the notebook's own
    assert ClusterFolder.open(living.path).ended is None
    assert len(processes(left)) >= 2


def elsewhere(folder: ClusterFolder, **change: str) -> None:
    """Have it look as if its notebook ran elsewhere."""
    path = folder.path / "cluster.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


def test_a_notebook_that_cannot_be_seen_is_taken_for_alive(user):
    folder = user.cluster()
    elsewhere(folder, space="pid:[1]")
    assert user.jobs(folder)[folder.ids()[0]]["notebook"]["lives"] is None
    done = user.hpcdask("cleanup", "--yes")
    assert "cannot be seen from here. To cancel:" in done.stdout
    assert "Nothing was left over" not in done.stdout
    assert len(processes(folder)) >= 2
    user.hpcdask("cleanup", "--all", "--yes")
    assert not processes(folder)
    assert not folder.keys.exists()


def test_jobs_of_a_removed_folder_are_known_by_their_tag(user):
    folder = user.left_cluster()
    ids = folder.ids()
    folder.path.rename(user.base / "elsewhere")  # not listed: the name in the tag is another
    elsewhere(ClusterFolder.open(user.base / "elsewhere"), ended=1.0)
    found = user.jobs(folder)
    assert found, "a job that starts now ends for want of its keys"
    assert set(found) <= set(ids)
    first = next(iter(found.values()))
    assert first["notebook"] == {"lives": None, "host": None, "pid": None}
    user.hpcdask("cleanup", "--all", "--yes")  # they may be another base's
    assert processes(folder)
    user.hpcdask("cleanup", folder.name, "--yes")
    assert not processes(folder)


def test_a_cluster_without_jobs(user):
    """On another machine; then on this one, without a question; then a month later."""
    folder = user.left_cluster(jobs=0)
    elsewhere(folder, host="laptop")
    hint = f"{folder.name}: its jobs are processes of laptop. There: hpcdask"
    assert f"{hint} jobs" in user.hpcdask("jobs").stderr
    assert hint not in user.hpcdask("cleanup").stderr
    done = user.hpcdask("cleanup", folder.name, code=1)
    assert f"hpcdask: error: {hint} cleanup {folder.name}" in done.stderr
    assert folder.keys.exists()

    elsewhere(folder, host=socket.gethostname())
    user.hpcdask("cleanup")
    assert not folder.keys.exists()
    assert ClusterFolder.open(folder.path).ended is not None

    elsewhere(folder, ended=time.time() - 31 * 86400)
    assert f"ended long ago: {folder.name}" in user.hpcdask("cleanup").stdout
    assert not folder.path.exists()


def test_a_queue_that_does_not_answer_is_an_error(user):
    left = user.left_cluster()
    elsewhere(user.left_cluster(jobs=0), queue="lsf")
    done = user.hpcdask("jobs", code=1)
    assert "there is no bsub on this machine, so nothing is known of the jobs of LSF" in done.stderr
    assert left.ids()[0] in done.stdout
    done = user.hpcdask("cleanup", "--yes", code=1)
    assert "there is no bsub" in done.stderr
    assert not processes(left)


def test_a_queue_in_which_nothing_was_is_not_asked(user):
    """A cluster that only showed its script made `hpcdask jobs` fail for good."""
    folder = user.left_cluster(jobs=0)
    for submission in folder.submissions():
        shutil.rmtree(submission.path)
    elsewhere(folder, queue="lsf", ended=time.time())
    assert "No cluster of yours has jobs" in user.hpcdask("jobs").stdout


def test_a_base_that_cannot_be_read_is_one_line(user, tmp_path):
    (tmp_path / "base").symlink_to("base")
    done = user.hpcdask("jobs", code=2)
    assert re.fullmatch(r"hpcdask: error: .*base cannot be read: .*\n", done.stderr)


def test_without_clusters():
    done = subprocess.run(
        [sys.executable, "-m", "hpcdask.cli", "jobs", "--folder", "/nonexistent", "--json"],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    assert isinstance(json.loads(done.stdout), list)
