"""A user at the login node of a queue of the tests, whose clusters and their end are watched."""

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
from typing import Any, TypeVar

import psutil
import pytest

from hpcdask.errors import ClusterError
from launching import clean_environment, describe, end, leftovers, wait_for, walk


class Command:
    """A command of the queue's, counted, and made to misbehave if `behave` says so.

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


class User:
    """A user at the prompt; what differs between queues is for a class of each.

    Attributes
    ----------
    site
        The queue.
    folder
        Where the clusters keep their files.
    marker
        In the environment of all that is started from here, jobs included: see `leftovers`.
    """

    def __init__(self, site: Any, home: Path, patch: pytest.MonkeyPatch) -> None:
        self.site = site
        self.home = home
        self.folder = home / "clusters"
        self.marker = f"HPCDASK_TEST={uuid.uuid4().hex}"
        self._patch = patch
        self.variables = dict([self.marker.split("="), site.marker.split("=")])
        for name, value in self.variables.items():
            patch.setenv(name, value)

    def make(self, **keywords) -> Any:
        """Return a new cluster of small CPU workers."""
        raise NotImplementedError

    def detached(self, **keywords) -> Any:
        """Make a detached cluster, ``mine``, and attach to it."""
        return self.make(**{"name": "mine", "detached": True, **keywords})

    def queued(self) -> dict[str, str]:
        """Return the ids of all jobs of clusters that are not over, with the queue's word."""
        raise NotImplementedError

    def hpcdask(self, command: str, *arguments: str) -> str:
        """Run ``hpcdask command``, which must succeed, and return its output."""
        words = (command, "--folder", str(self.folder), *arguments)
        return self.site.run(
            sys.executable, "-m", "hpcdask", *words, env=self.variables, timeout=60
        ).stdout

    def wrap(self, name: str) -> Command:
        """Put a command that is counted before the real one on PATH."""
        folder = self.home / "bin"
        folder.mkdir(exist_ok=True)
        command = Command(folder, name)
        if str(folder) not in os.environ["PATH"].split(os.pathsep):
            self._patch.setenv("PATH", str(folder), prepend=os.pathsep)
        return command

    def processes(self, variable: str) -> list[psutil.Process]:
        """Return the processes started from here that have ``name=value`` in their environment."""
        mine = {process.pid for process in leftovers(self.marker)}
        return [process for process in leftovers(f"\0{variable}\0") if process.pid in mine]

    def is_private(self, log: Path) -> bool:
        """Whether it must be so by itself, not by its folder only."""
        return True

    def key_files(self) -> list[Path]:
        """Return the files of keys that are there."""
        return [path for path in walk(self.folder) if path.name.endswith("keys")]

    def gone(self) -> bool:
        """Whether no job and no key of a cluster is left."""
        return not self.queued() and not self.key_files()

    def check_told(self, cluster: Any, why: str) -> None:
        """Check that a detached cluster's end is told to who is attached and who asks."""
        wait_for(lambda: cluster.failure is not None, 60, "the notebook to see it")
        assert why in str(cluster.failure)
        wait_for(self.gone, 60, "the jobs' end")
        with pytest.raises(ClusterError, match="has ended: "):
            cluster.scale(1)
        assert why in " ".join(self.hpcdask("list").split())

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


U = TypeVar("U", bound=User)


@contextmanager
def watched(user: U) -> Iterator[U]:
    """At the end, no job of a cluster, no process, no key may be left, and no log readable."""
    try:
        yield user

        def all_gone() -> bool:
            return not (leftovers(user.marker) or user.key_files() or user.queued())

        try:
            wait_for(all_gone, 20, "all to be gone", interval=0.2)
        except AssertionError:
            rest = f"{user.queued()} {user.key_files()}\n{describe(leftovers(user.marker))}"
            pytest.fail(f"left behind: {rest}")
        logs = [
            path for path in walk(user.folder) if path.suffix == ".log" and user.is_private(path)
        ]
        assert not [path for path in logs if stat.S_IMODE(path.stat().st_mode) != 0o600]
    finally:
        end(leftovers(user.marker))
