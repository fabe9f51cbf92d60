"""What benchmarks start, and its end: every process of a command is gone when it returns."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

#: The variable by which the processes of a command are found, whoever started them.
MARK = "HPCDASK_BENCHMARK"
#: How long processes may still clean up behind themselves.
GRACE_S = 5.0


@dataclass(frozen=True)
class Ended:
    """How a command ended; the code is None where it ran past its deadline."""

    code: int | None
    out: str
    err: str
    wall_s: float


def gpu_names() -> list[str]:
    """Names of this machine's GPUs."""
    if not shutil.which("nvidia-smi"):
        return []
    found = subprocess.run(
        ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return found.stdout.split("\n")[:-1] if found.returncode == 0 else []


def mpirun(ranks: int) -> list[str]:
    """Open MPI's launcher, for a machine with fewer cores than ranks too."""
    beside = Path(sys.executable).parent / "mpirun"
    root = ["--allow-run-as-root"] if os.getuid() == 0 else []
    return [
        str(beside) if beside.exists() else "mpirun",
        *root,
        "--oversubscribe",
        "-n",
        str(ranks),
    ]


def execute(command: Sequence[str], environment: Mapping[str, str], timeout: float) -> Ended:
    """Run a command to its end or its deadline, with the time of its launch in `LAUNCHED`."""
    mark, launched = uuid.uuid4().hex, time.time()
    env = {**os.environ, **environment, MARK: mark, "LAUNCHED": repr(launched)}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        code = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(timeout)
            wall_s = time.time() - launched
        finally:
            if process.poll() is None:
                for one in marked(mark):
                    with contextlib.suppress(psutil.Error):
                        one.terminate()
            end_marked(mark)
            process.wait()
        out.seek(0)
        err.seek(0)
        return Ended(code, out.read(), err.read(), wall_s)


def end_marked(mark: str) -> None:
    """Wait for a command's processes to end; kill those that stay."""
    kill_at = time.monotonic() + GRACE_S
    while (remaining := marked(mark)) and time.monotonic() < kill_at + GRACE_S:
        if time.monotonic() > kill_at:
            for process in remaining:
                with contextlib.suppress(psutil.Error):
                    process.kill()
        time.sleep(0.05)


def marked(mark: str) -> list[psutil.Process]:
    """The living processes of a command."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark:
                found.append(process)
    return found
