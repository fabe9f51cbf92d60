"""A user at the login node of a SLURM of the tests, whose clusters and their end are watched."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from distributed import Client

import hpcdask
from hpcdask.queues.job_state import OVER, JobState
from launching import end, leftovers, name_of, wait_for
from login import User, watched
from slurm_site import SlurmSite

#: A job of one worker on one stand-in GPU.
ONE = {
    "device": "cpu",
    "gpus_per_job": 1,
    "cores": 1,
    "memory": "512MiB",
    "walltime": "00:10:00",
    "poll_interval": 0.5,
}

#: The scheduler's job of a detached cluster.
SCHEDULER = {"cores": 1, "memory": "1GiB", "walltime": "00:30:00"}


class Login(User):
    """A user of a SLURM."""

    site: SlurmSite

    def make(self, **keywords) -> hpcdask.SLURMCUDACluster:
        """Return a new cluster of small CPU workers."""
        return hpcdask.SLURMCUDACluster(**self.keywords(**keywords))

    def keywords(self, **others) -> dict:
        """Return the keywords of such a cluster."""
        return {**ONE, "shared_temp_directory": str(self.folder), **others}

    def detached(self, **keywords) -> Any:
        """Make a detached cluster, ``mine``, and attach to it."""
        return super().detached(**{"scheduler_job": SCHEDULER, **keywords})

    def occupy(self, nodes: int) -> int:
        """Fill whole nodes with a job that is nobody's cluster's; return its id."""
        whole = (f"-N{nodes}", "--exclusive", "--chdir", self.home, "--output=/dev/null")
        job = self.site.submit(*whole, "--wrap", "exec sleep 600")
        self.site.wait_for_state(job, "RUNNING")
        return job

    def queued(self) -> dict[str, str]:
        """Return the ids of all jobs of clusters that are not over, with SLURM's word for each."""
        lines = self.site.run("squeue", "-h", "-r", "-o", "%i %T %k").stdout.splitlines()
        return {line.split()[0]: line.split()[1] for line in lines if "hpcdask:" in line}

    def lose(self, job: str) -> None:
        """End all processes of a job at once, as with the power of its node."""
        steps = [one for one in leftovers(self.site.marker) if name_of(one) == "slurmstepd"]
        end(one for one in steps if f"[{job}." in " ".join(one.cmdline()))
        end(self.processes(f"SLURM_JOB_ID={job}"))


@contextmanager
def login(site: SlurmSite, home: Path, patch: pytest.MonkeyPatch) -> Iterator[Login]:
    """At the end, no job of a cluster, no process, no key may be left, and no log readable."""
    with watched(Login(site, home, patch)) as user:
        yield user


def states(cluster: hpcdask.SLURMCUDACluster) -> list[JobState]:
    """Return the jobs' states, in the order of their submission."""
    return [job.state for job in cluster.jobs()]


def live(cluster: hpcdask.SLURMCUDACluster) -> list[str]:
    """Return the sorted ids of the jobs that run with all their workers."""
    return sorted(job.id for job in cluster.jobs() if job.state == JobState.RUNNING)


def wait_for_running(cluster: hpcdask.SLURMCUDACluster, count: int, timeout: float = 40) -> None:
    """Wait until so many jobs run with all their workers, and no other one is in the queue."""

    def reached() -> bool:
        there = [state for state in states(cluster) if state not in OVER]
        return there == [JobState.RUNNING] * count

    try:
        wait_for(reached, timeout, f"{count} running jobs")
    except AssertionError as error:
        raise AssertionError(f"{error}:\n{cluster.jobs()!r}") from None


def pids(client: Client) -> dict[str, int]:
    """Return the process ids of the workers, by the workers' names."""
    found = client.run(lambda dask_worker: (str(dask_worker.name), os.getpid()))
    return dict(found.values())
