"""What the queueing systems of the tests share: daemons on this host, and a folder of their own."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

from clock import PATIENCE
from launching import describe, end, leftovers, wait_for


class QueueSite:
    """A queueing system as a context manager.

    Attributes
    ----------
    folder
        All that the site writes.
    env
        The environment of its users.
    marker
        In the environment of every process of the site, jobs included: see `leftovers`.
    """

    name: ClassVar[str]

    def __init__(self) -> None:
        self.folder = Path()
        self.env: dict[str, str] = {}
        self.marker = ""
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        # Not TMPDIR: the path of munge's socket must stay below 108 characters
        self.folder = Path(tempfile.mkdtemp(prefix=f"{self.name}-site-", dir="/tmp"))
        (self.folder / "log").mkdir()
        try:
            self._open()
        except BaseException as error:
            error.add_note(self.log())
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _open(self) -> None:
        """Write the configuration and start the daemons."""
        raise NotImplementedError

    def cancel_all(self) -> None:
        """Cancel all jobs, and wait until none is there."""
        raise NotImplementedError

    def run(
        self,
        *command: str | os.PathLike[str],
        timeout: float = 30,
        check: bool = True,
        env: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of this site's user; a failure shows its output."""
        done = subprocess.run(
            [os.fspath(part) for part in command],
            env={**self.env, **(env or {})},
            timeout=PATIENCE * timeout,
            check=False,
            **{
                "stdin": subprocess.DEVNULL if "input" not in kwargs else None,
                "capture_output": True,
                "text": True,
                **kwargs,
            },
        )
        if check and done.returncode:
            output = (done.stdout or "") + (done.stderr or "")
            raise AssertionError(f"{command} returned {done.returncode}: {output}")
        return done

    def log(self, lines: int = 20) -> str:
        """Return the last lines of each daemon's log."""
        parts = []
        for path in sorted([*self.folder.glob("log/*"), *self.folder.rglob("messages")]):
            tail = path.read_text(errors="replace").splitlines()[-lines:]
            parts += [f"--- {path.relative_to(self.folder)}", *tail]
        return "\n".join(parts)

    def _path(self) -> str:
        """Return where the daemons' programs are."""
        return self.env["PATH"]

    def _start(
        self, program: str, *arguments: str | os.PathLike[str], **variables: str
    ) -> subprocess.Popen[bytes]:
        path = shutil.which(program, path=self._path())
        if path is None:
            raise FileNotFoundError(f"{program} is not installed")
        with (self.folder / "log" / f"{Path(path).name}.out").open("ab") as output:
            daemon = subprocess.Popen(
                [path, *map(os.fspath, arguments)],
                env={**self.env, **variables},
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches the tests, which then end it in order
            )
        self._daemons.append(daemon)
        return daemon

    def _wait(
        self, daemon: subprocess.Popen[bytes], condition: Callable[[], object], what: str
    ) -> None:
        wait_for(lambda: daemon.poll() is not None or condition(), 30, what)
        if daemon.poll() is not None:
            raise RuntimeError(f"{' '.join(map(str, daemon.args))} ended ({daemon.returncode})")

    def close(self) -> None:
        """End what the site started, jobs and their processes included, and remove its folder."""
        for daemon in self._daemons:
            daemon.terminate()
        for daemon in self._daemons:
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(PATIENCE * 2)
            with contextlib.suppress(ProcessLookupError):  # a title of Perl's hides the marker
                os.killpg(daemon.pid, signal.SIGKILL)

        def all_ended() -> bool:
            end(remaining := leftovers(self.marker))
            return not remaining

        try:
            if self.marker:
                wait_for(all_ended, 10, f"the processes of {self.name} to end")
        except AssertionError as error:
            raise RuntimeError(f"{error}\n{describe(leftovers(self.marker))}") from None
        for daemon in self._daemons:
            daemon.wait()
        self._daemons.clear()
        if self.folder.name:
            shutil.rmtree(self.folder, ignore_errors=True)


def free_ports(count: int) -> list[int]:
    """Return free ports below the range from which the kernel picks ports for connections."""
    candidates = random.SystemRandom().sample(range(16_000, 32_000), 40 * count)
    with contextlib.ExitStack() as stack:
        ports = []
        for port in candidates:
            listener = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                listener.bind(("", port))
                ports.append(port)
            if len(ports) == count:
                return ports
    raise RuntimeError(f"no {count} free ports")
