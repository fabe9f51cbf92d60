"""SLURM, through ``sbatch``, ``squeue``, ``sacct`` and ``scancel``.

A line of options in a script is split into words as sbatch does it: quotes of both kinds hold
text, and a backslash escapes, also inside of quotes (sbatch(1), and seen with 22.05).
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal, get_args

from hpcdask.errors import QueueError, Refused, UsageError

from . import slurm_errors, slurm_output
from .base import Allocation, Queue, Request
from .commands import COMMAND_TIMEOUT_S
from .helpers import pick, read
from .job_state import OVER, QueueState, QueueStatus
from .script import double_quoted, one_line, option_values, option_words

GpuRequest = Literal["gres", "gpus-per-node", "gpus"]

#: The line that names the file of SLURM's own output of a job, without its end.
OUTPUT = "#SBATCH --output="
ARRAY_LOG, SINGLE_LOG = "queue-%A_%a.log", "queue-%j.log"
#: Variable by which all of SLURM's commands but sacct talk to other clusters than this one.
CLUSTERS = "SLURM_CLUSTERS"
#: Most expressions of job ids in one call of scancel.
CANCELLED_AT_ONCE = 1000
#: SLURM's MaxArraySize where the site does not set it.
MAX_ARRAY_SIZE = 1001

WALLTIME_FORMS = (
    "MINUTES, MINUTES:SECONDS, HOURS:MINUTES:SECONDS, DAYS-HOURS, DAYS-HOURS:MINUTES, "
    "DAYS-HOURS:MINUTES:SECONDS or UNLIMITED"
)


class SlurmQueue(Queue):
    """SLURM; `gpu_request` is the option by which the site takes a request of GPUs."""

    title = "SLURM"
    jobqueue = ("slurm", "SLURMJob")
    summary = """\
    Dask workers on GPUs that SLURM grants, one job per GPU, following the work up and down.

    >>> cluster = SLURMCUDACluster(cores=8, memory="64GiB", walltime="02:00:00", queue="gpu")
    >>> cluster.adapt(minimum=0, maximum=32)
    >>> client = cluster.get_client()"""
    keywords = (
        ("gpu_request", GpuRequest, "How the site takes the request of GPUs. Default: gres."),
        ("job_cpu", int, "Cores that a job asks for. Default: ``cores``."),
        ("job_mem", str, "Memory that a job asks for, in SLURM's form. Default: ``memory``."),
    )
    programs = ("sbatch", "squeue", "scancel")
    list_queues = ("sinfo", "--all", "--noheader", "--format=%R")
    lasting = staticmethod(slurm_errors.lasting)
    denied = re.compile(r"Access/permission denied", re.I)
    job_id = "${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"
    restarts = "${SLURM_RESTART_COUNT:-0}"
    # sbatch takes these for options that beat the script's, or hands them to the job, where they
    # would be those of the job that the notebook runs in
    ignored_variables = (
        *("SACCT_", "SCANCEL_", "SQUEUE_"),
        *("SBATCH_ARRAY_INX", "SBATCH_CLUSTERS", "SBATCH_COMMENT", "SBATCH_GPUS", "SBATCH_GRES"),
        *("SBATCH_JOB_NAME", "SBATCH_MEM_PER", "SBATCH_OUTPUT", "SBATCH_TIMELIMIT", "SBATCH_WAIT"),
        *("SLURM_ARRAY_", "SLURM_CPU", "SLURM_GPU", "SLURM_JOB", "SLURM_MEM_", "SLURM_NNODES"),
        *("SLURM_NODE", "SLURM_NPROCS", "SLURM_NTASKS", "SLURM_RESTART_COUNT", "SLURM_STEP"),
        *("SLURM_TASK", "SLURM_TRES_"),
    )

    prefix = "#SBATCH"
    name_option = "-J"
    quoted_options = "-p -A -t --mem"
    gpu_example = (
        "#SBATCH --gpus-per-node=1 (or --gres=gpu:1), and srun --gpus-per-task=1 --gpu-bind=none"
    )
    gpu_options = ("--gpus", "--gpus-per-node", "--gpus-per-task", "--gpus-per-socket", "-G")
    # Of the words of a gres list: gpu, gpu:2, gpu:a100:2, gpu=2
    gpu_pattern = re.compile(r"(?:gres[/:])?gpu(?:[:=].*)?", re.I)
    launchers = ("srun", "mpirun")
    counts_ranks = True
    names_log = True

    def __init__(
        self, gpu_request: GpuRequest = "gres", timeout_s: float = COMMAND_TIMEOUT_S
    ) -> None:
        super().__init__(timeout_s)
        if gpu_request not in get_args(GpuRequest):
            forms = ", ".join(get_args(GpuRequest))
            raise UsageError(f"gpu_request={gpu_request!r} is not one of {forms}")
        self.gpu_request = gpu_request
        self._site: dict[str, str] = {}
        self._shown: set[str] = set()  # by the last query

    @classmethod
    def of_cluster(cls, keywords: dict[str, Any]) -> SlurmQueue:
        request = keywords.pop("gpu_request", None)
        return cls() if request is None else cls(gpu_request=request)

    # What the script says

    def refuse_nodes(self, request: Request) -> None:
        """Take any number of nodes: srun starts the workers on all of them."""

    def name_directive(self, name: str) -> str:
        return f"--job-name={double_quoted(name, 'job_name')}"

    def quote(self, value: str) -> str:
        plain = re.fullmatch(r"[\w.,:/@%+=-]+", value, re.ASCII)
        return value if plain else double_quoted(value, "a keyword")

    def with_gpus(self, lines: list[str], request: Request) -> list[str]:
        _refuse_others(lines)
        if request.nodes > 1:
            lines = [line for line in lines if line != "#SBATCH -n 1"]
            lines.append(f"#SBATCH --nodes={request.nodes} --ntasks-per-node=1")
        return [*lines, f"#SBATCH {self._gpus(request)}"] if request.gpus else lines

    def with_directives(self, lines: list[str], job: Any, request: Request) -> list[str]:
        if "\\" in request.folder:
            raise UsageError(
                f"the folder {request.folder!r} has a backslash in its name, and SLURM writes no "
                f"file of its own for each job there. Choose another folder"
            )
        name = "hpcdask-%j.log" if request.alone else ARRAY_LOG
        log = os.path.join(request.folder.replace("%", "%%"), name)
        comment = f"#SBATCH --comment={double_quoted(request.tag, 'the tag')}"
        return [*lines, comment, f"{OUTPUT}{double_quoted(log, 'the folder of logs')}"]

    def replaced(self, job: Any) -> list[str]:
        """See `Queue.replaced`."""
        return [
            directive
            for directive in job.job_extra_directives
            if any(re.match("--comment(=|$)", word) for word in _words(directive))
        ]

    def _gpus(self, request: Request) -> str:
        kind = f"{one_line(request.gpu_type, 'gpu_type')}:" if request.gpu_type else ""
        if self.gpu_request == "gpus":
            value = f"{kind}{request.gpus}"
        else:
            per_node, rest = divmod(request.gpus, request.nodes)
            if rest:
                raise UsageError(
                    f"{request.gpus} GPUs cannot be shared evenly by {request.nodes} nodes"
                )
            value = f"{kind}{per_node}"
        if self.gpu_request == "gres":
            value = f"gpu:{value}"
        return f"--{self.gpu_request}={self.quote(value)}"

    @classmethod
    def requested_gpus(cls, directive: str, nodes: int = 1) -> int | None:
        """Read ``--gres=gpu:a100:2,nvme:500``, ``--gpus-per-node a100:4``, ``-G2``.

        Types are optional. The first two count for each node.
        """
        items = [item for value in option_values(directive, "--gres") for item in value.split(",")]
        if found := list(filter(cls.gpu_pattern.fullmatch, items)):
            return nodes * sum(map(_last_number, found))
        per_node = any(option_values(directive, "--gpus-per-node"))
        for value in option_values(directive, *cls.gpu_options):
            return (nodes if per_node else 1) * sum(map(_last_number, value.split(",")))
        return None

    async def allocation(
        self, asked: Allocation, directives: list[str], site: Mapping[str, Any]
    ) -> dict[str, Any]:
        megabytes = math.ceil((asked.memory or 0) / 2**20)
        unasked = [] if asked.cpus_per_gpu else ["#SBATCH --cpus-per-task="]
        unasked += ["#SBATCH --mem="] if asked.memory is None else []
        return {
            "job_cpu": asked.cpus_per_gpu or 1,
            "job_mem": f"{megabytes}M" if megabytes else "0",
            "job_directives_skip": ["#SBATCH -n 1", *unasked],
            "job_extra_directives": [
                *(f"--nodes={asked.nodes}", f"--ntasks-per-node={asked.ranks}"),
                "--open-mode=append",  # a requeued job goes on in the same log
                *directives,
            ],
        }

    @classmethod
    def on_each_node(cls, environ: Mapping[str, str]) -> list[str]:
        """Start one task on each node, unless this is a task."""
        nodes = int(environ.get("SLURM_JOB_NUM_NODES") or 1)
        if nodes == 1 or "SLURM_STEP_ID" in environ:
            return []
        return [
            *("srun", f"-n{nodes}", "--ntasks-per-node=1", "-K"),
            "--cpu-bind=none",  # by default a task gets one core
            *("--mpi=none", "--export=ALL", "--input=none"),
        ]

    @classmethod
    def parse_walltime(cls, text: str) -> timedelta:
        """Read a walltime; ``timedelta.max`` where there is no limit."""
        if text.strip().upper() in ("UNLIMITED", "INFINITE"):
            return timedelta.max
        match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text.strip())
        if match:
            days = match[1]
            numbers = [int(number) for number in match.groups()[1:] if number is not None]
            # the first number is of hours after days, and where there are three
            names = ("hours", "minutes", "seconds")[0 if days or len(numbers) == 3 else 1 :]
            parts = dict(zip(names, numbers, strict=False))
            if walltime := timedelta(days=int(days or 0), **parts):
                return walltime
        raise UsageError(f"walltime={text!r} is not one of {WALLTIME_FORMS}")

    # What is asked of the queue

    async def limit(self) -> int:
        """Return MaxArraySize of the site or ``max_array_tasks``; 1 where it has no arrays."""
        site = await self._configuration()
        tasks = re.search(r"max_array_tasks=(\d+)", site.get("SchedulerParameters", ""))
        size = int(site.get("MaxArraySize", MAX_ARRAY_SIZE))
        return max(1, min(size, int(tasks[1])) if tasks else size)

    async def _configuration(self) -> dict[str, str]:
        """Return SLURM's settings, which are read once."""
        if not self._site:
            text = await self.answer("scontrol", "show", "config")
            pairs = (line.partition("=") for line in text.splitlines())
            self._site = {key.strip(): value.strip() for key, _, value in pairs}
        return self._site

    async def submit(self, script: str, count: int) -> list[str]:
        text = await read(script)
        arrays = ARRAY_LOG in text and await self.limit() > 1
        extra = [f"--array=0-{count - 1}"] if arrays else _single_output(text)
        try:
            done = await self.run("sbatch", "--parsable", *extra, script)
        except QueueError as error:
            # sbatch waits for minutes, and says why
            if slurm_errors.LIMITS.search(str(error)):
                raise Refused(
                    f"{error}. Script kept at {script}", for_now=True, fewer=False
                ) from None
            raise
        if done.returncode:
            raise self.refused(done, script)
        # a site's greetings may come before it
        job = re.search(r"^(\d+)(?:;\S+)?\s*\Z", done.stdout, re.M)
        if job is None:
            raise QueueError(
                f"sbatch answered {done.stdout[:200]!r} for {script}, without a job id"
            )
        return [f"{job[1]}_{n}" for n in range(count)] if arrays else [job[1]]

    async def query(self, ids: Collection[str]) -> dict[str, QueueStatus]:
        if not ids:
            return {}
        text = await self._squeue(*slurm_output.COLUMNS, slurm_output.LAST_COLUMN)
        seen = slurm_output.parse_squeue(text, time.time())
        self._shown = set(seen)
        wanted = pick(ids, seen)
        return {
            job_id: job for job_id, job in wanted.items() if job.state is not QueueState.UNKNOWN
        }

    async def departed(self, ids: Collection[str]) -> dict[str, QueueStatus]:
        seen = await self._accounting(ids) if ids else {}
        return slurm_output.left(ids, self._shown) | seen

    async def _accounting(self, ids: Collection[str]) -> dict[str, QueueStatus]:
        # Without it nobody knows: squeue has shown all that the controller remembers
        kind = (await self._configuration()).get("AccountingStorageType", "")
        if kind in ("", "(null)", "accounting_storage/none"):
            return {}
        jobs = ",".join(sorted({job_id.partition("_")[0] for job_id in ids}))
        options = ["--noheader", "--allocations", "--parsable2", f"--jobs={jobs}"]
        if clusters := os.environ.get(CLUSTERS):
            options.append(f"--clusters={clusters}")
        columns = f"--format={','.join(slurm_output.SACCT_COLUMNS)}"
        text = await self.answer("sacct", *options, columns, env=slurm_output.ENVIRONMENT)
        return pick(ids, slurm_output.parse_sacct(text))

    async def cancel(self, ids: Collection[str]) -> None:
        expressions = _expressions(ids)
        for start in range(0, len(expressions), CANCELLED_AT_ONCE):
            some = expressions[start : start + CANCELLED_AT_ONCE]
            done = await self.run("scancel", *some)
            lines = done.stderr.splitlines()
            if done.returncode and not (
                lines and all(map(slurm_errors.OVER_ALREADY.search, lines))
            ):
                raise self.failed(done)

    async def tagged(self) -> dict[str, str]:
        text = await self._squeue("JobArrayID", "State", "Comment")
        jobs = slurm_output.rows(text, 3)
        return {
            job_id: comment
            for job_id, state, comment in jobs
            if comment.startswith("hpcdask:") and slurm_output.STATES.get(state) not in OVER
        }

    async def _squeue(self, *names: str) -> str:
        """List all jobs of this user, also ended ones: an unknown id would be an error."""
        options = ("--noheader", "--states=all", f"--user={os.getuid()}")
        columns = f"--Format={slurm_output.columns(*names)}"
        return await self.answer("squeue", *options, columns, env=slurm_output.ENVIRONMENT)

    def failed(self, done: subprocess.CompletedProcess[str]) -> QueueError:
        return slurm_errors.failed(done)

    def refused(self, done: subprocess.CompletedProcess[str], script: str) -> QueueError:
        return slurm_errors.refused(done, script)


def _refuse_others(lines: Sequence[str]) -> None:
    """Raise UsageError for directives that send a job where nobody looks for it."""
    for line in lines:
        if found := next(filter(re.compile("-M|--clusters?(=|$)").match, _words(line)), None):
            raise UsageError(
                f"{found} in the line {line!r} is for sbatch alone: squeue and scancel would not "
                f"find the jobs. Take it out, and set {CLUSTERS} in the environment instead, which "
                f"these commands read too"
            )


def _words(line: str) -> list[str]:
    """Split a line of options as sbatch does, without a comment at its end."""
    return option_words(line.removeprefix("#SBATCH"), comments=True)


def _last_number(item: str) -> int:
    """Return the count behind a type; a type alone is one GPU."""
    last = re.split("[:=]", item)[-1]
    return int(last) if last.isdecimal() else 1


def _single_output(script: str) -> list[str]:
    """Return the option for a job outside of an array, whose %a would be 4294967294."""
    for line in script.split("\n"):
        if line.startswith(OUTPUT) and line.endswith(f'{ARRAY_LOG}"'):
            path = re.sub(r"\\(.)", r"\1", line.removeprefix(OUTPUT)[1:-1])
            return [f"--output={path.removesuffix(ARRAY_LOG)}{SINGLE_LOG}"]
    return []


def _expressions(ids: Collection[str]) -> list[str]:
    """Return the ids with the elements of one array together: ``12_[0,3]``."""
    elements: dict[str, list[str]] = {}
    for job_id in ids:
        job, _, index = job_id.partition("_")
        elements.setdefault(job, []).extend([index] if index else [])
    return [f"{job}_[{','.join(indices)}]" if indices else job for job, indices in elements.items()]
