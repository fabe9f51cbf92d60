"""Runs the commands of a queueing system, none of which may hang for ever."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from hpcdask.errors import NoAnswer, NotHere, QueueError

from .helpers import words

#: Matches no text.
NOTHING = re.compile(r"(?!)")
#: Seconds after which a command of the queueing system counts as hanging.
COMMAND_TIMEOUT_S = 60.0


class Commands:
    """The commands of one system, which count as hanging after `timeout_s`."""

    #: As users call the system.
    title: ClassVar[str]
    #: How variables begin that would change what its commands do, or what a job learns of itself.
    ignored_variables: ClassVar[tuple[str, ...]] = ()
    #: What commands say on a host that may not use them, or whose jobs may not.
    denied: ClassVar[re.Pattern[str]] = NOTHING

    def __init__(self, timeout_s: float = COMMAND_TIMEOUT_S) -> None:
        self.timeout_s = timeout_s

    async def answer(self, *command: str, **options: Any) -> str:
        """Return the output of a command; `options` are those of `run`. Raises QueueError."""
        done = await self.run(*command, **options)
        if done.returncode:
            raise self.failed(done)
        return done.stdout

    def failed(self, done: subprocess.CompletedProcess[str]) -> QueueError:
        """Return the error of a command that failed."""
        kind = NotHere if self.denied.search(done.stderr + done.stdout) else QueueError
        return kind(f"{done.args[0]} failed: {words(done)}. See whether it works in a terminal")

    async def run(
        self, *command: str, input: str | None = None, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run one command in a thread; it may not take longer than `timeout_s`.

        Kill the command if the call is cancelled: a closing event loop would wait for its thread.
        Files that the queue creates for the job are private: the umask is 077. Raises NoAnswer if
        the command hangs, and QueueError if it cannot be started.
        """
        started: list[subprocess.Popen[str]] = []
        try:
            return await asyncio.to_thread(self._run, command, input, env, started)
        except asyncio.CancelledError:
            for process in started:
                _kill(process)
            raise

    def _run(
        self,
        command: Sequence[str],
        input: str | None,
        env: Mapping[str, str] | None,
        started: list[subprocess.Popen[str]],
    ) -> subprocess.CompletedProcess[str]:
        passed = {k: v for k, v in os.environ.items() if not k.startswith(self.ignored_variables)}
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL if input is None else subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                umask=0o077,
                start_new_session=True,
                env={**passed, **(env or {})},
            )
        except OSError as error:
            raise NotHere(f"{command[0]} cannot be started: {error.strerror}") from None
        started.append(process)
        with process:  # a child in a session of its own may hold its pipes
            try:
                out, err = process.communicate(input, timeout=self.timeout_s)
            except subprocess.TimeoutExpired as error:
                _kill(process)
                parts = [
                    part.decode(errors="replace") for part in (error.stdout, error.stderr) if part
                ]
                said = " ".join(" ".join(parts).split())[:500]
                raise NoAnswer(
                    f"{command[0]} did not answer within {self.timeout_s:g} s"
                    f"{f' (it said: {said})' if said else ''}: {self.title} is "
                    f"overloaded or down. See whether it answers in a terminal"
                ) from None
        return subprocess.CompletedProcess(list(command), process.returncode, out, err)


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill a command with its children, which hold the pipes too."""
    if process.returncode is None:  # else its id may be another one's
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
