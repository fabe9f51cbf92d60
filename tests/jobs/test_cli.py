"""``hpcdask list --jobs`` and ``hpcdask down --dead``."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fake_notebook import Notebook, pretend
from hpcdask.jobs.folder import ClusterFolder
from launching import leftovers, run_cli


class User:
    """One user's clusters, in a base of their own, and what they type."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.notebooks: list[Notebook] = []

    def cluster(self, name: str = "nb", jobs: int = 2) -> ClusterFolder:
        """A cluster of local jobs with a living notebook, and no watchdog."""
        self.notebooks.append(Notebook(self.base, "--no-watchdog", name=name, jobs=jobs))
        return self.notebooks[-1].folder

    def left_cluster(self, name: str = "left", jobs: int = 2) -> ClusterFolder:
        """The same, with its notebook gone."""
        folder = self.cluster(name, jobs)
        self.notebooks[-1].kill()
        return folder

    def hpcdask(self, command: str, *args: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        return run_cli(command, "--folder", self.base, *args, code=code)

    def jobs(self, *folders: ClusterFolder) -> dict[str, dict]:
        """What ``hpcdask list --jobs --json`` knows of these clusters, by job."""
        rows = json.loads(self.hpcdask("list", "--jobs", "--json").stdout)
        names = {folder.name for folder in folders}
        return {row["job"]: row for row in rows if row["cluster"] in names}


@pytest.fixture
def user(tmp_path: Path) -> Iterator[User]:
    user = User(tmp_path / "base")
    yield user
    for notebook in user.notebooks:
        notebook.close()


def test_jobs_shows_where_each_job_belongs(user):
    living, left = user.cluster("living"), user.left_cluster()
    known = user.jobs(living, left)
    assert set(known) == {*living.submitted(), *left.submitted()}
    assert known[next(iter(living.submitted()))]["lives"] is True
    job = next(iter(left.submitted()))
    row, owner = known[job], f"process {left.owner.pid} on {socket.gethostname()} is gone"
    assert (row["cluster"], row["queue"], row["state"]) == (left.name, "local", "running")
    assert (row["workers"], row["lives"]) == (None, False)
    assert owner in row["owner"]
    assert abs(row["since"] - time.time()) < 600
    head, *lines = user.hpcdask("list", "--jobs").stdout.splitlines()
    assert head.split() == ["cluster", "job", "state", "queue", "since", "owner"]
    (line,) = (line.rstrip() for line in lines if job in line)
    assert line.split()[:4] == [left.name, job, "running", "local"]
    assert line.endswith(f"notebook, {owner}")


def test_down_ends_what_was_left_and_nothing_else(user):
    living, left = user.cluster("living"), user.left_cluster()
    strangers = [
        subprocess.Popen(["sleep", "1000"], env={**os.environ, **more})
        for more in ({}, {"HPCDASK_LOCAL_JOB": "1.1.1"}, {"HPCDASK_TAG": left.tag})
    ]
    try:
        done = user.hpcdask("down", "--dead", "--yes")
        assert [process.pid for process in leftovers(left.tag)] == [strangers[2].pid]
        assert not left.keys.exists()
        assert ClusterFolder.open(left.path).ended is not None
        assert f"{left.name}: cancelling" in done.stdout
        assert all(job_id in done.stdout for job_id in left.submitted())
        assert f"{left.name}: 2 jobs cancelled and gone; no keys are left" in done.stdout
        assert f"{living.name}: kept 2 jobs: notebook, process {living.owner.pid}" in done.stdout
        assert len(leftovers(living.tag)) >= 2
        assert living.keys.exists()
        assert [process.poll() for process in strangers] == [None] * 3
    finally:
        for process in strangers:
            process.kill()
            process.wait()
    assert set(user.jobs(living, left)) == set(living.submitted())
    assert "Nothing was left over." in user.hpcdask("down", "--dead", "--yes").stdout


@pytest.mark.long
def test_down_of_a_name(user):
    living, left = user.cluster("living"), user.left_cluster()
    done = user.hpcdask("down", "no-such", code=2)
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("hpcdask: error: "))
    assert line.startswith("hpcdask: error: no cluster of yours that is not over is called ")
    assert left.name in line
    done = user.hpcdask("down", "--dead", code=2)
    assert f"Cancel 2 jobs of {left.name}? Nobody is there to ask: --yes is needed" in done.stderr
    assert len(leftovers(left.tag)) >= 2
    assert len(leftovers(living.tag)) >= 2

    done = user.hpcdask("down", living.name)
    assert not leftovers(living.tag)
    assert "still runs and may submit others" in done.stdout
    assert living.keys.exists()  # the notebook's own
    assert ClusterFolder.open(living.path).ended is None
    assert len(leftovers(left.tag)) >= 2


def test_a_notebook_that_cannot_be_seen_is_taken_for_alive(user):
    folder = user.cluster()
    pretend(folder, space="pid:[1]")
    assert user.jobs(folder)[next(iter(folder.submitted()))]["lives"] is None
    done = user.hpcdask("down", "--dead", "--yes")
    assert "cannot be seen from here. To cancel:" in done.stdout
    assert "Nothing was left over" not in done.stdout
    assert len(leftovers(folder.tag)) >= 2
    user.hpcdask("down", "--dead", "--all", "--yes")
    assert not leftovers(folder.tag)
    assert not folder.keys.exists()


def test_a_cluster_without_jobs(user):
    """On another machine; then on this one, without a question; then a month later."""
    folder = user.left_cluster(jobs=0)
    pretend(folder, host="laptop")
    hint = f"{folder.name}: its jobs are processes of laptop. There: hpcdask"
    assert f"{hint} list --jobs" in user.hpcdask("list", "--jobs").stderr
    assert hint not in user.hpcdask("down", "--dead").stderr
    done = user.hpcdask("down", folder.name, code=1)
    assert f"hpcdask: error: {hint} down {folder.name}" in done.stderr
    assert folder.keys.exists()

    pretend(folder, host=socket.gethostname())
    user.hpcdask("down", "--dead")
    assert not folder.keys.exists()
    assert ClusterFolder.open(folder.path).ended is not None

    pretend(folder, ended=time.time() - 31 * 86400)
    assert f"ended long ago: {folder.name}" in user.hpcdask("down", "--dead").stdout
    assert not folder.path.exists()


def test_a_queue_that_does_not_answer_is_an_error(user):
    left = user.left_cluster()
    pretend(user.left_cluster(jobs=0), queue="lsf")
    done = user.hpcdask("list", "--jobs", code=1)
    assert "there is no bsub on this machine, so LSF cannot be reached" in done.stderr
    assert next(iter(left.submitted())) in done.stdout
    done = user.hpcdask("down", "--dead", "--yes", code=1)
    assert "there is no bsub" in done.stderr
    assert not leftovers(left.tag)
