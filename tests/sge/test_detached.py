"""Detached clusters on a real Grid Engine, whose scheduler is a job: how it ends."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

import hpcdask
from hpcdask.errors import ClusterError
from hpcdask.jobs import detached
from hpcdask.queues.job_state import JobState
from hpcdask.queues.sge import SgeQueue
from launching import leftovers, wait_for
from login import User, watched
from sge_site import SgeSite

pytestmark = pytest.mark.slow

#: Why it ends when its job is warned: its shell sends SIGTERM as well.
CANCELLED = "its job was cancelled, or reached its walltime"


class SgeUser(User):
    """A user of a Grid Engine."""

    def __init__(self, site: SgeSite, home: Path, patch: pytest.MonkeyPatch) -> None:
        super().__init__(site, home, patch)
        for name, value in site.env.items():
            if name != "HOME":  # the test's own
                patch.setenv(name, value)

    def make(self, **keywords) -> hpcdask.SGECUDACluster:
        """Return a new cluster of small CPU workers."""
        names = ("PATH", "LD_LIBRARY_PATH")  # which jobs do not get by themselves
        prologue = [f"export {name}={shlex.quote(self.site.env[name])}" for name in names]
        usual = {
            "device": "cpu",
            "cores": 1,
            "memory": "500MB",
            "poll_interval": 0.5,
            "shared_temp_directory": str(self.folder),
            "job_script_prologue": [f"export {self.marker}", *prologue],
        }
        return hpcdask.SGECUDACluster(**{**usual, **keywords})

    def queued(self) -> dict[str, str]:
        """Return the tags of all jobs of clusters that are not over."""
        return asyncio.run(SgeQueue().tagged())

    def is_private(self, log: Path) -> bool:
        """Grid Engine itself makes the files of its own output."""
        return not log.name.startswith("queue-")


@pytest.fixture
def user(sge: SgeSite, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[SgeUser]:
    with watched(SgeUser(sge, tmp_path, monkeypatch)) as user:
        yield user


def test_a_node_without_qsub_is_told(user: SgeUser):
    lines = [f"export {user.marker}", "PATH=/usr/bin:/bin"]
    with pytest.raises(ClusterError, match=r"no qsub on this machine.*scheduler_job=None"):
        user.detached(job_script_prologue=lines)


@pytest.mark.long
def test_its_schedulers_job_is_deleted(user: SgeUser):
    """Grid Engine's SIGKILL comes after a warning, so that all ends in order."""
    waits = {"job_extra_directives": ["-l gpu=9"]}  # more than there are
    with user.detached(groups={"cpu": {}, "waits": waits}) as cluster:
        cluster.scale(cpu=2, waits=1)
        cluster.wait_for_workers(2, timeout=180)
        user.site.run("qdel", detached.scheduler_job(detached.find("mine")))
        user.check_told(cluster, CANCELLED)
    wait_for(lambda: detached.find("mine").ended, 60, "its end")


@pytest.mark.long
def test_grid_engine_ends_it_at_its_walltime(user: SgeUser):
    """Its process has stopped, and does not end by itself."""
    with user.detached(scheduler_job={"walltime": "0:0:20"}, n_workers=1) as cluster:
        cluster.wait_for_workers(1, timeout=180)
        job = detached.scheduler_job(detached.find("mine"))
        module = "hpcdask.clusters.detached.control"
        (control,) = (one for one in leftovers(user.marker) if module in one.cmdline())
        control.suspend()
        user.check_told(cluster, f"its scheduler's job {job} has ended: timeout")
    found = wait_for(lambda: asyncio.run(SgeQueue().departed([job])), 30, "the accounts")
    assert found[job].state is JobState.TIMEOUT
