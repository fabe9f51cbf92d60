"""Runs of `python -m hpcdask.run` that a test watches: their output, their processes, their end."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import psutil
import pytest

from clock import PATIENCE, clock
from launching import (
    Launcher,
    clean_environment,
    describe,
    end,
    made_by_hpcdask,
    wait_for,
    walk,
    what_stays,
)

T = TypeVar("T")
PROGRAMS = Path(__file__).parent / "mpi" / "programs"
#: How distributed tells that a machine is busy.
BUSY = ("distributed.core - INFO - Event loop was unresponsive", "distributed.gc - ")
#: What the launchers tell each rank about itself.
RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")
TAKE_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""


def no_launcher() -> Launcher:
    """A plain command in the place of a launcher: it drops `-n N`."""
    shell = ["sh", "-c", 'shift 2; exec "$@"', "alone"]
    return Launcher("no launcher", shell, clean_environment())


def under(*launchers: str) -> pytest.MarkDecorator:
    """Run a test of tests/mpi under these launchers in turn."""
    return pytest.mark.parametrize("site", launchers, indirect=True)


@dataclass(frozen=True)
class Ended:
    """How a run ended.

    Attributes
    ----------
    code
        The launcher's exit code; negative: the signal that ended it.
    out, err
        What came out until the last process closed it.
    after_program_s
        By the `clock`, from the program's stamp to the launcher's end; None if there was no stamp.
    """

    code: int
    out: str
    err: str
    after_program_s: float | None

    def __str__(self) -> str:
        return f"code {self.code}\n--- stdout\n{self.out[-4000:]}\n--- stderr\n{self.err[-8000:]}"

    @property
    def foreign_lines(self) -> list[str]:
        """Lines on stderr that are not the runner's own, nor distributed's on a busy machine."""
        own = ("hpcdask: ", *BUSY)
        return [line for line in self.err.splitlines() if not line.startswith(own)]

    @property
    def errors(self) -> list[str]:
        """The runner's lines on stderr that tell of an error."""
        return [line for line in self.err.splitlines() if line.startswith("hpcdask: error: ")]

    def told(self, start: str) -> Any:
        """Return what the program showed in the only line with this start: see common.py."""
        (line,) = [line for line in self.out.splitlines() if line.startswith(f"{start} ")]
        return json.loads(line.removeprefix(start))


class Running:
    """A run that goes on."""

    def __init__(self, site: Site, process: subprocess.Popen[str]) -> None:
        self.site = site
        self.process = process
        self.lines: dict[str, list[str]] = {"out": [], "err": []}
        self.readers = [
            threading.Thread(target=self._read, args=(name, stream), daemon=True)
            for name, stream in (("out", process.stdout), ("err", process.stderr))
            if stream is not None
        ]
        for reader in self.readers:
            reader.start()

    def _read(self, name: str, stream) -> None:
        with stream:
            for line in stream:
                self.lines[name].append(line)

    def line(self, start: str, *, stream: str = "out", timeout: float = 30) -> str:
        """Wait for a line that begins with `start`, and return the rest of it."""

        def found() -> str | None:
            over = not any(reader.is_alive() for reader in self.readers)
            for line in list(self.lines[stream]):
                if line.startswith(start) and line.endswith("\n"):
                    return line
            if over:
                pytest.fail(f"ended without a line {start!r}: {self.end()}")
            return None

        try:
            line = wait_for(found, timeout, f"a line {start!r}", interval=0.02)
        except AssertionError as error:
            pytest.fail(f"{error}\n{self.output()}")
        return line[len(start) :].strip()

    def wait_for(self, condition: Callable[[], T], what: str, timeout: float = 30) -> T:
        """Wait for something that the run does; fail with its output if it ends first."""

        def reached_or_over() -> tuple[T | None, bool]:
            value = condition()
            over = self.process.poll() is not None
            return (value, over) if value or over else ()  # type: ignore[return-value]

        try:
            value, _ = wait_for(reached_or_over, timeout, what, interval=0.01)
        except AssertionError as error:
            pytest.fail(f"{error}\n{self.output()}")
        if not value:
            pytest.fail(f"ended before {what}: {self.end()}")
        return value

    def output(self) -> str:
        return "\n".join(f"--- std{name}\n{''.join(part)}" for name, part in self.lines.items())

    def signal(self, number: int) -> None:
        """Send a signal to the launcher (without one: to the runner)."""
        self.process.send_signal(number)

    def type(self, text: str) -> None:
        """Write to the run's standard input."""
        assert self.process.stdin is not None
        self.process.stdin.write(text)
        self.process.stdin.flush()

    def rank_pids(self) -> dict[int, int]:
        """Process ids of the ranks: they have a rank, and their parent, the launcher, has none."""
        ranks = {process.pid: rank_of(process) for process in self.site.processes()}
        found = {}
        for pid, rank in ranks.items():
            with contextlib.suppress(psutil.Error):
                if rank is not None and ranks.get(psutil.Process(pid).ppid()) is None:
                    found[rank] = pid
        return found

    def end(self, timeout: float = 20, code: int | None = None) -> Ended:
        """Wait for the launcher's end, and for the last process to close its output.

        Fail unless the exit code is `code`, where it is given.
        """
        timeout *= PATIENCE
        deadline = time.monotonic() + timeout
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._give_up(f"not over after {timeout:g} s")
        for reader in self.readers:
            reader.join(max(0.1, deadline - time.monotonic()))
            if reader.is_alive():
                self._give_up("the launcher is gone, but a process holds its output")
        stamp, now = self.site.folder / "ended", clock()
        ended = Ended(
            self.process.returncode,
            "".join(self.lines["out"]),
            "".join(self.lines["err"]),
            now - float(stamp.read_text()) if stamp.exists() else None,
        )
        assert code in (None, ended.code), str(ended)
        return ended

    def _give_up(self, why: str) -> None:
        running = describe(self.site.processes())
        if "PYTHONFAULTHANDLER" in self.site.launcher.env:
            for hung in reversed(self.site.processes()):  # those that others would end first
                with contextlib.suppress(psutil.Error):
                    if "python" in hung.name():
                        hung.send_signal(signal.SIGABRT)
                        time.sleep(0.2)  # each writes its stacks by itself
        end(self.site.processes())
        self.process.wait()
        pytest.fail(f"{why}\n--- running\n{running}\n{self.output()}")


class Site:
    """A private corner for one test's runs: home, temporary and working folder, and a marker.

    The paths are short, since those of sockets may have 107 characters.
    """

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher
        self.folder = Path(tempfile.mkdtemp(prefix="hd-", dir="/tmp"))
        self.tmp = self.folder / "t"
        self.tmp.mkdir()
        self.env = {"TMPDIR": str(self.tmp), "HOME": str(self.folder)}
        self.runs: list[Running] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        end(self.processes())
        for run in self.runs:
            run.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def popen(
        self,
        *command: str | os.PathLike[str],
        n: int = 1,
        env: Mapping[str, str] | None = None,
        **kwargs,
    ) -> Running:
        """Start a command on `n` ranks, in this folder."""
        options = {"cwd": self.folder, **kwargs}
        process = self.launcher.popen(n, *command, env={**self.env, **(env or {})}, **options)
        self.runs.append(Running(self, process))
        return self.runs[-1]

    def start(
        self,
        *arguments: str | os.PathLike[str],
        n: int = 2,
        program: str = "",
        words: Sequence[str] = (),
        device: str = "cpu",
        terminal: bool = False,
        runner: Sequence[str] = ("python", "-m", "hpcdask.run"),
        **kwargs,
    ) -> Running:
        """Start `python -m hpcdask.run --device cpu ARGUMENTS` on `n` ranks, in this folder.

        An argument ``NAME.py`` that is not in the folder is one of the tests' programs. `program`
        is the text of another one, which comes last, with these words. With `terminal` the run has
        a terminal of its own as standard input, to which `Running.type` types.
        """
        command = [*runner, "--device", device]
        for argument in arguments:
            known = PROGRAMS / argument
            given = (self.folder / argument).exists() or not known.is_file()
            command.append(str(argument if given else known))
        if program:
            (self.folder / "program.py").write_text(program)
            command += ["program.py", *words]
        if not terminal:
            return self.popen(*command, n=n, **kwargs)
        ours, theirs = pty.openpty()
        run = self.popen("python", "-c", TAKE_TERMINAL, *command, n=n, stdin=theirs, **kwargs)
        os.close(theirs)
        run.process.stdin = os.fdopen(ours, "w")
        return run

    def run(
        self, *arguments: str | os.PathLike[str], timeout: float = 90, code: int = 0, **kwargs
    ) -> Ended:
        """Start a run and wait for its end, which must have this exit code."""
        return self.start(*arguments, **kwargs).end(timeout, code)

    def processes(self) -> list[psutil.Process]:
        """Living processes of this site's runs."""
        return self.launcher.leftovers()

    def check_nothing_left(self, within: float = 10) -> None:
        """Fail unless all is gone within so many seconds of the `clock`."""

        def remaining() -> str:
            parts = [describe(self.processes()), *self.files()]
            return "\n".join(part for part in parts if part)

        if left := what_stays(remaining, within):
            pytest.fail(f"{within:g} s after the end there are still\n{left}")

    def files(self) -> list[str]:
        """Folders and key files of the runs."""
        keys = {path for path in walk(self.folder) if path.name.endswith("keys")}
        return sorted(map(str, keys.union(made_by_hpcdask(self.folder))))


def rank_of(process: psutil.Process) -> int | None:
    """The rank that the launcher gave a process, or None."""
    try:
        environ = process.environ()
    except (psutil.Error, OSError):
        return None
    return next((int(environ[name]) for name in RANK_VARIABLES if name in environ), None)
