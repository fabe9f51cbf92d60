"""The door to a queueing system: the only place that runs its commands."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

from hpcdask.errors import NoAnswer, QueueError, UsageError

from .job_state import QueueStatus

#: Seconds after which a command of the queueing system counts as hanging.
COMMAND_TIMEOUT_S = 60.0
#: Files of Docker, Podman, Singularity, Apptainer and enroot in the containers that they start.
CONTAINER_MARKS = (
    *("/.dockerenv", "/run/.containerenv", "/.singularity.d", "/.apptainer.d"),
    *("/.enroot", "/.lock"),
)
#: Variables that Apptainer and Singularity set there.
CONTAINER_VARIABLES = ("APPTAINER_CONTAINER", "SINGULARITY_CONTAINER")


@dataclass(frozen=True)
class Request:
    """What one job asks for beside what dask-jobqueue's header asks for already.

    `name` is as the user gave it. By `tag`, ``hpcdask:CLUSTER``, `hpcdask jobs` and
    `hpcdask cleanup` know the job. `folder` is the existing 0700 folder of the cluster's logs,
    absolute. The queue's own output of a job goes to a file there whose name is ``queue-``, the
    job's id, ``.log``, as far as the queue can make that name.

    `gpus` counts those on all nodes of the job together, and may be 0; `gpu_type` is in the site's
    words. `cores` and `memory`, in bytes of host memory, are the whole job's.
    """

    name: str
    tag: str
    folder: str
    gpus: int = 1
    gpu_type: str | None = None
    nodes: int = 1
    cores: int = 1
    memory: int = 0


class Queue(ABC):
    """One queueing system. Its commands count as hanging after `timeout_s`."""

    #: As users call it.
    title: ClassVar[str]
    #: Commands that must be on PATH; the first one submits.
    programs: ClassVar[tuple[str, ...]]
    #: What its commands need beside themselves, for a container into which they are bound.
    companions: ClassVar[str] = "its configuration"
    #: How to list what may be asked for, per kind of refusal.
    advice: ClassVar[str] = ""
    #: Shell words that give, inside a job, its id as `submit` returns it, and its restart count.
    job_id: ClassVar[str]
    restarts: ClassVar[str] = "0"
    #: How variables begin that would change what its commands do, or what a job learns of itself.
    ignored_variables: ClassVar[tuple[str, ...]] = ()

    def __init__(self, timeout_s: float = COMMAND_TIMEOUT_S) -> None:
        self.timeout_s = timeout_s

    # What the script says

    @abstractmethod
    def script(self, job: Any, request: Request, preamble: Sequence[str], command: str) -> str:
        """The job script: the header, what `request` adds to it, `preamble`, and `command`.

        `job` is an instance of dask-jobqueue's Job class: its ``job_header``, ``shebang`` and
        ``_job_script_prologue`` are used. The lines of `preamble` go before that prologue, which is
        the user's; `command` starts the worker.
        """

    def replaced(self, job: Any) -> list[str]:
        """Directives that the user wrote and that `script` overrules with the tag."""
        return []

    @staticmethod
    @abstractmethod
    def parse_walltime(text: str) -> timedelta:
        """Read a walltime in this system's forms. UsageError names them."""

    # What is asked of the queue

    async def limit(self) -> int:
        """Most jobs that one submission may hold."""
        return 1

    @abstractmethod
    async def submit(self, script: str, count: int) -> list[str]:
        """Submit the script's file as `count` jobs with one command, and return their ids.

        Raises Refused if the queue does not want it: ``for_now`` when a limit of the site is
        reached or the queue is too busy, so that it may be tried later or with fewer. Raises
        NoAnswer if the command hangs, or says that its answer was lost, and QueueError if its
        answer is not understood.
        """

    @abstractmethod
    async def query(self, ids: Collection[str]) -> dict[str, QueueStatus]:
        """The jobs as the queue shows them now, with one command; what it does not show is missing.

        Raises QueueError when it does not answer.
        """

    async def departed(self, ids: Collection[str]) -> dict[str, QueueStatus]:
        """How jobs ended that `query` does not show any more, as far as accounting knows."""
        return {}

    @abstractmethod
    async def cancel(self, ids: Collection[str]) -> None:
        """Cancel jobs with one command. Those that are over already do not matter."""

    @abstractmethod
    async def tagged(self) -> dict[str, str]:
        """Ids of all jobs of this user in the queue that carry a tag of hpcdask, with the tag.

        Raises NoTags where the queue does not show them.
        """

    # Running commands

    def check(
        self,
        instead: str = "job_script() still shows what would be submitted",
        lacks: str = "no job can be submitted to",
    ) -> None:
        """Raise UsageError where a command of this system is missing; it says where to run.

        `instead` says in the error what can be done all the same, `lacks` what cannot be done, up
        to the system's name.
        """
        for program in self.programs:
            if shutil.which(program) is None:
                raise UsageError(
                    f"there is no {program} on this machine, so {lacks} {self.title}. "
                    f"{where_to_run(self)}. {instead}"
                )

    async def run(
        self, *command: str, input: str | None = None, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run one command in a thread; it may not take longer than `timeout_s`.

        Who no longer waits for it has it killed: an event loop that ends waits for its threads.
        Files that the queue creates for the job are private: the umask is 077. Raises NoAnswer if
        the command hangs, and QueueError if it cannot be started.
        """
        given_up, started = threading.Event(), list[subprocess.Popen[str]]()

        def tell(process: subprocess.Popen[str]) -> None:
            started.append(process)
            if given_up.is_set():
                _kill(process)

        try:
            return await asyncio.to_thread(self._run, command, input, env, tell)
        except asyncio.CancelledError:
            given_up.set()
            for process in started:
                _kill(process)
            raise

    def _run(
        self,
        command: Sequence[str],
        input: str | None,
        env: Mapping[str, str] | None,
        started: Callable[[subprocess.Popen[str]], None] = lambda process: None,
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
            raise QueueError(f"{command[0]} cannot be started: {error.strerror}") from None
        started(process)
        try:
            out, err = process.communicate(input, timeout=self.timeout_s)
        except subprocess.TimeoutExpired:
            _kill(process)
            said = _last_words(process)
            raise NoAnswer(
                f"{command[0]} did not answer within {self.timeout_s:g} s"
                f"{f' (it said: {said})' if said else ''}: {self.title} is "
                f"overloaded or down. See whether it answers in a terminal"
            ) from None
        return subprocess.CompletedProcess(list(command), process.returncode, out, err)


def in_container() -> bool:
    """Whether this process seems to run inside a container."""
    return any(map(os.environ.get, CONTAINER_VARIABLES)) or any(
        os.path.exists(mark) for mark in CONTAINER_MARKS
    )


def where_to_run(queue: Queue) -> str:
    """Return where the commands of a queueing system are, as advice."""
    if not in_container():
        return "Run this on a login node of the site"
    return (
        f"This is inside a container, which does not have the queue's commands: submit from the "
        f"host, or bind into the container {', '.join(queue.programs)} and {queue.companions}"
    )


def _kill(process: subprocess.Popen[str]) -> None:
    """With a wrapper's children, which hold the pipes too."""
    if process.returncode is None:  # else its id may be another one's
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _last_words(process: subprocess.Popen[str]) -> str:
    """Return what a killed process had said, in one line."""
    try:
        out, err = process.communicate(timeout=1)
    except subprocess.TimeoutExpired:  # a child in a session of its own still holds the pipes
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        process.wait()  # it was killed
        return ""
    return " ".join(f"{out} {err}".split())[:500]
