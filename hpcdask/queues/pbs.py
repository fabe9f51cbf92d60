"""PBS Professional, OpenPBS and Torque.

Directives are split into words as ``qsub`` splits them: quotes of both kinds hold text as it is,
a backslash outside of them escapes (``make_argv`` of OpenPBS's ``qsub.c``, the same in Torque).
Options: qsub(1B) of both. Attributes: qstat(1B), pbs_job_attributes(7B). Exit codes and substates:
PBS Professional User's Guide, "Job Exit Status", and OpenPBS's ``job.h``. Times are local.
"""

from __future__ import annotations

import math
import re
import shlex
import shutil
import signal
from collections.abc import Collection, Mapping
from typing import Any

from hpcdask.errors import UsageError

from . import helpers
from .base import Allocation, Queue, Request
from .job_state import JobState, QueueStatus

STATES = {
    "Q": (JobState.PENDING, ""),
    "H": (JobState.PENDING, "held"),
    "W": (JobState.PENDING, "waits for its time"),
    **dict.fromkeys("TM", (JobState.PENDING, "moves")),
    **dict.fromkeys("REB", (JobState.RUNNING, "")),
    **dict.fromkeys("SU", (JobState.RUNNING, "suspended")),
    **dict.fromkeys("CFX", (JobState.COMPLETED, "")),
}


class PbsQueue(Queue):
    """PBS Professional, OpenPBS or Torque.

    Elements of a job array may be run again and do not learn of it, so they end then at once.
    """

    title = "PBS"
    jobqueue = ("pbs", "PBSJob")
    programs = ("qsub", "qstat", "qdel")
    denied = re.compile(r"Bad UID for job execution|Access from host not allowed|ruserok", re.I)
    advice = "Queues: qstat -Q, their limits: qstat -Q -f"
    limits = re.compile(
        r"would exceed|Maximum number of jobs|Array job exceeds|cannot connect|Connection refused"
        r"|timed out"
    )
    gone = re.compile("unknown job|has finished|no such job|does not exist|history", re.I)
    job_id = '"$PBS_JOBID"'
    needs_guard = True
    # Of the job that the notebook may run in
    ignored_variables = ("PBS_ARRAY", "PBS_JOBID", "MOAB_JOB")
    quoted_options = "-q -A"
    name_form = (r"\w.+-", "A-Za-z", 200)
    # By default PBS Professional's
    array_limit = ("qstat -B -f", r"max_(?:job_)?array_size = (\d+)", 10_000)
    gpu_example = "#PBS -l select=1:ngpus=1"
    gpu_options = ("-l", "-L", "-W")
    # PBS Professional's ngpus=2, Torque's gpus=2, Moab's gres=gpu:2 and GRES:gpus@2
    gpu_pattern = re.compile(
        r"(?:^|[:,+=])n?gpus?=(\d+)|\bgres[=:](?:\S*%)?gpus?\b[:@]?(\d*)", re.I
    )
    walltime_units = "smhd"
    walltime_forms = f"{Queue.walltime_forms}, DAYS:HOURS:MIN:SEC"
    nodes_variable = "PBS_NODEFILE"
    version = ""  # printed by ``qstat --version``

    # What the script says

    def with_gpus(self, lines: list[str], request: Request) -> list[str]:
        """Add the GPUs to the header's resources, unless the user's resources have them.

        ``select=1:ncpus=8:ngpus=2`` is PBS Professional's form, ``nodes=1:ppn=8:gpus=2`` Torque's,
        taken where the user's resources begin like that. The type of GPU is a resource that the
        site defines; ``gpu_type="model=a100"`` names another than ``gpu_type``.
        """
        form = r"(?m)^(#PBS -l (?:.*,)?(select|nodes)=)([^,\n]*)"
        text, count = re.subn(form, lambda one: _with_gpus(one, request), "\n".join(lines), count=1)
        own = [*lines, f"#PBS -l {','.join(_gpus('select', request))}"]
        return text.split("\n") if count else own

    def with_directives(self, lines: list[str], job: Any, request: Request) -> list[str]:
        folder = shlex.quote(request.folder.rstrip("/") + "/")
        own = ["#PBS -j oe", f"#PBS -o {folder}", "#PBS -W umask=077"]
        # of several ``-v`` the last one counts
        given = [line for line in lines if line.startswith("#PBS -v ")]
        tag = f"{given[-1] + ',' if given else '#PBS -v '}HPCDASK_TAG={request.tag}"
        return [*(line for line in lines if line not in given), tag, *own]

    async def allocation(
        self, asked: Allocation, directives: list[str], site: Mapping[str, Any]
    ) -> dict[str, Any]:
        keywords = await super().allocation(asked, directives, site)
        # Grid Engine has a qstat as well, and no pbsnodes
        here = self.version or shutil.which("pbsnodes")
        torque = bool(here) and await self.is_torque()
        self.counts_ranks = not torque
        if any(re.search("(select|nodes)=", line) for line in asked.directives):
            keywords["job_directives_skip"] = ["#PBS -l select=", "#PBS -l nodes="]
        nbytes = (asked.memory or 0) * (asked.nodes if torque else 1)  # Torque's: all nodes'
        memory = f"mem={math.ceil(nbytes / 2**20)}MB"
        if torque:
            spec = f"nodes={asked.nodes}:ppn={asked.cores}{f',{memory}' if nbytes else ''}"
        else:  # mpiprocs is how often an MPI finds a node in its list
            spec = f"select={asked.nodes}:ncpus={asked.cores}:mpiprocs={asked.ranks}"
            spec += f":{memory}" if nbytes else ""
        return {**keywords, "resource_spec": spec}

    # What is asked of the queue

    async def is_torque(self) -> bool:
        """Return whether the commands are Torque's instead of PBS Professional's."""
        if not self.version:
            done = await self.run("qstat", "--version")
            if done.returncode:
                raise self.failed(done)
            self.version = self.words(done)  # Torque's is among the errors
        return "pbs_version" not in self.version

    async def submit(self, script: str, count: int) -> list[str]:
        array = []
        if count > 1:
            array = ["-t" if await self.is_torque() else "-J", f"0-{count - 1}"]
        form = r"(?:^|\s)((\d+)(?:\[\])?(\.\S+)?)\s*\Z"
        job, number, server = (await self.take(script, form, "qsub", *array, script)).groups("")
        if count == 1:
            return [job]
        return [f"{number}[{index}]{server}" for index in range(count)]

    async def query(self, ids: Collection[str]) -> dict[str, QueueStatus]:
        torque = await self.is_torque()
        # An array shows its elements when asked for the whole
        asked = dict.fromkeys(re.sub(r"\[\d+\]", "[]", job) for job in ids)
        options = ["-t", "-1"] if torque else ["-x", "-t", "-w"]
        done = await self.run("qstat", "-f", *options, *asked)
        if done.returncode and not self.gone.search(done.stderr):
            raise self.failed(done)
        # The server's name may be shortened
        shown = {name.split(".")[0]: facts for name, facts in _parse_qstat(done.stdout).items()}
        found = {job: shown.get(job.split(".")[0]) for job in ids}
        return {job: _read_job(job, facts, torque) for job, facts in found.items() if facts}

    async def tagged(self) -> dict[str, str]:
        text = await self.answer("qstat", "-f", "-t", "-1" if await self.is_torque() else "-w")
        found = {}
        for job, facts in _parse_qstat(text).items():
            mine = facts.get("Job_Owner", "").startswith(f"{helpers.user()}@")
            tag = re.search(r"\bHPCDASK_TAG=(hpcdask:[^,\s]+)", facts.get("Variable_List", ""))
            if mine and tag and "[]" not in job and facts.get("job_state") not in ("C", "F", "X"):
                found[job] = tag[1]
        return found


def _gpus(form: str, request: Request) -> list[str]:
    """Return the request's GPUs and their type in PBS Professional's words, or in Torque's."""
    if form == "nodes":
        return [f"gpus={request.gpus}", *filter(None, [request.gpu_type])]
    return [f"ngpus={request.gpus}", *request.kind("gpu_type")]


def _with_gpus(found: re.Match[str], request: Request) -> str:
    start, form, chunk = found.groups()
    if "+" in chunk:
        raise UsageError(
            f"resource_spec asks for different nodes ({chunk}), and hpcdask cannot tell which of "
            f"them have the GPUs. Write the GPUs into resource_spec, and leave gpus_per_job out"
        )
    more = [] if re.search("(^|:)n?gpus=", chunk) else _gpus(form, request)
    return start + ":".join([chunk, *more])


def _parse_qstat(text: str) -> dict[str, dict[str, str]]:
    """Return the attributes of each job that ``qstat -f`` printed, by its id.

    Attributes stand behind four spaces, and long ones go on behind a tab.
    """
    blocks = re.split(r"^Job Id:\s*(\S+)\n", text.replace("\n\t", ""), flags=re.M)[1:]
    return {
        job: dict(re.findall(r"^    ([\w.]+) = (.*)", block, re.M))
        for job, block in zip(blocks[::2], blocks[1::2], strict=True)
    }


def _read_job(job: str, facts: Mapping[str, str], torque: bool) -> QueueStatus:
    """Return one job of ``qstat -f``."""
    started = helpers.unix_time(facts.get("start_time" if torque else "stime"))
    walltime = _seconds(facts.get("Resource_List.walltime"))
    hosts = re.findall(r"(?:^|\+)([^/+]+)/", facts.get("exec_host", ""))
    return helpers.fold(
        job,
        facts.get("job_state", ""),
        STATES,
        lambda: _end(facts, walltime),
        waits=facts.get("comment", ""),
        again=int(facts.get("run_count", 0)),
        started=started,
        walltime=walltime,
        nodes="+".join(dict.fromkeys(hosts)),
    )


def _end(facts: Mapping[str, str], limit: float | None) -> helpers.End:
    """Return how a job ended: state, reason and exit code."""
    text = facts.get("Exit_status", facts.get("exit_status"))
    code = int(text) if text and re.fullmatch(r"-?\d+", text) else None
    if code is not None and code >= 256:  # 256 + n after signal n
        code -= 128
    used = _seconds(facts.get("resources_used.walltime"))
    comment = facts.get("comment", "")
    # JOB_EXEC_KILL_WALLTIME is -29
    if code == -29 or (code and code > 128 and used and limit and used >= limit):
        return JobState.TIMEOUT, comment, code
    # TERMINATED is 91, and nothing but qdel ends a job by SIGTERM
    if facts.get("substate") == "91" or code == 128 + signal.SIGTERM:
        return JobState.CANCELLED, comment, code
    if code is not None and code < 0:
        return JobState.FAILED, comment or "PBS could not start it", code
    state, reason = helpers.ended(code)
    return state, reason or comment, code


def _seconds(clock: str | None) -> float | None:
    """Return the seconds of ``HOURS:MINUTES:SECONDS``."""
    numbers = re.findall(r"\d+", clock or "")[::-1]
    return sum(int(number) * 60**power for power, number in enumerate(numbers)) or None
