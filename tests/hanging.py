"""A run of which parts hang on purpose, and what `hpcdask stacks` says of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from distributed import Client

import hpcdask
from clock import PATIENCE
from hpcdask.stacks.diagnose import diagnose
from hpcdask.stacks.look import Report, find, look
from hpcdask.stacks.show import lines
from launching import Launcher, wait_for
from running import Running, Site

TESTS = Path(__file__).parent
GANG = """
import hpcdask, deadlocks, sys
client = hpcdask.connect(sys.argv[1])
hpcdask.gang(getattr(deadlocks, sys.argv[2]), size=int(sys.argv[3]), client=client)
"""


def with_tests() -> dict[str, str]:
    """The environment of processes that import from the tests' folder."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))}


class Hanging:
    """A run of which parts hang, and a client of it."""

    def __init__(self, site: Site, run: Running) -> None:
        self.site, self.run = site, run
        self.file = str(site.folder / "cluster.json")
        self.client: Client = hpcdask.connect(self.file)
        self.workers = [one["name"] for one in self.infos()]

    def infos(self) -> list[dict]:
        found = self.client.sync(self.client.scheduler.identity, n_workers=-1)["workers"].values()
        return sorted(found, key=lambda one: one["name"])

    def addresses(self) -> dict[str, str]:
        """The workers' names by their addresses."""
        found = self.client.sync(self.client.scheduler.identity, n_workers=-1)["workers"]
        return {address: one["name"] for address, one in found.items()}

    def wait_until_there(self, *names: str) -> None:
        for name in names:
            wait_for((self.site.folder / name).exists, 30, name)

    def look(self, *, likely: str) -> tuple[Report, str]:
        """Look until the most likely is as expected: stacks that are in their last line soon."""

        def found() -> tuple[Report, str] | None:
            nonlocal text
            report = asyncio.run(look(find(self.file)))
            text = "\n".join(lines(report))
            return (report, text) if likely in diagnose(report)[0] else None

        text = ""
        try:
            return wait_for(found, 60, likely)
        except AssertionError:
            pytest.fail(f"not {likely!r}, but\n{text}", pytrace=False)

    @contextlib.contextmanager
    def gang(self, function: str, size: int) -> Iterator[None]:
        """A function of deadlocks.py as a gang, called by another process."""
        gang = subprocess.Popen(
            [sys.executable, "-c", GANG, self.file, function, str(size)],
            env={**os.environ, **with_tests()},
        )
        try:
            self.wait_until_there(*(f"rank{rank}.there" for rank in range(size)))
            yield
        finally:
            gang.kill()
            gang.wait()

    def start_anew(self, size: int) -> None:
        """Start all workers anew, as after each test."""
        for path in self.site.folder.glob("*.there"):
            path.unlink()
        self.client.restart(timeout=60, wait_for_workers=False)  # what hangs is killed before that
        self.client.wait_for_workers(size, timeout=PATIENCE * 60)


@contextlib.contextmanager
def hanging_run(launcher: Launcher, size: int, *options: str, device: str) -> Iterator[Hanging]:
    """A run of so many workers with a scheduler file; afterwards nothing of it is left."""
    with Site(launcher) as site:
        given = ("--scheduler-file", "cluster.json", *options)
        run = site.start(*given, n=size, env=with_tests(), device=device)
        run.line("hpcdask: scheduler at", stream="err", timeout=120)
        hanging = Hanging(site, run)
        yield hanging
        hanging.client.close(timeout=5)
        run.signal(signal.SIGTERM)
        run.end(60)
        site.check_nothing_left()
