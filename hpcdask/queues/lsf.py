"""IBM Spectrum LSF.

Options: bsub(1), its ``-J``, ``-Jd``, ``-gpu``, ``-rn``, ``-o``; states and fields: bjobs(1), its
``-o`` and ``-json``. Embedded ``#BSUB`` options hold text with spaces in double quotes.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Collection, Mapping
from typing import Any

from . import helpers
from .base import Allocation, Queue, Request
from .job_state import JobState, QueueStatus

#: What the reader of options, or of the names of files, takes for something else.
UNQUOTABLE = re.compile(r"""['"\\$%`]""")
FIELDS = "jobid jobindex stat exit_code exit_reason pend_reason start_time exec_host"
STATES = {
    **dict.fromkeys(("PEND", "PSUSP", "WAIT", "PROV"), (JobState.PENDING, "")),
    "RUN": (JobState.RUNNING, ""),
    **dict.fromkeys(("USUSP", "SSUSP"), (JobState.RUNNING, "suspended")),
    "DONE": (JobState.COMPLETED, ""),
    "EXIT": (JobState.FAILED, ""),
}
#: LSF's older form of a request of GPUs, ``-R "rusage[ngpus_excl_p=2]"``.
USAGE = re.compile(r"\brusage\s*\[[^]]*?\bngpus\w*=(\d+)", re.I)
#: Why LSF ended a job, by the first word of its reason.
REASONS = {
    **dict.fromkeys(("TERM_RUNLIMIT", "TERM_DEADLINE"), JobState.TIMEOUT),
    **dict.fromkeys(("TERM_OWNER", "TERM_FORCE_OWNER"), JobState.CANCELLED),
    **dict.fromkeys(("TERM_ADMIN", "TERM_FORCE_ADMIN"), JobState.CANCELLED),
    **dict.fromkeys(("TERM_REQUEUE_OWNER", "TERM_REQUEUE_ADMIN"), JobState.PREEMPTED),
    "TERM_PREEMPT": JobState.PREEMPTED,
}


class LsfQueue(Queue):
    """IBM Spectrum LSF.

    Scripts go to the standard input of ``bsub``, which reads its options from there everywhere.
    Jobs are marked as never rerunnable, and one that is requeued by hand ends at once, since its
    environment does not tell how often it was started. `bjobs` shows jobs for an hour after their
    end, or as long as the site's CLEAN_PERIOD says.
    """

    title = "LSF"
    jobqueue = ("lsf", "LSFJob")
    programs = ("bsub", "bjobs", "bkill")
    denied = re.compile(r"non-LSF host")
    advice = "Queues: bqueues -u $USER, their limits: bqueues -l, hosts: bhosts -gpu"
    # Not those of a queue's hard limits on time and memory, which do not pass
    limits = re.compile(
        r"threshold|[Jj]ob (slot )?limit|[Nn]umber of jobs|index too large|too many|not responding"
        r"|is down|busy|try later"
    )
    gone = re.compile("not found|already finished|no matching|already been|is being")
    job_id = '"$LSB_JOBID$([ "${LSB_JOBINDEX:-0}" = 0 ] || echo "[$LSB_JOBINDEX]")"'
    needs_guard = True
    prefix = "#BSUB"
    name_option = "-J"
    quoted_options = "-q -P"
    escaped = '"\\'
    name_form = (r"\w.-", "", 100)
    array_limit = ("bparams -a", r"MAX_JOB_ARRAY_SIZE\s*=\s*(\d+)", 1000)
    memory_option = "-M"
    memory_pattern = re.compile(r"(^|\s)-M")
    gpu_example = "#BSUB -gpu num=1"
    gpu_pattern = re.compile(r"(?:^|:)\s*num=(\d+)", re.I)
    nodes_variable = "LSB_MCPU_HOSTS"
    walltime_units = "mh"
    walltime_forms = "MINUTES, HOURS:MINUTES"

    # What the script says

    def with_gpus(self, lines: list[str], request: Request) -> list[str]:
        # the type may be other requirements too, as in gmodel=A100:j_exclusive=yes
        wanted = ":".join([f"num={request.gpus}", *request.kind("gmodel")])
        return [*lines, f'#BSUB -gpu "{wanted}"']

    def with_directives(self, lines: list[str], job: Any, request: Request) -> list[str]:
        odd = UNQUOTABLE.search(request.folder)  # what cannot be named goes nowhere
        log = "/dev/null" if odd else f'"{request.folder}/queue-%J.%I.log"'
        return [*lines, f'#BSUB -Jd "{request.tag}"', "#BSUB -rn", f"#BSUB -o {log}"]

    @classmethod
    def requested_gpus(cls, directive: str, nodes: int = 1) -> int | None:
        """Read ``-gpu "num=2:gmodel=A100"``; ``-gpu -`` is one GPU."""
        for value in helpers.option_values(directive, "-gpu"):
            return helpers.first_number(cls.gpu_pattern, [value]) or 1
        return helpers.first_number(USAGE, helpers.option_values(directive, "-R"))

    async def allocation(
        self, asked: Allocation, directives: list[str], site: Mapping[str, Any]
    ) -> dict[str, Any]:
        skip = ["#BSUB -R", *([] if asked.memory else ["#BSUB -M "])]
        span = f"ptile={asked.cores}" if asked.nodes > 1 else "hosts=1" if asked.cores > 1 else ""
        spread = [f'-R "span[{span}]"'] if span else []
        return {
            **await super().allocation(asked, directives, site),
            "ncpus": asked.nodes * asked.cores,
            "walltime": _without_seconds(asked.walltime),
            "job_directives_skip": skip,
            "job_extra_directives": [*spread, *directives],
        }

    # What is asked of the queue

    async def submit(self, script: str, count: int) -> list[str]:
        text = await helpers.read(script)
        array = []
        if count > 1:
            name = re.search(r"^#BSUB -J (\S+)", text, re.M)
            array = ["-J", f"{name[1] if name else 'dask-worker'}[1-{count}]"]
        # Where jobs wait for a threshold, bsub would wait as well
        command, env = ["bsub", *array], {"LSB_NTRIES": "1"}
        form = r"Job <(\d+)> is submitted"
        number = (await self.take(script, form, *command, input=text, env=env))[1]
        return [number] if count == 1 else [f"{number}[{n + 1}]" for n in range(count)]

    async def query(self, ids: Collection[str]) -> dict[str, QueueStatus]:
        numbers = dict.fromkeys(job.partition("[")[0] for job in ids)
        found = {seen.id: seen for seen in map(_seen, await self._records(FIELDS, "-a", *numbers))}
        return helpers.pick(ids, found)

    async def _records(self, fields: str, *arguments: str) -> list[dict[str, str]]:
        done = await self.run("bjobs", "-json", "-o", fields, *arguments)
        try:
            records = json.loads(done.stdout)["RECORDS"]
        except (ValueError, KeyError, TypeError):
            if done.returncode and re.search(r"not found|No (unfinished )?job", done.stderr):
                return []
            raise self.failed(done) from None
        return [record for record in records if "ERROR" not in record]

    async def tagged(self) -> dict[str, str]:
        records = await self._records("jobid jobindex job_description")
        return {
            _id(record): record["JOB_DESCRIPTION"]
            for record in records
            if record.get("JOB_DESCRIPTION", "").startswith("hpcdask:")
        }


def _without_seconds(walltime: str | None) -> str | None:
    """Return a walltime in hours and minutes, rounded up."""
    if (walltime or "").count(":") != 2:
        return walltime
    clock = helpers.parse_clock(walltime or "", "smh", "HOURS:MINUTES:SECONDS")
    minutes = math.ceil(clock.total_seconds() / 60)
    return f"{minutes // 60}:{minutes % 60:02}"


# What bjobs says


def _id(record: Mapping[str, str]) -> str:
    index = record.get("JOBINDEX", "0") or "0"
    return record["JOBID"] if index == "0" else f"{record['JOBID']}[{index}]"


def _seen(record: Mapping[str, str]) -> QueueStatus:
    """Return the job of one record of ``bjobs -json -o``."""
    hosts = re.split(r"[:\s]+", record.get("EXEC_HOST", "").strip("-"))
    return helpers.fold(
        _id(record),
        record.get("STAT", ""),
        STATES,
        lambda: _end(record),
        waits=record.get("PEND_REASON", "").strip().rstrip(";"),
        started=_time(record.get("START_TIME", "")),
        nodes="+".join(dict.fromkeys(re.sub(r"^\d+\*", "", host) for host in hosts if host)),
    )


def _end(record: Mapping[str, str]) -> helpers.End:
    text, failed = record.get("EXIT_CODE", ""), record["STAT"] == "EXIT"
    code = int(text) if text.isdigit() else None if failed else 0
    why = record.get("EXIT_REASON", "").strip("- ")
    state, reason = helpers.ended(code, failed=failed)
    return REASONS.get(why.partition(":")[0], state), why or reason, code


def _time(text: str) -> float | None:
    """Read ``Nov 20 22:07``, with or without a year behind it: without one, the last such."""
    found = re.match(r"(\w{3} +\d+ \d+:\d+)(?::\d+)?(?: (\d{4}))?", text)
    if not found:
        return None
    this = time.localtime().tm_year
    years = [found[2]] if found[2] else [this, this - 1]
    times = [helpers.unix_time(f"{found[1]} {year}", "%b %d %H:%M %Y") for year in years]
    return next((at for at in times if at and at < time.time() + 86400), None)
