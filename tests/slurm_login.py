"""A user at the login node of a SLURM of the tests, whose clusters and their end are watched."""

from __future__ import annotations

import os
import shlex
import shutil
import stat
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from distributed import Client

import hpcdask
from hpcdask.jobs.state import OVER, JobState
from launching import clean_environment, describe, end, leftovers, name_of, wait_for, walk
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


class Command:
    """A command of SLURM's, counted, and made to misbehave if `behave` says so.

    Parameters
    ----------
    folder
        In which it lies; first on PATH.
    name
        Such as ``"sbatch"``.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.real = shlex.quote(str(shutil.which(name)))
        self._log = folder / f"{name}.log"
        self._behaviour = folder / f"{name}.sh"
        self._behaviour.touch()
        self._log.touch()
        script = folder / name
        script.write_text(
            "#!/usr/bin/env bash\n"
            f'echo "$(date +%s.%N) $*" >>{shlex.quote(str(self._log))}\n'
            f". {shlex.quote(str(self._behaviour))}\n"
            f'exec {self.real} "$@"\n'
        )
        script.chmod(0o700)

    def behave(self, lines: str = "") -> None:
        """Run these lines of bash first; by default none, as the real command."""
        new = self._behaviour.with_suffix(".new")
        new.write_text(f"{lines}\n")
        new.rename(self._behaviour)

    def calls(self) -> list[str]:
        """Return the arguments of each call."""
        return [line.partition(" ")[2] for line in self._log.read_text().splitlines()]

    def times(self) -> list[float]:
        """Return the unix time of each call."""
        return [float(line.partition(" ")[0]) for line in self._log.read_text().splitlines()]


class Login:
    """A user at the prompt.

    Attributes
    ----------
    site
        The SLURM.
    folder
        Where the clusters keep their files.
    marker
        In the environment of all that is started from here, jobs included: see `leftovers`.
    """

    def __init__(self, site: SlurmSite, home: Path, patch: pytest.MonkeyPatch) -> None:
        self.site = site
        self.home = home
        self.folder = home / "clusters"
        self.marker = f"HPCDASK_TEST={uuid.uuid4().hex}"
        self._patch = patch
        self.variables = dict([self.marker.split("="), site.marker.split("=")])
        for name, value in self.variables.items():
            patch.setenv(name, value)

    def make(self, **keywords) -> hpcdask.SLURMCUDACluster:
        """Return a new cluster of small CPU workers."""
        return hpcdask.SLURMCUDACluster(**self.keywords(**keywords))

    def keywords(self, **others) -> dict:
        """Return the keywords of such a cluster."""
        return {**ONE, "shared_temp_directory": str(self.folder), **others}

    def hpcdask(self, command: str, *arguments: str) -> str:
        """Run ``hpcdask command``, which must succeed, and return its output."""
        words = (command, "--folder", str(self.folder), *arguments)
        return self.site.run(
            sys.executable, "-m", "hpcdask.cli", *words, env=self.variables, timeout=60
        ).stdout

    def wrap(self, name: str) -> Command:
        """Put a command that is counted before the real one on PATH."""
        folder = self.home / "bin"
        folder.mkdir(exist_ok=True)
        command = Command(folder, name)
        if str(folder) not in os.environ["PATH"].split(os.pathsep):
            self._patch.setenv("PATH", str(folder), prepend=os.pathsep)
        return command

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

    def processes(self, variable: str) -> list[psutil.Process]:
        """Return the processes started from here that have ``name=value`` in their environment."""
        mine = {process.pid for process in leftovers(self.marker)}
        return [process for process in leftovers(f"\0{variable}\0") if process.pid in mine]

    def lose(self, job: str) -> None:
        """End all processes of a job at once, as with the power of its node."""
        steps = [one for one in leftovers(self.site.marker) if name_of(one) == "slurmstepd"]
        end(one for one in steps if f"[{job}." in " ".join(one.cmdline()))
        end(self.processes(f"SLURM_JOB_ID={job}"))

    def key_files(self) -> list[Path]:
        """Return the files of keys that are there."""
        return [path for path in walk(self.folder) if path.suffix == ".pem"]

    def start(self, program: str, *arguments: str) -> subprocess.Popen[str]:
        """Start a Python program, as a notebook, in a session of its own."""
        path = self.home / "notebook.py"
        path.write_text(program)
        return subprocess.Popen(
            [sys.executable, path, *arguments],
            env={**clean_environment(), **self.variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )


@contextmanager
def login(site: SlurmSite, home: Path, patch: pytest.MonkeyPatch) -> Iterator[Login]:
    """At the end, no job of a cluster, no process, no key may be left, and no log readable."""
    user = Login(site, home, patch)
    try:
        yield user

        def all_gone() -> bool:
            return not (leftovers(user.marker) or user.key_files() or user.queued())

        try:
            wait_for(all_gone, 20, "all to be gone", interval=0.2)
        except AssertionError:
            rest = f"{user.queued()} {user.key_files()}\n{describe(leftovers(user.marker))}"
            pytest.fail(f"left behind: {rest}")
        logs = [path for path in walk(user.folder) if path.suffix == ".log"]
        assert not [path for path in logs if stat.S_IMODE(path.stat().st_mode) != 0o600]
    finally:
        end(leftovers(user.marker))


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
