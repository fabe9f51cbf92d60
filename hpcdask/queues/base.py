"""Base class of queueing systems: the only place that runs their commands."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

from hpcdask.errors import NoAnswer, NotHere, QueueError, Refused, UsageError

from .helpers import (
    AGAIN,
    T,
    first_number,
    one_line,
    option_values,
    parse_clock,
    render,
)
from .job_state import QueueStatus

#: Matches no text.
NOTHING = re.compile(r"(?!)")


@dataclass(frozen=True)
class Request:
    """Request of one job, beside what dask-jobqueue's header asks for already.

    `name` is as the user gave it. By `tag`, ``hpcdask:CLUSTER``, `hpcdask list --jobs` and
    `hpcdask down` know the job. `folder` is the existing 0700 folder of the cluster's logs,
    absolute. The queue's own output of a job goes to a file there whose name is ``queue-``, the
    job's id, ``.log``, as far as the queue can make that name.

    `gpus` counts those on all nodes of the job together, and may be 0; `gpu_type` is in the site's
    words. A job that is `alone` is none of a cluster's, which would replace it: it may run again.
    One that is `warned` gets a signal before SIGKILL, also where the queue sends none by itself.
    """

    name: str
    tag: str = ""
    folder: str = ""
    gpus: int = 1
    gpu_type: str | None = None
    nodes: int = 1
    alone: bool = False
    warned: bool = False

    def kind(self, resource: str) -> list[str]:
        """Return the type of GPU as a resource, if any; ``model=a100`` names another resource."""
        if not self.gpu_type:
            return []
        return [self.gpu_type if "=" in self.gpu_type else f"{resource}={self.gpu_type}"]


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """Request of a batch job, in the words of `hpcdask submit`.

    Each GPU gets one rank; without GPUs each node has one. `walltime` is in the queueing system's
    forms, or None for what is configured. `memory` is host memory per node in bytes: 0 for all of
    it, None for what the site gives. `directives` are more options of the queueing system.
    """

    nodes: int = 1
    gpus_per_node: int = 1
    walltime: str | None = None
    queue: str | None = None
    account: str | None = None
    cpus_per_gpu: int | None = None
    memory: int | None = None
    directives: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        """Return the ranks per node."""
        return max(1, self.gpus_per_node)

    @property
    def cores(self) -> int:
        """Return the cores per node; one per rank if the user leaves that to the site."""
        return self.ranks * (self.cpus_per_gpu or 1)


class Queue(ABC):
    """Queueing system: attributes and methods that the class of a system sets and overrides."""

    #: As users call the system.
    title: ClassVar[str]
    #: Section of the configuration, and the class that writes the header: dask-jobqueue's in the
    #: module of the section's name, or any class with its module before it.
    jobqueue: ClassVar[tuple[str, str]]
    #: Keywords of the cluster class that no other system has, where the class is made from this.
    keywords: ClassVar[tuple[str, ...]] = ()
    #: Whether jobs are processes of this machine, which all have the same walltime.
    is_local: ClassVar[bool] = False
    #: Commands that must be on PATH; the first three submit, show and cancel jobs.
    programs: ClassVar[tuple[str, ...]]
    #: Seconds after which a command counts as hanging.
    timeout_s: float = 60.0
    #: How to list what may be asked for, per kind of refusal.
    advice: ClassVar[str] = ""
    #: Words of refusals that time or fewer jobs cure.
    limits: ClassVar[re.Pattern[str]] = NOTHING
    #: What commands say on a host that may not use them, or whose jobs may not.
    denied: ClassVar[re.Pattern[str]] = NOTHING
    #: What they say if the system did not answer them, and what of their words says nothing.
    unanswered: ClassVar[re.Pattern[str]] = NOTHING
    noise: ClassVar[re.Pattern[str]] = NOTHING
    #: How variables begin that would change what its commands do, or what a job learns of itself.
    ignored_variables: ClassVar[tuple[str, ...]] = ()
    #: What the command that cancels says, line by line, if it failed only as jobs are gone already.
    gone: ClassVar[re.Pattern[str]] = NOTHING
    #: The largest number of jobs of one submission: the command that tells, if any, the pattern of
    #: the number in its words, and the default.
    array_limit: ClassVar[tuple[str, str, int]] = ("", "", 1)
    #: Shell words that give, inside a job, its id as `submit` returns it, and its restart count.
    job_id: ClassVar[str]
    restarts: ClassVar[str] = "0"
    #: Whether a job that is started again does not learn of it, so that it must end at once.
    needs_guard: ClassVar[bool] = False
    #: How a directive begins; dask-jobqueue's options for the job's name, and for words to quote;
    #: what stands behind a backslash in double quotes, or None where quotes are a shell's.
    prefix: ClassVar[str] = "#PBS"
    name_option: ClassVar[str] = "-N"
    quoted_options: ClassVar[str] = ""
    escaped: ClassVar[str | None] = None
    #: The characters of a job's name and, if fewer, of its start, as in a regular expression's
    #: brackets, and its length; empty where a name may be anything.
    name_form: ClassVar[tuple[str, str, int] | tuple[()]] = ()
    #: Option of dask-jobqueue's line with the memory; directives of the user that take its place.
    memory_option: ClassVar[str] = ""
    memory_pattern: ClassVar[re.Pattern[str]] = NOTHING
    #: Directives that request memory of which the job learns, and those that the tag overrules.
    told_memory: ClassVar[re.Pattern[str]] = NOTHING
    overruled: ClassVar[re.Pattern[str]] = NOTHING
    #: How one asks for a GPU; options of directives that may do so, and their values.
    gpu_example: ClassVar[str] = ""
    gpu_options: ClassVar[tuple[str, ...]] = ("-l",)
    gpu_pattern: ClassVar[re.Pattern[str]] = NOTHING
    #: The units of a walltime's numbers, the last one's first, and the forms in words.
    walltime_units: ClassVar[str] = "smh"
    walltime_forms: ClassVar[str] = "SECONDS, MINUTES:SECONDS, HOURS:MINUTES:SECONDS"
    #: Variable with the job's nodes: their number, a file with them, or each before its slots.
    nodes_variable: ClassVar[str] = ""
    #: What may start the ranks of a batch job, the usual one first; none without batch jobs.
    launchers: ClassVar[tuple[str, ...]] = ("mpirun",)
    #: Shell line and option that an mpirun of several nodes needs.
    mpirun_setup: ClassVar[str] = ""
    mpirun_option: ClassVar[str] = ""
    #: Whether it tells an MPI how many ranks a node gets: its slots are ranks, not cores.
    counts_ranks: bool = False
    #: Whether its own output of a job goes to a file of any name, while the job runs.
    names_log: ClassVar[bool] = False

    # What the script says

    def script(self, job: Any, request: Request, preamble: Sequence[str], command: str) -> str:
        """Return the job script: header, additions of `request`, `preamble`, and `command`.

        `job` is an instance of dask-jobqueue's Job class: its ``job_header``, ``shebang`` and
        ``_job_script_prologue`` are used. The lines of `preamble` go before that prologue, which is
        the user's; `command` starts the worker. ``job_directives_skip`` holds for the request of
        GPUs too, but not for the tag and the log. Raises UsageError for what cannot be expressed.
        """
        self.refuse_nodes(request)
        one_line(request.folder, "the folder of logs")
        name = self.job_name(request)
        header = self.header(job, name)
        lines = self.with_gpus(header, request) if request.gpus else header
        old, new = "\n".join(header), "\n".join(line for line in lines if line not in header)
        if any(skip in new and skip not in old for skip in job.job_directives_skip):
            lines = header
        lines = self.with_directives(lines, job, request)
        return render(job, lines, [*self.guard(request), *preamble], command)

    def header(self, job: Any, name: str) -> list[str]:
        """Return dask-jobqueue's header with its values quoted and this name for the job.

        ``job_extra_directives`` stay as the user wrote them; their memory replaces the header's.
        """
        own = {f"{self.prefix} {directive}" for directive in job.job_extra_directives}
        memory = any(map(self.memory_pattern.search, own))
        lines = []
        for line in filter(str.strip, (job.job_header or "").split("\n")):
            found = re.fullmatch(rf"{re.escape(self.prefix)} (--?[\w-]+)([ =])(.*)", line)
            if found and line not in own:
                if found[1] == self.memory_option and memory:
                    continue
                if found[1] == self.name_option:
                    line = f"{self.prefix} {found[1]} {self.quote(name)}"
                elif found[1] in self.quoted_options.split() and not found[3].startswith('"'):
                    line = f"{self.prefix} {found[1]}{found[2]}{self.quote(found[3])}"
            lines.append(line)
        return lines

    def refuse_nodes(self, request: Request) -> None:
        """Raise UsageError for jobs of several nodes, if nothing starts workers on the others."""
        if request.nodes > 1 and "srun" not in self.launchers:
            raise UsageError(
                f"nodes_per_job={request.nodes}: jobs of several nodes are for SLURM only. With "
                f"{self.title}, ask for jobs of one node, and more of them"
            )

    def job_name(self, request: Request) -> str:
        """Return the job's name, with `_` for what the queue does not take."""
        if not self.name_form:
            return request.name
        good, start, longest = self.name_form
        name = re.sub(f"[^{good}]", "_", request.name, flags=re.ASCII)
        return (name if re.match(f"[{start or good}]", name) else f"j{name}")[:longest]

    def quote(self, value: str) -> str:
        """Quote a value for the reader of directives, where it needs that."""
        if re.fullmatch(r"[\w.@,+:/=%-]+", one_line(value, self.prefix), re.ASCII):
            return value
        if self.escaped is None:
            return shlex.quote(value)
        text = "".join(f"\\{c}" if c in self.escaped else c for c in value)
        return f'"{text}"'

    def with_gpus(self, lines: list[str], request: Request) -> list[str]:
        """Add the request's GPUs, of which there are some, to the resources of the header."""
        return lines

    def with_directives(self, lines: list[str], job: Any, request: Request) -> list[str]:
        """Add the tag, the file of the queue's own output, and other lines to the header."""
        raise NotImplementedError(f"{type(self).__name__}: override with_directives, or script")

    def guard(self, request: Request) -> list[str]:
        """Return shell lines that end a job which the queue started before.

        Some queues run a job again under its id and do not tell the job. Its workers would come
        with names that the scheduler may still know, so the job ends, and the cluster replaces it.
        """
        if request.alone or not self.needs_guard:
            return []
        log = f"{shlex.quote(request.folder)}/{self.job_id}.log"
        return [f"[ ! -e {log} ] || exit {AGAIN}  # started before: the cluster replaces this job"]

    @classmethod
    def requested_gpus(cls, directive: str, nodes: int = 1) -> int | None:
        """Return the GPUs that a user's directive requests for a job of so many nodes, or None.

        The directive has no prefix. ``--cpus-per-gpu=8`` and ``-p gpus`` request none.
        """
        return first_number(cls.gpu_pattern, option_values(directive, *cls.gpu_options))

    @classmethod
    def parse_walltime(cls, text: str) -> timedelta:
        """Read a walltime in this system's forms. UsageError names them."""
        return parse_clock(text, cls.walltime_units, cls.walltime_forms)

    async def allocation(
        self, asked: Allocation, directives: list[str], site: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return keywords of dask-jobqueue's class for a batch job that depend on the system.

        `directives` are the site's and the user's, `site` is its section of Dask's configuration.
        Raises UsageError for what it does not have.
        """
        if asked.memory == 0:
            raise UsageError("--mem 0, all of the node's memory, is SLURM's. Leave it out")
        return {}

    # What a job of it knows

    @classmethod
    def node_count(cls, environ: Mapping[str, str]) -> int:
        """Return the number of nodes of the job with these variables; 0 if it is unknown."""
        told = environ.get(cls.nodes_variable, "")
        if told.isdecimal():
            return int(told)
        with contextlib.suppress(OSError), open(told) as file:
            return len(set(file.read().split()))
        return len(set(told.split()[::2]))

    def on_each_node(self, command: str) -> str:
        """Return shell lines that replace the shell by a command on each node of its job."""
        return f"exec {command}"

    # What is asked of the queue

    async def limit(self) -> int:
        """Return the largest number of jobs of one submission."""
        command, pattern, usual = self.array_limit
        if not command:
            return usual
        found = re.search(pattern, (await self.run(*command.split())).stdout, re.M)
        return int(found[1] if found else 0) or usual

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
        """Ask for jobs with one command; those that the queue does not show are missing.

        It changes nothing: whoever looks at the queue calls it. Raises QueueError when it does not
        answer.
        """

    async def departed(self, ids: Collection[str]) -> dict[str, QueueStatus]:
        """Ask accounting how jobs ended that `query` does not show any more."""
        return {}

    async def cancel(self, ids: Collection[str]) -> None:
        """Cancel jobs with one command. Those that are over already do not matter."""
        done = await self.run(self.programs[2], *ids)
        lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        if done.returncode and not (lines and all(map(self.gone.search, lines))):
            raise self.failed(done)

    @abstractmethod
    async def tagged(self) -> dict[str, str]:
        """Return the tags of this user's jobs in the queue that carry one of hpcdask's, by id."""

    @classmethod
    def lasting(cls, reason: str) -> str | None:
        """Return advice on jobs that wait for this reason; None where that ends by itself."""
        return cls.advice if re.search(r"\bheld\b|never run|error state", reason, re.I) else None

    # Running commands

    async def run(
        self, *command: str, input: str | None = None, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run one command, which makes private files: its umask is 077.

        Kill the command if the call is cancelled: a closing event loop would wait for its thread.
        Raises NoAnswer if it takes longer than `timeout_s`, and NotHere if it cannot be started.
        """
        own = {k: v for k, v in os.environ.items() if not k.startswith(self.ignored_variables)}
        started: list[subprocess.Popen[str]] = []

        def communicate() -> subprocess.CompletedProcess[str]:
            with subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL if input is None else subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                umask=0o077,
                start_new_session=True,
                env={**own, **(env or {})},
            ) as process:
                started.append(process)
                try:
                    out, err = process.communicate(input, timeout=self.timeout_s)
                finally:
                    _kill(process)
            return subprocess.CompletedProcess(list(command), process.returncode, out, err)

        try:
            return await asyncio.to_thread(communicate)
        except OSError as error:
            raise NotHere(f"{command[0]} cannot be started: {error.strerror}") from None
        except subprocess.TimeoutExpired as error:
            parts = filter(None, (error.stdout, error.stderr))
            said = " ".join(b" ".join(parts).decode(errors="replace").split())[:500]
            raise NoAnswer(
                f"{command[0]} did not answer within {self.timeout_s:g} s"
                f"{f' (it said: {said})' if said else ''}: {self.title} is "
                f"overloaded or down. See whether it answers in a terminal"
            ) from None
        finally:
            for process in started:
                _kill(process)

    async def answer(self, *command: str, **options: Any) -> str:
        """Return the output of a command; `options` are those of `run`. Raises QueueError."""
        done = await self.run(*command, **options)
        if done.returncode:
            raise self.failed(done)
        return done.stdout

    def read_json(self, done: subprocess.CompletedProcess[str], kind: type[T]) -> T:
        """Read JSON of this kind that a command printed; nothing is an empty one."""
        try:
            found = json.loads(done.stdout) if done.stdout.strip() else kind()
        except ValueError:
            found = None
        if done.returncode or not isinstance(found, kind):
            raise self.failed(done)
        return found

    def failed(self, done: subprocess.CompletedProcess[str]) -> QueueError:
        """Return the error of a command that failed."""
        text = self.words(done)
        silent = NoAnswer if self.unanswered.search(text) else QueueError
        kind = NotHere if self.denied.search(text) else silent
        return kind(f"{done.args[0]} failed: {text}. See whether it works in a terminal")

    def words(self, done: subprocess.CompletedProcess[str]) -> str:
        """Return what a command said, each line once, without full stops."""
        said = self.noise.sub("", done.stderr.strip() or done.stdout.strip())
        lines = dict.fromkeys(" ".join(line.split()).rstrip(".") for line in said.splitlines())
        return "; ".join(filter(None, lines))[:500] or f"exit code {done.returncode}"

    async def take(self, script: str, pattern: str, *command: str, **options: Any) -> re.Match[str]:
        """Submit a script with this command, and find the job's id in what it prints.

        Raises Refused if it fails, and QueueError if it prints something else.
        """
        done = await self.run(*command, **options)
        if done.returncode:
            raise self.refused(done, script)
        if not (found := re.search(pattern, done.stdout, re.M)):
            raise QueueError(
                f"{command[0]} answered {self.words(done)!r} instead of a job's id. See with "
                f"{self.programs[1]} whether the job is there"
            )
        return found

    def refused(self, done: subprocess.CompletedProcess[str], script: str) -> QueueError:
        """Return the error of a submission that failed: for now if its words match `limits`."""
        text = self.words(done)
        return Refused(
            f"{done.args[0]} refused the job: {text}. Script kept at {script}. {self.advice}",
            for_now=bool(self.limits.search(text)),
        )

    def check(self, instead: str = "job_script() still shows what would be submitted") -> None:
        """Raise UsageError where a command of this system is missing; it says where to run.

        `instead` says in the error what can be done all the same.
        """
        for program in self.programs:
            if shutil.which(program) is None:
                raise UsageError(
                    f"there is no {program} on this machine, so {self.title} cannot be reached. "
                    f"Run this on a login node of the site. A container needs the queue's commands "
                    f"and their configuration bound into it. {instead}"
                )


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill a command that has not ended, with its children, which hold the pipes too."""
    if process.returncode is None:  # else its id may be another one's
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
