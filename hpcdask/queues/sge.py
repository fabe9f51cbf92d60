"""Grid Engine: SGE, Son of Grid Engine, Open Cluster Scheduler and Univa's.

Options: sge_submit(1), its ``-o``, ``-ac``, ``-r``, ``-S``; states: qstat(1); how jobs end:
sge_accounting(5), sge_status(5). The reader of ``#$`` lines takes values in double quotes, and
drops quotes inside of them; it refuses job names with spaces.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import Any, ClassVar

from hpcdask.errors import QueueError
from hpcdask.queues.base import Queue, Request
from hpcdask.queues.script import double_quoted, one_line, render

from . import helpers
from .job_state import QueueState, QueueStatus

LIMITS = re.compile(
    r"only \d+ jobs are allowed|more than \d+ tasks|unable to (contact|send)|commlib|can't get resp"
)
#: What the reader of directives or of paths takes for something else.
UNQUOTABLE = re.compile(r"""['"\\$,:]""")
KILLED = 100  # "assumedly after job": by a signal, which qdel and the limits send as well
OVER_LIMIT = 37
TIME = "%a %b %d %H:%M:%S %Y"


class SgeQueue(Queue):
    """The door to Grid Engine.

    Jobs are marked as not rerunnable, since they do not learn how often they were started. Those
    that Grid Engine holds back in error state, which only an administrator ends, are deleted.
    """

    title: ClassVar[str] = "Grid Engine"
    programs: ClassVar[tuple[str, ...]] = ("qsub", "qstat", "qdel", "qacct", "qconf")
    advice: ClassVar[str] = "Queues: qconf -sql, resources: qconf -sc, projects: qconf -sprjl"
    job_id: ClassVar[str] = (
        '"$JOB_ID$([ "${SGE_TASK_ID:-undefined}" = undefined ] || echo ".$SGE_TASK_ID")"'
    )

    # What the script says

    def script(self, job: Any, request: Request, preamble: Sequence[str], command: str) -> str:
        helpers.one_node(request, self.title)
        name = helpers.clean_name(request.name, r"\w.+-", "A-Za-z_")
        lines = helpers.quoted_header(job, "#$", name, _quote, ("-q", "-P"))
        lines += helpers.renamed(request.name, name, self.title)
        if request.gpus:
            lines.append(f"#$ -l gpu={request.gpus}{_kind(request.gpu_type)}")
        lines += [f"#$ -ac HPCDASK_TAG={request.tag}", "#$ -r n", f"#$ -o {_log(request.folder)}"]
        # Many sites start scripts with csh and ignore the first line
        if "bash" in job.shebang and not any(line.startswith("#$ -S") for line in lines):
            lines.append("#$ -S /bin/bash")
        return render(helpers.with_header(job, lines), [], preamble, command)

    @staticmethod
    def parse_walltime(text: str) -> timedelta:
        return helpers.parse_clock(text, "smh", "SECONDS, MINUTES:SECONDS, HOURS:MINUTES:SECONDS")

    # What is asked of the queue

    async def limit(self) -> int:
        done = await self.run("qconf", "-sconf")
        found = re.search(r"^max_aj_tasks\s+(\d+)", done.stdout, re.M)
        return int(found[1]) if found and int(found[1]) else 75_000  # Grid Engine's default

    async def submit(self, script: str, count: int) -> list[str]:
        array = ["-t", f"1-{count}"] if count > 1 else []
        done = await self.run("qsub", "-terse", *array, script)
        if done.returncode:
            raise helpers.refused(done, script, self.advice, LIMITS)
        found = re.search(r"^(\d+)(\.\d+-\d+:\d+)?$", done.stdout, re.M)
        if not found:
            raise QueueError(f"qsub answered {helpers.words(done)!r} instead of a job's id")
        return [found[1]] if count == 1 else [f"{found[1]}.{task + 1}" for task in range(count)]

    async def query(self, ids: Collection[str]) -> dict[str, QueueStatus]:
        found = {job.id: job for job in await self._list()}
        jobs = {job: found[job] for job in ids if job in found}
        if stuck := [job.id for job in jobs.values() if job.state is QueueState.FAILED]:
            await self.cancel(stuck)
        return jobs

    async def _list(self) -> list[QueueStatus]:
        """All jobs of this user."""
        done = await self.run("qstat", "-u", helpers.user(), "-xml", "-r", "-g", "d")
        if done.returncode:
            raise QueueError(f"qstat failed: {helpers.words(done)}")
        return parse_qstat(done.stdout)

    async def departed(self, ids: Collection[str]) -> dict[str, QueueStatus]:
        found: dict[str, QueueStatus] = {}
        for number in dict.fromkeys(job.split(".")[0] for job in ids):
            done = await self.run("qacct", "-j", number)  # fails until the job is accounted for
            found |= parse_qacct(done.stdout)
        return {job: found[job] for job in ids if job in found}

    async def cancel(self, ids: Collection[str]) -> None:
        done = await self.run("qdel", *ids)
        lines = (done.stderr + done.stdout).splitlines()
        bad = [line for line in lines if not re.search(r"delet|does not exist", line)]
        if done.returncode and any(line.strip() for line in bad):
            raise QueueError(f"qdel failed: {'; '.join(bad)[:500]}")

    async def tagged(self) -> dict[str, str]:
        jobs = [job.id for job in await self._list()]
        numbers = dict.fromkeys(job.split(".")[0] for job in jobs)
        if not numbers:
            return {}
        done = await self.run("qstat", "-j", ",".join(numbers), "-xml")
        if done.returncode:
            raise QueueError(f"qstat -j failed: {helpers.words(done)}")
        tags = {}
        for element in _xml(done.stdout).iter("element"):
            for context in element.findall("JB_context/context_list"):
                if context.findtext("VA_variable") == "HPCDASK_TAG":
                    number = element.findtext("JB_job_number", "")
                    tags[number] = context.findtext("VA_value", "")
        return {job: tags[job.split(".")[0]] for job in jobs if job.split(".")[0] in tags}


def _quote(value: str) -> str:
    return (
        value if re.fullmatch(r"[\w.@,+:/=*-]+", value) else double_quoted(value, "#$", escaped="")
    )


def _log(folder: str) -> str:
    """Where Grid Engine's own output of a job goes; what it cannot name goes nowhere."""
    folder = one_line(folder, "the folder of logs")
    if UNQUOTABLE.search(folder):
        return "/dev/null"
    return f'"{folder}/queue-$JOB_ID.$TASK_ID.log"'


def _kind(gpu_type: str | None) -> str:
    """The GPU's type as a resource: ``gpu_type``, or the site's own as in ``model=a100``."""
    if gpu_type is None:
        return ""
    return f",{gpu_type}" if "=" in gpu_type else f",gpu_type={gpu_type}"


# What qstat and qacct say


def _xml(text: str) -> ElementTree.Element:
    try:
        return ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise QueueError(f"the XML of qstat is broken: {error}") from None


def parse_qstat(text: str) -> list[QueueStatus]:
    """Read the answer of ``qstat -xml -r -g d``."""
    jobs = []
    for element in _xml(text).iter("job_list"):
        number = element.findtext("JB_job_number", "")
        letters = element.findtext("state", "")
        started = _local(element.findtext("JAT_start_time"))
        limits = [
            request.text or ""
            for request in element.findall("hard_request")
            if request.get("name") == "h_rt"
        ]
        walltime = float(limits[0]) if limits and re.fullmatch(r"[\d.]+", limits[0]) else None
        ends = started + walltime if started and walltime else None
        state, reason = _state(letters, number)
        nodes = element.findtext("queue_name", "").partition("@")[2]
        jobs += [
            QueueStatus(job, state, reason, None, 0, started, ends, nodes)
            for job in _elements(number, element.findtext("tasks", ""))
        ]
    return jobs


def _local(text: str | None) -> float | None:
    return helpers.unix_time((text or "")[:19], "%Y-%m-%dT%H:%M:%S")


def _elements(number: str, tasks: str) -> list[str]:
    """Ids of an array's elements, listed as in ``1,3-7:2``; a job without any is its own."""
    if not tasks:
        return [number]
    ids = []
    for first, last, step in re.findall(r"(\d+)(?:-(\d+))?(?::(\d+))?", tasks):
        last_one = int(last or first)
        ids += [f"{number}.{task}" for task in range(int(first), last_one + 1, int(step or 1))]
    return ids


def _state(letters: str, number: str) -> tuple[QueueState, str]:
    if "q" in letters or "w" in letters:
        if "E" in letters:
            return QueueState.FAILED, f"error state {letters}, why: qacct -j {number}"
        held = "held" if "h" in letters else ""
        return (QueueState.REQUEUED if "R" in letters else QueueState.PENDING), held
    if "r" in letters or "t" in letters or "d" in letters:
        return QueueState.STARTING, ""
    if set(letters) & set("sST"):
        return QueueState.STARTING, "suspended"
    return QueueState.UNKNOWN, letters


def parse_qacct(text: str) -> dict[str, QueueStatus]:
    """Read the answer of ``qacct -j``; the last record of a job counts."""
    found = {}
    for block in re.split(r"^=+$", text, flags=re.M):
        facts = dict(re.findall(r"^(\w+) +(.*?) *$", block, re.M))
        if "jobnumber" not in facts:
            continue
        task = facts.get("taskid", "undefined")
        job = facts["jobnumber"] + ("" if task == "undefined" else f".{task}")
        found[job] = _ended(job, facts)
    return found


def _ended(job: str, facts: dict[str, str]) -> QueueStatus:
    code = int(facts.get("exit_status", "0").split()[0])
    number, _, text = facts.get("failed", "0").partition(":")
    failure = int(number)
    started = helpers.unix_time(facts.get("start_time"), TIME)
    limit = re.search(r"\bh_rt=(\d+)", facts.get("category", ""))
    used = re.match(r"[\d.]+", facts.get("ru_wallclock", ""))
    state, reason = helpers.ended(code)
    if failure == OVER_LIMIT or (failure and limit and used and float(used[0]) >= float(limit[1])):
        state, reason = QueueState.TIMEOUT, ""
    elif failure and failure != KILLED:
        state, reason = QueueState.FAILED, text.strip() or f"failed {failure}"
    nodes = facts.get("hostname", "")
    return QueueStatus(job, state, reason, code, 0, started, None, nodes)
