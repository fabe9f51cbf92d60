"""SLURM, through ``sbatch``, ``squeue``, ``sacct`` and ``scancel``.

A line of options in a script is split into words as sbatch does it: quotes of both kinds hold
text, and a backslash escapes, also inside of quotes (sbatch(1), and seen with 22.05). States: "JOB
STATE CODES" of squeue(1) and sacct(1).
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import subprocess
import time
from collections.abc import Collection, Iterator, Mapping
from datetime import timedelta
from typing import Any, Literal, get_args

from hpcdask.errors import NoAnswer, QueueError, Refused, UsageError
from hpcdask.spec.parsing import parse_choice

from .base import Allocation, Queue, Request
from .helpers import elements, option_values, option_words, parse_clock, pick, read
from .job_state import OVER, JobState, QueueStatus

GpuRequest = Literal["gres", "gpus-per-node", "gpus"]

#: Variable by which all of SLURM's commands but sacct talk to other clusters than this one.
CLUSTERS = "SLURM_CLUSTERS"
#: File of SLURM's own output of an array's element, and of a job that is none.
ARRAY_LOG, SINGLE_LOG = "queue-%A_%a.log", "hpcdask-%j.log"

# What squeue and sacct say

#: After each column of squeue; the last one, a reason or a comment, may contain it.
DELIMITER = ";"
COLUMNS = ("JobArrayID", "State", "RestartCnt", "exit_code", "StartTime", "EndTime", "NodeList")
SACCT_COLUMNS = ("JobID", "ExitCode", "Start", "NodeList", "State")
#: Makes the commands print unix times, and the elements of an array whole.
ENVIRONMENT = {"SLURM_TIME_FORMAT": "%s", "SLURM_BITSTR_LEN": "0"}
WORDS = {
    JobState.PENDING: "PENDING RESV_DEL_HOLD CONFIGURING POWER_UP_NODE",
    JobState.REQUEUED: "REQUEUED REQUEUE_FED REQUEUE_HOLD SPECIAL_EXIT",
    JobState.RUNNING: "RUNNING COMPLETING EXPEDITING RESIZING SIGNALING STAGE_OUT STOPPED "
    "SUSPENDED",
    JobState.FAILED: "FAILED BOOT_FAIL LAUNCH_FAILED NODE_FAIL OUT_OF_MEMORY RECONFIG_FAIL",
    JobState.CANCELLED: "CANCELLED REVOKED",
    JobState.TIMEOUT: "TIMEOUT DEADLINE",
    JobState.COMPLETED: "COMPLETED",
    JobState.PREEMPTED: "PREEMPTED",
}
STATES = {word: state for state, words in WORDS.items() for word in words.split()}
#: States that `JobState` says as well, so that the reason need not.
PLAIN = {words.split()[0] for words in WORDS.values()}
#: Ends that are not the job's doing: the code is SLURM's own.
NOT_BY_ITSELF = {"BOOT_FAIL", "DEADLINE", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT"}
NO_REASON = {"", "None", "(null)"}
#: Seconds by which the controller's clock may be ahead of ours all the same.
SKEW_S = 30.0

# Refusals and reasons

#: Said by a controller, by munge, or of a partition that is down: fewer jobs are as many.
TOO_BUSY = re.compile(
    r"temporarily unable|temporarily unavail|Unable to contact"
    r"|Munge \w+ failed|munged is up|authentication error|partition not available",
    re.I,
)
#: Limits on what there may be at a time; other limits, such as a time limit, do not pass.
LIMITS = re.compile(
    rf"SubmitJob|MaxSubmit|MaxJobCount|Invalid job array specification|{TOO_BUSY.pattern}", re.I
)
#: Limits that SLURM names; of others, as of all in older versions, it says "job submit limit".
NAMED_LIMIT = re.compile(r"\b(QOS|Assoc)\w*(Limit|Violation|Max\w+)|\bPart\w+Limit")
#: SLURM may have taken the job and its answer was lost: what sbatch decodes is an answer.
LOST_ANSWER = re.compile(
    r"timed out|Zero Bytes|Connection reset|Communication|Munge decode failed", re.I
)
#: Reasons of jobs that wait for more than free nodes, such as another limit, or to be released.
LASTING = re.compile(
    r"(Partition|QOS|Assoc|Account|Invalid|BadConstraints|JobHeld|ReservationDeleted)"
    r"|(Max\w+Per|DependencyNeverSatisfied|ReqNodeNotAvail|Nodes required for job are DOWN)"
    r"|job[ _]requeued[ _]in[ _]held[ _]state"
)
#: Reasons of jobs that SLURM could not start; it writes them with spaces or underscores.
STUCK = re.compile("launch[ _]failed[ _]requeued[ _]held|JobHoldMaxRequeue")
#: What a refusal or a reason is about, and what lists the valid ones.
ADVICE = (
    (r"invalid partition", "Partitions: sinfo -s"),  # whose name may be that of an account
    (r"accounting/QOS policy|invalid qos|QOS\w*Limit", "Limits: sacctmgr show qos"),
    (r"^Assoc", "Limits: sacctmgr show assoc user=$USER"),
    (r"JobHeld|held[ _]state", "Release them: scontrol release JOB"),
    (r"NotAvail|DRAINED", "Nodes: sinfo -R"),
    (r"PartitionConfig|PartitionNodeLimit", 'What partitions have: sinfo -o "%P %D %c %m %G %l"'),
    (r"account", "Accounts: sacctmgr show assoc user=$USER format=account,partition,qos"),
    (r"time.?limit|--time", 'Time limits: sinfo -o "%P %l"'),
    (r"feature|constraint", 'Features: sinfo -o "%P %f"'),
    (r"reservation", "Reservations: scontrol show reservation"),
    (r"node name", "Nodes: sinfo -N"),
    (r"memory", 'Memory of nodes: sinfo -o "%P %m"'),
    (r"gres|generic resource|node config|gpu|tres", 'GPUs, cores, memory: sinfo -o "%P %G %c %m"'),
    (r"partition", "Partitions: sinfo -s"),
)


class SlurmQueue(Queue):
    """SLURM; `gpu_request` is the option by which the site takes a request of GPUs."""

    title = "SLURM"
    jobqueue = ("slurm", "SLURMJob")
    keywords = ("gpu_request",)
    programs = ("sbatch", "squeue", "scancel")
    denied = re.compile(r"Access/permission denied", re.I)
    unanswered = re.compile(f"{LOST_ANSWER.pattern}|{TOO_BUSY.pattern}", re.I)
    noise = re.compile(r"(?m)^\w+: (error: )?|Batch job submission failed: ")
    gone = re.compile(r"Invalid job id specified|already complet", re.I)
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
    escaped = '"\\'
    memory_option = "--mem"
    memory_pattern = told_memory = re.compile(r"(^|\s)--mem(-per-\w+)?(=|\s|$)")
    overruled = re.compile(r"(^|\s)--comment(=|\s|$)")
    gpu_example = (
        "#SBATCH --gpus-per-node=1 (or --gres=gpu:1), and srun --gpus-per-task=1 --gpu-bind=none"
    )
    # The last three count for the whole job, the others for each node: it has one task there
    gpu_options = (
        *("--gres", "--gpus-per-node", "--gpus-per-task", "--tres-per-node", "--tres-per-task"),
        *("--gpus", "-G", "--gpus-per-socket"),
    )
    # gpu, gpu:2, gpu:a100:2, gres/gpu=2, and parts of a GPU, which are one to a worker
    gpu_pattern = re.compile(r"(?:gres[/:])?(?:(shard|mps)|gpu)(?:[:=](.*))?", re.I)
    walltime_forms = (
        "MINUTES, MINUTES:SECONDS, HOURS:MINUTES:SECONDS, DAYS-HOURS, DAYS-HOURS:MINUTES, "
        "DAYS-HOURS:MINUTES:SECONDS or UNLIMITED"
    )
    launchers = ("srun", "mpirun")
    counts_ranks = True
    names_log = True

    def __init__(self, gpu_request: GpuRequest = "gres") -> None:
        self.gpu_request = parse_choice(gpu_request, "gpu_request", get_args(GpuRequest))
        self._site: dict[str, str] = {}
        self._shown: set[str] = set()  # by the last query

    # What the script says

    def with_gpus(self, lines: list[str], request: Request) -> list[str]:
        """Add the option for the GPUs; of several ``--gres`` sbatch takes the last."""
        count = request.gpus if self.gpu_request == "gpus" else request.gpus // request.nodes
        value = f"{request.gpu_type}:{count}" if request.gpu_type else str(count)
        if self.gpu_request == "gres":
            others = [other for line in lines for other in option_values(line, "--gres")]
            value = ",".join([f"gpu:{value}", *others])
        return [*lines, f"#SBATCH --{self.gpu_request}={self.quote(value)}"]

    def with_directives(self, lines: list[str], job: Any, request: Request) -> list[str]:
        for line in lines:
            words = option_words(line.removeprefix("#SBATCH"), comments=True)
            if found := next(filter(re.compile("-M|--clusters?(=|$)").match, words), None):
                raise UsageError(
                    f"{found} in the line {line!r} is for sbatch alone, and squeue and scancel "
                    f"would not find the jobs: set {CLUSTERS} in the environment instead"
                )
        if request.nodes > 1:
            lines = [line for line in lines if line != "#SBATCH -n 1"]
            lines.append(f"#SBATCH --nodes={request.nodes} --ntasks-per-node=1")
        name = SINGLE_LOG if request.alone else ARRAY_LOG
        log = os.path.join(request.folder.replace("%", "%%"), name)
        comment = f"#SBATCH --comment={self.quote(request.tag)}"
        return [*lines, comment, f"#SBATCH --output={self.quote(log)}"]

    @classmethod
    def requested_gpus(cls, directive: str, nodes: int = 1) -> int | None:
        """Read ``--gres=gpu:a100:2,nvme:500``, ``--tres-per-node=gres/gpu:2``, ``-G a100:2``."""
        for option in cls.gpu_options:
            for value in option_values(directive, option):
                count = sum(_count(item, bare="res" not in option) for item in value.split(","))
                if count or "res" not in option:
                    return count if option in cls.gpu_options[-3:] else nodes * count
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

    def on_each_node(self, command: str) -> str:
        # by default a task gets one core, and none gets the shell's variables at some sites
        srun = "srun -n$SLURM_JOB_NUM_NODES --ntasks-per-node=1 -K --cpu-bind=none --mpi=none"
        nodes = f'each_node="{srun} --export=ALL --input=none"'
        return f'[ "${{SLURM_JOB_NUM_NODES:-1}}" = 1 ] || {nodes}\nexec $each_node {command}'

    @classmethod
    def parse_walltime(cls, text: str) -> timedelta:
        """Read a walltime; ``timedelta.max`` where there is no limit."""
        if text.strip().upper() in ("UNLIMITED", "INFINITE"):
            return timedelta.max
        days, count = "-" in text, text.count(":")
        # the first number is of hours after days, and where there are three
        units = "smh"[2 - count :] if days or count == 2 else "sm"[1 - count :]
        clock = text.replace("-", ":", 1)
        return parse_clock(clock, units + "d" * days, cls.walltime_forms, shown=text)

    # What is asked of the queue

    async def limit(self) -> int:
        """Return MaxArraySize of the site or ``max_array_tasks``; 1 where it has no arrays."""
        site = await self._configuration()
        tasks = re.search(r"max_array_tasks=(\d+)", site.get("SchedulerParameters", ""))
        size = int(site.get("MaxArraySize", 1001))  # SLURM's own default
        return max(1, min(size, int(tasks[1])) if tasks else size)

    async def _configuration(self) -> dict[str, str]:
        """Return SLURM's settings, which are read once."""
        if not self._site:
            text = await self.answer("scontrol", "show", "config")
            pairs = (line.partition("=") for line in text.splitlines())
            self._site = {key.strip(): value.strip() for key, _, value in pairs}
        return self._site

    async def submit(self, script: str, count: int) -> list[str]:
        arrays = ARRAY_LOG in await read(script) and await self.limit() > 1
        extra = [f"--array=0-{count - 1}"] if arrays else []
        form = r"^(\d+)(?:;\S+)?\s*\Z"  # a site's greetings may come before it
        try:
            job = await self.take(script, form, "sbatch", "--parsable", *extra, script)
        except NoAnswer as error:
            # sbatch waits for minutes, and says why
            if LIMITS.search(str(error)) and not LOST_ANSWER.search(str(error)):
                text = f"{error}. Script kept at {script}"
                raise Refused(text, for_now=True, fewer=False) from None
            raise
        except Refused as error:
            if "Memory specification" in str(error):
                with contextlib.suppress(QueueError):
                    error.args = (f"{error}. {await self._compare_memory(script)}",)
            raise
        return [f"{job[1]}_{n}" for n in range(count)] if arrays else [job[1]]

    async def _compare_memory(self, script: str) -> str:
        asked = re.search(r"(?m)^#SBATCH --mem=(\S+)", await read(script))
        nodes = await self.answer("sinfo", "--noheader", "--exact", "--format=%m")
        largest = max(map(int, re.findall(r"\d+", nodes)), default=0)
        return f"Asked: {asked[1] if asked else 0} a node; the largest has {largest}M"

    async def query(self, ids: Collection[str]) -> dict[str, QueueStatus]:
        if not ids:
            return {}
        seen = _parse_squeue(await self._squeue(*COLUMNS, "Reason"), time.time())
        self._shown = set(seen)
        return pick(ids, seen)

    async def departed(self, ids: Collection[str]) -> dict[str, QueueStatus]:
        """Ask sacct; elements of an array that squeue shows without them were cancelled.

        An element that is cancelled while it waits leaves the array without a record of its own, in
        the controller and in accounting.
        """
        arrays = {job_id.partition("_")[0] for job_id in self._shown}
        left = {
            job_id: QueueStatus(job_id, JobState.CANCELLED, "before it started")
            for job_id in ids
            if "_" in job_id and job_id not in self._shown and job_id.partition("_")[0] in arrays
        }
        # Without accounting nobody knows: squeue has shown all that the controller remembers
        kind = (await self._configuration()).get("AccountingStorageType", "")
        if not ids or kind in ("", "(null)", "accounting_storage/none"):
            return left
        jobs = ",".join(sorted({job_id.partition("_")[0] for job_id in ids}))
        clusters = os.environ.get(CLUSTERS)
        text = await self.answer(
            *("sacct", "--noheader", "--allocations", "--parsable2", f"--jobs={jobs}"),
            *([f"--clusters={clusters}"] if clusters else []),
            f"--format={','.join(SACCT_COLUMNS)}",
            env=ENVIRONMENT,
        )
        return left | pick(ids, _parse_sacct(text))

    async def cancel(self, ids: Collection[str]) -> None:
        grouped: dict[str, list[str]] = {}  # the elements of one array together: 12_[0,3]
        for job_id in ids:
            job, _, index = job_id.partition("_")
            grouped.setdefault(job, []).extend([index] if index else [])
        jobs = [f"{job}_[{','.join(some)}]" if some else job for job, some in grouped.items()]
        if jobs:
            await super().cancel(jobs)

    async def tagged(self) -> dict[str, str]:
        jobs = _rows(await self._squeue("JobArrayID", "State", "Comment"), 3)
        return {
            job_id: comment
            for job_id, state, comment in jobs
            if comment.startswith("hpcdask:") and STATES.get(state) not in OVER
        }

    async def _squeue(self, *names: str) -> str:
        """List all jobs of this user, also ended ones: an unknown id would be an error."""
        columns = f"--Format={','.join(f'{name}:{DELIMITER}' for name in names)}"
        options = ("--noheader", "--states=all", f"--user={os.getuid()}", columns)
        return await self.answer("squeue", *options, env=ENVIRONMENT)

    @classmethod
    def lasting(cls, reason: str) -> str | None:
        return _advice(reason) if LASTING.match(reason) or STUCK.search(reason) else None

    def refused(self, done: subprocess.CompletedProcess[str], script: str) -> QueueError:
        text = self.words(done)
        if LOST_ANSWER.search(text):
            return NoAnswer(
                f"sbatch got no answer for {script}: {text}. See with squeue whether the job is "
                f"there"
            )
        unnamed = "job submit limit" in text and not NAMED_LIMIT.search(text)
        limit, advice = unnamed or bool(LIMITS.search(text)), _advice(text)
        return Refused(
            f"sbatch refused the job: {text}. Script kept at {script}{advice and f'. {advice}'}",
            for_now=limit,
            fewer=limit and not TOO_BUSY.search(text),
        )


def _count(item: str, *, bare: bool) -> int:
    """Return the GPUs of an item of a request; `bare` ones are of GPUs alone, as in ``a100:2``.

    A type alone is one GPU, and a part of a GPU is one.
    """
    found = SlurmQueue.gpu_pattern.fullmatch(item)
    if not bare and found is None:
        return 0
    last = re.split("[:=]", item)[-1]
    return int(last) if last.isdecimal() and not (found and found[1]) else 1


# What squeue and sacct say


def _rows(text: str, count: int) -> Iterator[list[str]]:
    """Yield the `count` columns of each job and element that squeue printed.

    Raises QueueError if it printed lines, and none has this form.
    """
    lines = [line for line in text.splitlines() if line and not line.startswith("CLUSTER:")]
    if lines and not any(re.match(r"\d+[_+;]", line) for line in lines):
        raise QueueError(f"squeue answered {lines[0][:200]!r}, which is not what was asked for")
    for line in lines:
        row = line.split(DELIMITER, count - 1)
        if len(row) == count:  # else the rest of a comment with a line end
            for job_id in _expand(row[0]):
                yield [job_id, *row[1:-1], row[-1].removesuffix(DELIMITER)]


def _expand(job: str) -> list[str]:
    """Return the ids of an array's waiting elements from ``12_[0-8:2,11%5]``.

    ``squeue --array`` leaves some out: SLURM 22.05 shows ``12_[0-398:2]`` without its last element.
    """
    array, bracket, text = job.partition("_[")
    if not bracket:
        return [job] if re.fullmatch(r"\d+(_\d+)?", job) else []  # not ours: 12+0
    return [f"{array}_{index}" for index in elements(text.partition("%")[0])]


def _parse_squeue(text: str, now: float) -> dict[str, QueueStatus]:
    """Read the jobs that squeue printed with `COLUMNS`; a state that is not known is UNKNOWN."""
    seen = {}
    for job, word, restarts, status, started, ends, nodes, reason in _rows(text, len(COLUMNS) + 1):
        state = STATES.get(word, JobState.UNKNOWN)
        start, end = (float(at) if at.isdecimal() else None for at in (started, ends))
        if word == "COMPLETING" and (end is None or end > now + SKEW_S):
            state = JobState.REQUEUED  # its end is that of its next life
        if state is JobState.PENDING and int(restarts):
            state = JobState.REQUEUED
        running = state is JobState.RUNNING
        seen[job] = QueueStatus(
            job,
            state,
            reason=_reason(word, reason),
            exit_code=_code(word, status),
            restarts=int(restarts),
            started=start if running or state in OVER else None,
            # what completes has no walltime left to hand over before
            ends=end if running and word != "COMPLETING" else None,
            nodes=nodes if nodes not in NO_REASON else "",
            stuck=STUCK.search(reason) is not None,
        )
    return seen


def _parse_sacct(text: str) -> dict[str, QueueStatus]:
    """Read the jobs that are over of what sacct printed with `SACCT_COLUMNS`.

    A site's greetings may stand before them.
    """
    seen = {}
    for line in text.splitlines():
        row = line.split("|", len(SACCT_COLUMNS) - 1)
        word, _, by = row[-1].partition(" by ")  # CANCELLED by 1000
        if len(row) < len(SACCT_COLUMNS) or (state := STATES.get(word)) not in OVER:
            continue
        job, status, started, nodes, _ = row
        for job_id in _expand(job):
            seen[job_id] = QueueStatus(
                job_id,
                state,
                reason=_reason(word, f"by user {by}" if by else ""),
                exit_code=_code(word, status),
                started=float(started) if started.isdecimal() else None,
                nodes="" if nodes.startswith("None") else nodes,
            )
    return seen


def _reason(word: str, reason: str) -> str:
    known = [] if reason in NO_REASON else [reason]
    return ": ".join(known if word in PLAIN else [word, *known])


def _code(word: str, status: str) -> int | None:
    """Return the exit code of ``code:signal``, or of the status of wait(2) from squeue."""
    if STATES.get(word) not in OVER or word in NOT_BY_ITSELF:
        return None
    code, colon, signal = status.partition(":")
    exited, signalled = (int(code), int(signal)) if colon else divmod(int(code), 256)
    if signalled & 0x7F:
        return 128 + (signalled & 0x7F)
    return exited or (0 if word == "COMPLETED" else None)  # 0 stands for unknown as well


def _advice(text: str) -> str:
    return next((how for about, how in ADVICE if re.search(about, text, re.I)), "")
