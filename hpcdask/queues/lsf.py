"""IBM Spectrum LSF.

Options: bsub(1), its ``-J``, ``-Jd``, ``-gpu``, ``-rn``, ``-o``; states and fields: bjobs(1), its
``-o`` and ``-json``. Embedded ``#BSUB`` options hold text with spaces in double quotes.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar

from hpcdask.errors import QueueError
from hpcdask.queues.base import Queue, Request
from hpcdask.queues.script import double_quoted, one_line, render

from . import helpers
from .job_state import QueueState, QueueStatus

#: Not those of a queue's hard limits on time and memory, which do not pass.
LIMITS = re.compile(
    r"threshold|[Jj]ob (slot )?limit|[Nn]umber of jobs|index too large|too many|not responding"
    r"|is down|busy|try later"
)
#: What the reader of options, or of the names of files, takes for something else.
UNQUOTABLE = re.compile(r"""['"\\$%`]""")
FIELDS = "jobid jobindex stat exit_code exit_reason pend_reason start_time exec_host"
WAITS = ("PEND", "PSUSP", "WAIT", "PROV")
GONE = re.compile(r"not found|already finished|no matching|already been|is being")
#: Why LSF ended a job, by the first word of its reason.
REASONS = {
    "TERM_RUNLIMIT": QueueState.TIMEOUT,
    "TERM_DEADLINE": QueueState.TIMEOUT,
    "TERM_OWNER": QueueState.CANCELLED,
    "TERM_FORCE_OWNER": QueueState.CANCELLED,
    "TERM_ADMIN": QueueState.CANCELLED,
    "TERM_FORCE_ADMIN": QueueState.CANCELLED,
    "TERM_PREEMPT": QueueState.PREEMPTED,
    "TERM_REQUEUE_OWNER": QueueState.PREEMPTED,
    "TERM_REQUEUE_ADMIN": QueueState.PREEMPTED,
}


class LsfQueue(Queue):
    """The door to LSF.

    Scripts go to the standard input of ``bsub``, which reads its options from there everywhere.
    Jobs are marked as never rerunnable, and one that is requeued by hand ends at once, since its
    environment does not tell how often it was started. `bjobs` shows jobs for an hour after their
    end, or as long as the site's CLEAN_PERIOD says.
    """

    title: ClassVar[str] = "LSF"
    programs: ClassVar[tuple[str, ...]] = ("bsub", "bjobs", "bkill")
    advice: ClassVar[str] = "Queues: bqueues -u $USER, their limits: bqueues -l, hosts: bhosts -gpu"
    job_id: ClassVar[str] = '"$LSB_JOBID$([ "${LSB_JOBINDEX:-0}" = 0 ] || echo "[$LSB_JOBINDEX]")"'

    # What the script says

    def script(self, job: Any, request: Request, preamble: Sequence[str], command: str) -> str:
        helpers.one_node(request, self.title)
        name = helpers.clean_name(request.name, r"\w.-", longest=100)
        lines = helpers.quoted_header(job, "#BSUB", name, _quote, ("-q", "-P"), "-J")
        lines += helpers.renamed(request.name, name, self.title)
        if request.gpus:
            lines.append(f'#BSUB -gpu "num={request.gpus}{_kind(request.gpu_type)}"')
        lines += [f'#BSUB -Jd "{request.tag}"', "#BSUB -rn", f"#BSUB -o {_log(request.folder)}"]
        guard = helpers.first_life(request, self.job_id)
        return render(helpers.with_header(job, lines), [], [guard, *preamble], command)

    @staticmethod
    def parse_walltime(text: str) -> timedelta:
        return helpers.parse_clock(text.partition("/")[0], "mh", "MINUTES, HOURS:MINUTES")

    # What is asked of the queue

    async def limit(self) -> int:
        done = await self.run("bparams", "-a")
        found = re.search(r"MAX_JOB_ARRAY_SIZE\s*=\s*(\d+)", done.stdout)
        return int(found[1]) if found else 1000  # LSF's default

    async def submit(self, script: str, count: int) -> list[str]:
        text = await helpers.read(script)
        array = []
        if count > 1:
            name = re.search(r"^#BSUB -J (\S+)", text, re.M)
            array = ["-J", f"{name[1] if name else 'dask-worker'}[1-{count}]"]
        # Where jobs wait for a threshold, bsub would wait as well
        done = await self.run("bsub", *array, input=text, env={"LSB_NTRIES": "1"})
        found = re.search(r"Job <(\d+)> is submitted", done.stdout)
        if done.returncode:
            raise helpers.refused(done, script, self.advice, LIMITS)
        if not found:
            raise QueueError(f"bsub answered {helpers.words(done)!r} instead of a job's id")
        return [found[1]] if count == 1 else [f"{found[1]}[{n + 1}]" for n in range(count)]

    async def query(self, ids: Collection[str]) -> dict[str, QueueStatus]:
        numbers = dict.fromkeys(job.partition("[")[0] for job in ids)
        found = {seen.id: seen for seen in map(_seen, await self._records(FIELDS, "-a", *numbers))}
        return {job: found[job] for job in ids if job in found}

    async def _records(self, fields: str, *arguments: str) -> list[dict[str, str]]:
        done = await self.run("bjobs", "-json", "-o", fields, *arguments)
        try:
            records = json.loads(done.stdout)["RECORDS"]
        except (ValueError, KeyError, TypeError):
            if done.returncode and re.search(r"not found|No (unfinished )?job", done.stderr):
                return []
            raise QueueError(f"bjobs failed: {helpers.words(done)}") from None
        return [record for record in records if "ERROR" not in record]

    async def cancel(self, ids: Collection[str]) -> None:
        done = await self.run("bkill", *ids)
        bad = [line for line in done.stderr.splitlines() if line.strip() and not GONE.search(line)]
        if done.returncode and bad:
            raise QueueError(f"bkill failed: {'; '.join(bad)[:500]}")

    async def tagged(self) -> dict[str, str]:
        records = await self._records("jobid jobindex job_description")
        return {
            _id(record): record["JOB_DESCRIPTION"]
            for record in records
            if record.get("JOB_DESCRIPTION", "").startswith("hpcdask:")
        }


def _quote(value: str) -> str:
    return value if re.fullmatch(r"[\w.@,+:/=-]+", value) else double_quoted(value, "#BSUB")


def _log(folder: str) -> str:
    """Where LSF's own output of a job goes; what it cannot name goes nowhere."""
    folder = one_line(folder, "the folder of logs")
    return "/dev/null" if UNQUOTABLE.search(folder) else f'"{folder}/queue-%J.%I.log"'


def _kind(gpu_type: str | None) -> str:
    """The GPU's model, or other GPU requirements, as in ``gmodel=A100:j_exclusive=yes``."""
    if gpu_type is None:
        return ""
    return f":{gpu_type}" if "=" in gpu_type else f":gmodel={gpu_type}"


# What bjobs says


def _id(record: Mapping[str, str]) -> str:
    index = record.get("JOBINDEX", "0") or "0"
    return record["JOBID"] if index == "0" else f"{record['JOBID']}[{index}]"


def _seen(record: Mapping[str, str]) -> QueueStatus:
    """One record of ``bjobs -json -o``."""
    stat = record.get("STAT", "")
    started = _time(record.get("START_TIME", ""))
    hosts = re.split(r"[:\s]+", record.get("EXEC_HOST", "").strip("-"))
    nodes = "+".join(dict.fromkeys(re.sub(r"^\d+\*", "", host) for host in hosts if host))
    state, reason, code = QueueState.STARTING, "", None
    if stat in WAITS:
        state = QueueState.PENDING
        reason = record.get("PEND_REASON", "").strip().rstrip(";")
        started = None
    elif stat in ("DONE", "EXIT"):
        text = record.get("EXIT_CODE", "")
        code = int(text) if text.isdigit() else 0 if stat == "DONE" else None
        why = record.get("EXIT_REASON", "").strip("- ")
        state, reason = helpers.ended(code)
        if stat == "EXIT" and state is QueueState.COMPLETED:
            state = QueueState.FAILED
        state, reason = REASONS.get(why.partition(":")[0], state), why or reason
    elif stat in ("USUSP", "SSUSP"):
        reason = "suspended"
    elif stat != "RUN":
        state, reason = QueueState.UNKNOWN, stat
    return QueueStatus(_id(record), state, reason, code, 0, started, None, nodes)


def _time(text: str) -> float | None:
    """Read ``Nov 20 22:07``, with or without a year behind it."""
    found = re.match(r"(\w{3} +\d+ \d+:\d+)(?::\d+)?( \d{4})?", text)
    if not found:
        return None
    if found[2]:
        return helpers.unix_time(found[1] + found[2], "%b %d %H:%M %Y")
    now = time.time()
    for year in (time.localtime(now).tm_year, time.localtime(now).tm_year - 1):
        at = helpers.unix_time(f"{found[1]} {year}", "%b %d %H:%M %Y")
        if at is not None and at < now + 86400:
            return at
    return None
