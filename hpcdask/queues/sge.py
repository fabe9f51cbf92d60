"""Grid Engine: SGE, Son of Grid Engine, Open Cluster Scheduler and Univa's.

Options: sge_submit(1), its ``-o``, ``-ac``, ``-r``, ``-S``; states: qstat(1); how jobs end:
sge_accounting(5), sge_status(5). The reader of ``#$`` lines takes values in double quotes, and
drops quotes inside of them; it refuses job names with spaces.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from hpcdask.errors import UsageError

from . import helpers
from .base import Allocation, Queue, Request
from .job_state import JobState, QueueStatus

#: What the reader of directives or of paths takes for something else.
UNQUOTABLE = re.compile(r"""['"\\$,:]""")
KILLED = 100  # "assumedly after job": by a signal, which qdel and the limits send as well
OVER_LIMIT = 37


class SgeQueue(Queue):
    """Grid Engine.

    Jobs are marked as not rerunnable, since they do not learn how often they were started.
    """

    title = "Grid Engine"
    jobqueue = ("sge", "SGEJob")
    programs = ("qsub", "qstat", "qdel", "qacct", "qconf")
    denied = re.compile(r"is (not a|neither) submit")
    advice = "Queues: qconf -sql, resources: qconf -sc, projects: qconf -sprjl"
    limits = re.compile(
        r"only \d+ jobs are allowed|more than \d+ tasks|unable to (contact|send)|commlib"
        r"|can't get resp"
    )
    gone = re.compile("delet|does not exist")
    prefix = "#$"
    quoted_options = "-q -P"
    escaped = ""
    nodes_variable = "NHOSTS"
    name_form = (r"\w.+-", "A-Za-z_", 200)
    array_limit = ("qconf -sconf", r"^max_aj_tasks\s+(\d+)", 75_000)
    gpu_example = "#$ -l gpu=1"
    # Complexes are named by the sites
    gpu_pattern = re.compile(r"(?:^|,)(?:n?gpus?|cuda)=(\d+)(?![\d.])", re.I)
    job_id = '"$JOB_ID$([ "${SGE_TASK_ID:-undefined}" = undefined ] || echo ".$SGE_TASK_ID")"'

    # What the script says

    def with_gpus(self, lines: list[str], request: Request) -> list[str]:
        return [*lines, f"#$ -l {','.join([f'gpu={request.gpus}', *request.kind('gpu_type')])}"]

    def with_directives(self, lines: list[str], job: Any, request: Request) -> list[str]:
        odd = UNQUOTABLE.search(request.folder)  # what cannot be named goes nowhere
        log = "/dev/null" if odd else f'"{request.folder}/queue-$JOB_ID.$TASK_ID.log"'
        lines = [*lines, f"#$ -ac HPCDASK_TAG={request.tag}", "#$ -r n", f"#$ -o {log}"]
        if request.warned:  # SIGUSR2 before SIGKILL, and SIGUSR1 before SIGSTOP
            lines.append("#$ -notify")
        # Many sites start scripts with csh and ignore the first line
        if "bash" in job.shebang and not any(line.startswith("#$ -S") for line in lines):
            lines.append("#$ -S /bin/bash")
        return lines

    async def allocation(
        self, asked: Allocation, directives: list[str], site: Mapping[str, Any]
    ) -> dict[str, Any]:
        if not any(re.search(r"(^|\s)-pe\s", line) for line in asked.directives):
            how = "through a parallel environment: name the site's: --directive '-pe NAME SLOTS'"
            how += " (qconf -spl lists them)"
            if asked.nodes > 1:
                raise UsageError(f"-N {asked.nodes}: Grid Engine gives several nodes {how}")
            if asked.cpus_per_gpu:
                raise UsageError(f"--cpus-per-gpu: Grid Engine gives cores {how}")
        if asked.memory is not None:
            raise UsageError(
                "--mem: in Grid Engine each site has its own name for memory. Give it as "
                "--directive '-l h_vmem=8G' (qconf -sc lists the names)"
            )
        return {}

    # What is asked of the queue

    async def submit(self, script: str, count: int) -> list[str]:
        array = ["-t", f"1-{count}"] if count > 1 else []
        form = r"^(\d+)(\.\d+-\d+:\d+)?$"
        number = (await self.take(script, form, "qsub", "-terse", *array, script))[1]
        return [number] if count == 1 else [f"{number}.{task + 1}" for task in range(count)]

    async def query(self, ids: Collection[str]) -> dict[str, QueueStatus]:
        return helpers.pick(ids, await self._mine())

    async def _mine(self) -> dict[str, QueueStatus]:
        options = ("-u", helpers.user(), "-xml", "-r", "-g", "d")
        return _parse_qstat(await self.answer("qstat", *options))

    async def departed(self, ids: Collection[str]) -> dict[str, QueueStatus]:
        found: dict[str, QueueStatus] = {}
        for number in dict.fromkeys(job.split(".")[0] for job in ids):
            done = await self.run("qacct", "-j", number)  # fails until the job is accounted for
            found |= _parse_qacct(done.stdout)
        return helpers.pick(ids, found)

    async def tagged(self) -> dict[str, str]:
        jobs = await self._mine()
        numbers = dict.fromkeys(job.split(".")[0] for job in jobs)
        if not numbers:
            return {}
        text = await self.answer("qstat", "-j", ",".join(numbers), "-xml")
        path = "JB_context/context_list[VA_variable='HPCDASK_TAG']/VA_value"
        elements = helpers.read_xml(text, "qstat").iter("element")
        tags = {one.findtext("JB_job_number"): one.findtext(path) for one in elements}
        return {job: tag for job in jobs if (tag := tags.get(job.split(".")[0]))}


# What qstat and qacct say


def _parse_qstat(text: str) -> dict[str, QueueStatus]:
    """Read the answer of ``qstat -xml -r -g d``."""
    jobs = {}
    for element in helpers.read_xml(text, "qstat").iter("job_list"):
        number = element.findtext("JB_job_number", "")
        letters = element.findtext("state", "")
        state, reason = _state(letters, number)
        start = element.findtext("JAT_start_time", "")[:19]
        started = helpers.unix_time(start, "%Y-%m-%dT%H:%M:%S")
        limit = element.findtext("hard_request[@name='h_rt']", "")
        ends = started + float(limit) if started and re.fullmatch(r"[\d.]+", limit) else None
        nodes = element.findtext("queue_name", "").partition("@")[2]
        tasks = helpers.elements(element.findtext("tasks", ""))
        for job in [f"{number}.{task}" for task in tasks] or [number]:
            facts = (state, reason, None, 0, started, ends, nodes, "E" in letters)
            jobs[job] = QueueStatus(job, *facts)
    return jobs


def _state(letters: str, number: str) -> tuple[JobState, str]:
    if "q" in letters or "w" in letters:
        if "E" in letters:
            return JobState.PENDING, f"error state {letters}: qacct -j {number}, then qdel"
        held = "held" if "h" in letters else ""
        return (JobState.REQUEUED if "R" in letters else JobState.PENDING), held
    if "r" in letters or "t" in letters or "d" in letters:
        return JobState.RUNNING, ""
    if set(letters) & set("sST"):
        return JobState.RUNNING, "suspended"
    return JobState.UNKNOWN, letters


def _parse_qacct(text: str) -> dict[str, QueueStatus]:
    """Read the answer of ``qacct -j``; the last record of a job counts."""
    found = {}
    for block in re.split(r"^=+$", text, flags=re.M):
        facts = dict(re.findall(r"^(\w+) +(.*?) *$", block, re.M))
        if "jobnumber" not in facts:
            continue
        task = facts.get("taskid", "undefined")
        job = facts["jobnumber"] + ("" if task == "undefined" else f".{task}")
        started, nodes = helpers.unix_time(facts.get("start_time")), facts.get("hostname", "")
        found[job] = QueueStatus(job, *_end(facts), 0, started, None, nodes)
    return found


def _end(facts: Mapping[str, str]) -> helpers.End:
    code = int(facts.get("exit_status", "0").split()[0])
    number, _, text = facts.get("failed", "0").partition(":")
    failure = int(number)
    limit = re.search(r"\bh_rt=(\d+)", facts.get("category", ""))
    used = re.match(r"[\d.]+", facts.get("ru_wallclock", ""))
    if failure == OVER_LIMIT or (failure and limit and used and float(used[0]) >= float(limit[1])):
        return JobState.TIMEOUT, "", code
    if failure and failure != KILLED:
        return JobState.FAILED, text.strip() or f"failed {failure}", code
    return *helpers.ended(code), code
