"""Profiles of workers: py-spy beside each of their processes."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
from pathlib import Path

from hpcdask.errors import UsageError
from hpcdask.logs import say
from hpcdask.spec.specs import WorkerSpec

from .observe import find_spy

#: Seconds that py-spy has to write its file.
WRITE_DEADLINE_S = 30.0


def folder_of(spec: WorkerSpec) -> Path:
    """Return the folder for the profiles."""
    return Path(spec.profile_folder or "hpcdask-profile").absolute()


def check(spec: WorkerSpec) -> None:
    """Make the folder. Raise UsageError if that fails, or if py-spy is missing here."""
    if spec.profile == "none":
        return
    host, folder = socket.gethostname(), folder_of(spec)
    if find_spy() is None:
        raise UsageError(
            f"--profile py-spy on {host}: py-spy is not installed there: pip install py-spy"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"--profile-folder: {folder} cannot be made on {host}: {error.strerror}"
        ) from None


class Profiler:
    """py-spy on one worker's process, until that ends."""

    def __init__(self, spec: WorkerSpec, worker: str, pid: int) -> None:
        self.file = folder_of(spec) / f"{worker}-{pid}.svg"
        self._worker = worker
        command = [find_spy() or "py-spy", "record", "--pid", str(pid), "--threads"]
        command += ["--nonblocking"]  # else a race in it can stop the worker for good
        command += ["--duration", "unlimited", "--format", "flamegraph", "--output", str(self.file)]
        self._process = subprocess.Popen(  # out of reach of what a launcher sends to the rank
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    async def end(self) -> bool:
        """Make py-spy write its file. Return whether it did; if not, tell the user why."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGINT)
        try:
            _, told = await asyncio.to_thread(self._process.communicate, timeout=WRITE_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            told = f"it took more than {WRITE_DEADLINE_S:g} s".encode()
        if self.file.exists():
            return True
        why = (told.decode(errors="replace").strip().splitlines() or ["no reason given"])[-1]
        say(f"warning: no profile of worker {self._worker}: py-spy failed: {why}")
        return False
