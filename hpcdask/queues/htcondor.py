"""HTCondor.

Commands of a submit description: htcondor-jdl(1), options: condor_submit(1); states: job ClassAd
attributes and "Job Status Codes" of the manual. Where a line of a description ends its value
ends, quotes are text, and ``$(DOLLAR)`` is a dollar sign.
"""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

from hpcdask.errors import QueueError
from hpcdask.queues.base import COMMAND_TIMEOUT_S, Queue, Request
from hpcdask.queues.script import one_line, render

from . import helpers
from .job_state import QueueState, QueueStatus

PREFIX = "#CONDOR "
LIMITS = re.compile(r"MAX_JOBS_PER|exceed|[Ff]ailed to connect|[Cc]an't find address|timed out")
ATTRIBUTES = (
    "ClusterId,ProcId,Owner,JobStatus,HoldReason,HoldReasonCode,ExitBySignal,ExitCode,ExitSignal,"
    "JobCurrentStartDate,AllowedJobDuration,RemoteHost,LastRemoteHost,NumJobStarts,RemoveReason,"
    "HpcdaskTag"
)
IDLE, RUNNING, REMOVED, COMPLETED, HELD, TRANSFERRING, SUSPENDED = range(1, 8)
BY_USER = 1  # hold reason codes
TOO_LONG = (46, 47)
GONE = re.compile(r"not found|couldn't find|already", re.I)


class HtcondorQueue(Queue):
    """The door to HTCondor.

    The job script is the executable, and its ``#CONDOR`` lines are the submit description. A job
    that HTCondor starts again ends at once and is replaced. One that it holds back because of an
    error, which only a hand releases, is removed.
    """

    title: ClassVar[str] = "HTCondor"
    programs: ClassVar[tuple[str, ...]] = (
        "condor_submit",
        "condor_q",
        "condor_rm",
        "condor_history",
    )
    advice: ClassVar[str] = "What machines have: condor_status -compact, why jobs wait: condor_q -b"
    job_id: ClassVar[str] = '"$1"'  # the description's arguments

    def __init__(self, timeout_s: float = COMMAND_TIMEOUT_S) -> None:
        super().__init__(timeout_s)
        self._submit_extra: list[str] = []
        self._cancel_extra: list[str] = []

    # What the script says

    def script(self, job: Any, request: Request, preamble: Sequence[str], command: str) -> str:
        helpers.one_node(request, self.title)
        self._submit_extra = shlex.split(job.submit_command)[1:]
        self._cancel_extra = shlex.split(job.cancel_command)[1:]
        description = {
            name: value
            for name, value in job.job_header_dict.items()
            if name not in ("MY.DaskWorkerName", "MY.JobId")
        }
        if "batch_name" in description:
            description["batch_name"] = _text(request.name, "the job's name")
        if request.gpus:
            description["request_gpus"] = request.gpus
            if request.gpu_type is not None:
                description["require_gpus"] = _kind(request.gpu_type)
        log = _text(f"{request.folder}/queue-", "the folder of logs") + "$(ClusterId).$(ProcId).log"
        description |= {
            "MY.HpcdaskTag": f'"{request.tag}"',
            "arguments": "$(ClusterId).$(ProcId)",
            "output": log,
            "error": log,
        }
        lines = [f"{PREFIX}{name} = {value}" for name, value in description.items()]
        header = helpers.with_header(job, lines)
        if "condor_submit" in header.shebang:
            header.shebang = "#!/usr/bin/env bash"
        guard = helpers.first_life(request, self.job_id)
        return render(header, [], [guard, *preamble], command)

    @staticmethod
    def parse_walltime(text: str) -> timedelta:
        return helpers.parse_clock(text, "smh", "SECONDS, MINUTES:SECONDS, HOURS:MINUTES:SECONDS")

    # What is asked of the queue

    async def limit(self) -> int:
        done = await self.run("condor_config_val", "-schedd", "MAX_JOBS_PER_SUBMISSION")
        text = done.stdout.strip()
        return int(text) if text.isdigit() else 20_000  # HTCondor's default

    async def submit(self, script: str, count: int) -> list[str]:
        description = await asyncio.to_thread(_description, script, count)
        done = await self.run("condor_submit", "-terse", *self._submit_extra, input=description)
        if done.returncode:
            raise helpers.refused(done, script, self.advice, LIMITS)
        found = re.search(r"^(\d+)\.0\s*-\s*\1\.(\d+)", done.stdout, re.M)
        if not found or int(found[2]) != count - 1:
            raise QueueError(
                f"condor_submit answered {helpers.words(done)!r}, no ids of {count} jobs"
            )
        return [f"{found[1]}.{number}" for number in range(count)]

    async def query(self, ids: Collection[str]) -> dict[str, QueueStatus]:
        clusters = dict.fromkeys(job.partition(".")[0] for job in ids)
        jobs = await self._ads("condor_q", *clusters)
        found = {_id(job): _seen(job) for job in jobs}
        found = {job: found[job] for job in ids if job in found}
        stuck = {_id(job) for job in jobs if job.get("JobStatus") == HELD}
        if broken := [
            job for job in stuck if job in found and found[job].state is not QueueState.PENDING
        ]:
            await self.cancel(broken)
        return found

    async def departed(self, ids: Collection[str]) -> dict[str, QueueStatus]:
        # Without a limit it reads the history to its beginning
        jobs = await self._ads("condor_history", *ids, "-limit", str(len(ids)))
        return {_id(job): _seen(job) for job in jobs if _id(job) in ids}

    async def _ads(self, *command: str) -> list[dict[str, Any]]:
        done = await self.run(*command, "-json", "-attributes", ATTRIBUTES)
        try:
            jobs = json.loads(done.stdout) if done.stdout.strip() else []
        except ValueError:
            jobs = None
        if done.returncode or not isinstance(jobs, list):
            raise QueueError(f"{command[0]} failed: {helpers.words(done)}")
        return jobs

    async def cancel(self, ids: Collection[str]) -> None:
        done = await self.run("condor_rm", *self._cancel_extra, *ids)
        if done.returncode and not GONE.search(done.stderr + done.stdout):
            raise QueueError(f"condor_rm failed: {helpers.words(done)}")

    async def tagged(self) -> dict[str, str]:
        jobs = await self._ads("condor_q", "-constraint", "HpcdaskTag =!= undefined")
        over = (REMOVED, COMPLETED)
        return {
            _id(job): str(job["HpcdaskTag"])
            for job in jobs
            if job.get("Owner") == helpers.user() and job.get("JobStatus") not in over
        }


def _description(script: str, count: int) -> str:
    """The submit description of a script, which becomes executable."""
    path = Path(script).absolute()
    path.chmod(0o700)
    lines = [
        line.removeprefix(PREFIX)
        for line in path.read_text().split("\n")
        if line.startswith(PREFIX)
    ]
    executable = _text(str(path), "the script's path")
    return "\n".join([*lines, f"executable = {executable}", f"queue {count}", ""])


def _text(value: str, what: str) -> str:
    """A value of a description, as it is."""
    return one_line(value, what).replace("$", "$(DOLLAR)")


def _kind(gpu_type: str) -> str:
    """The GPU's name, or a condition such as ``GlobalMemoryMb >= 40000``."""
    return gpu_type if re.search(r"[=<>]", gpu_type) else f'DeviceName == "{gpu_type}"'


# What condor_q and condor_history say


def _id(job: Mapping[str, Any]) -> str:
    return f"{job.get('ClusterId')}.{job.get('ProcId')}"


def _seen(job: Mapping[str, Any]) -> QueueStatus:
    """One job's ClassAd."""
    status = job.get("JobStatus")
    started = float(job["JobCurrentStartDate"]) if job.get("JobCurrentStartDate") else None
    duration = job.get("AllowedJobDuration")
    ends = started + duration if started and isinstance(duration, int) else None
    host = str(job.get("RemoteHost") or job.get("LastRemoteHost") or "").rpartition("@")[2]
    state, reason, code = QueueState.STARTING, "", None
    if status == IDLE or (status == HELD and job.get("HoldReasonCode") == BY_USER):
        state = QueueState.REQUEUED if job.get("NumJobStarts") else QueueState.PENDING
        reason = str(job.get("HoldReason", "held")) if status == HELD else ""
        started = ends = None
    elif status == HELD:
        too_long = job.get("HoldReasonCode") in TOO_LONG
        state = QueueState.TIMEOUT if too_long else QueueState.FAILED
        reason = str(job.get("HoldReason", "held"))
    elif status == REMOVED:
        state, reason = QueueState.CANCELLED, str(job.get("RemoveReason", ""))
    elif status == COMPLETED:
        by_signal = job.get("ExitBySignal")
        code = 128 + int(job.get("ExitSignal", 0)) if by_signal else int(job.get("ExitCode", 0))
        state, reason = helpers.ended(code)
    elif status == SUSPENDED:
        reason = "suspended"
    elif status not in (RUNNING, TRANSFERRING):
        state, reason = QueueState.UNKNOWN, f"status {status}"
    return QueueStatus(_id(job), state, reason, code, 0, started, ends, host)
