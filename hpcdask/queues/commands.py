"""Commands that run in threads, none of which may hang for ever."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence

#: Seconds after which a command of a queueing system counts as hanging.
COMMAND_TIMEOUT_S = 60.0


async def run_command(
    command: Sequence[str], input: str | None, env: Mapping[str, str], timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """Run one command, which makes private files: its umask is 077.

    Kill the command if the call is cancelled: a closing event loop would wait for its thread.
    Raises OSError if it cannot be started, and TimeoutExpired, with what it said, if it hangs.
    """
    started: list[subprocess.Popen[str]] = []
    cancelled = threading.Event()

    def run() -> subprocess.CompletedProcess[str]:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL if input is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            umask=0o077,
            start_new_session=True,
            env=env,
        )
        started.append(process)
        with process:  # a child in a session of its own may hold its pipes
            if cancelled.is_set():  # while it was being started
                _kill(process)
            try:
                out, err = process.communicate(input, timeout=timeout_s)
            finally:
                _kill(process)
        return subprocess.CompletedProcess(list(command), process.returncode, out, err)

    try:
        return await asyncio.to_thread(run)
    except asyncio.CancelledError:
        cancelled.set()
        for process in started:
            _kill(process)
        raise


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill a command that has not ended, with its children, which hold the pipes too."""
    if process.returncode is None:  # else its id may be another one's
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
