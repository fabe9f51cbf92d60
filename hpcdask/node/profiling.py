"""Profiles of workers: py-spy beside each of them, or their rank under nsys."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hpcdask.bootstrap import ranks, reexec
from hpcdask.bootstrap.janitor import Janitor
from hpcdask.errors import UsageError
from hpcdask.logs import say
from hpcdask.spec.specs import WorkerSpec

from .observe import find_spy

#: In the environment of a rank that runs under nsys.
UNDER_NSYS = "HPCDASK_UNDER_NSYS"
#: Seconds that py-spy has to write its file.
WRITE_DEADLINE_S = 30.0


def folder_of(spec: WorkerSpec) -> Path:
    """Where the profiles go."""
    return Path(spec.profile_folder or "hpcdask-profile").absolute()


def check(spec: WorkerSpec) -> None:
    """Make the folder. Raises UsageError if that or the tool is missing here."""
    if spec.profile == "none":
        return
    host = socket.gethostname()
    if spec.profile == "py-spy" and find_spy() is None:
        lacks = "py-spy is not installed there: pip install py-spy"
    elif spec.profile == "nsys" and shutil.which("nsys") is None:
        lacks = "there is no nsys on PATH. Load the module that has NVIDIA Nsight Systems"
    elif spec.profile == "nsys" and find_spec("nvtx") is None:
        lacks = "nvtx, which names Dask tasks in the profile, is not installed: pip install nvtx"
    else:
        try:
            folder_of(spec).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"--profile-folder: {folder_of(spec)} cannot be made on {host}: {error.strerror}"
            ) from None
        return
    raise UsageError(f"--profile {spec.profile} on {host}: {lacks}")


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
        """Have it write its file; say why it did not."""
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


def run_under_nsys(spec: WorkerSpec, name: str, janitor: Janitor) -> None:
    """Execute this command once more under nsys, if it is asked for; ``name`` is the file's."""
    if spec.profile != "nsys" or UNDER_NSYS in os.environ or shutil.which("nsys") is None:
        return  # what is missing is told with all else that is wrong here
    folder = folder_of(spec)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return  # `check` says it
    given = {**ranks.given(), ranks.LAUNCHER_PID: ranks.launcher_text(), UNDER_NSYS: "1"}
    janitor.dismiss()
    reexec.restore_environment()
    command = ["nsys", "profile", "--trace=cuda,nvtx,osrt", "--trace-fork-before-exec=true"]
    command += ["--sample=none", "--cpuctxsw=none", "--output", str(folder / name)]
    os.execvpe(command[0], [*command, sys.executable, *sys.orig_argv[1:]], {**os.environ, **given})


@contextlib.contextmanager
def task_range(key: object) -> Iterator[None]:
    """Show a Dask task as a range of the profile, if there is one."""
    if UNDER_NSYS not in os.environ:
        yield
        return
    import nvtx
    from dask.utils import key_split

    mark: Any = nvtx.start_range(message=key_split(key), domain="dask")
    try:
        yield
    finally:
        nvtx.end_range(mark)
