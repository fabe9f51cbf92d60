"""A user of a Grid Engine of the tests, whose clusters and their end are watched."""

from __future__ import annotations

import asyncio
import shlex
from pathlib import Path

import psutil
import pytest

import hpcdask
from hpcdask.queues.sge import SgeQueue
from launching import end, leftovers, name_of
from login import User
from sge_site import SgeSite


class SgeUser(User):
    """A user of a Grid Engine."""

    site: SgeSite

    def __init__(self, site: SgeSite, home: Path, patch: pytest.MonkeyPatch) -> None:
        super().__init__(site, home, patch)
        for name, value in site.env.items():
            if name != "HOME":  # the test's own
                patch.setenv(name, value)

    def make(self, **keywords) -> hpcdask.SGECUDACluster:
        """Return a new cluster of small CPU workers."""
        usual = {
            "device": "cpu",
            "cores": 1,
            "memory": "500MB",
            "poll_interval": 0.5,
            "shared_temp_directory": str(self.folder),
            "job_script_prologue": self.prologue(),
        }
        return hpcdask.SGECUDACluster(**{**usual, **keywords})

    def prologue(self) -> list[str]:
        """Return what jobs do not get by themselves: the marker, and Grid Engine's commands."""
        names = ("PATH", "LD_LIBRARY_PATH")
        lines = [f"export {name}={shlex.quote(self.site.env[name])}" for name in names]
        return [f"export {self.marker}", *lines]

    def queued(self) -> dict[str, str]:
        """Return the tags of all jobs of clusters that are not over."""
        return asyncio.run(SgeQueue().tagged())

    def control(self) -> psutil.Process:
        """Return the process of the detached cluster."""
        module = "hpcdask.clusters.detached.control"
        (found,) = (one for one in leftovers(self.marker) if module in one.cmdline())
        return found

    def is_private(self, log: Path) -> bool:
        """Grid Engine itself makes the files of its own output."""
        return not log.name.startswith("queue-")

    def lose(self, job: str) -> None:
        """End all processes of a job at once, without a word to Grid Engine."""
        shepherds = [one for one in leftovers(self.site.marker) if name_of(one) == "sge_shepherd"]
        end(one for one in shepherds if f"-{job}" in " ".join(one.cmdline()))
        mine = {process.pid for process in leftovers(self.site.marker)}
        end(one for one in leftovers(f"\0JOB_ID={job}\0") if one.pid in mine)
