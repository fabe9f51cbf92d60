"""HTCondor.

Commands of a submit description: htcondor-jdl(1), options: condor_submit(1); states: job ClassAd
attributes and "Job Status Codes" of the manual. Where a line of a description ends its value
ends, quotes are text, and ``$(DOLLAR)`` is a dollar sign.
"""

from __future__ import annotations

import asyncio
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcdask.errors import UsageError

from . import helpers
from .base import Allocation, Queue, Request
from .commands import COMMAND_TIMEOUT_S
from .job_state import QueueState, QueueStatus
from .script import one_line, render

ATTRIBUTES = (
    "ClusterId,ProcId,Owner,JobStatus,HoldReason,HoldReasonCode,ExitBySignal,ExitCode,ExitSignal,"
    "JobCurrentStartDate,AllowedJobDuration,RemoteHost,LastRemoteHost,NumJobStarts,RemoveReason,"
    "HpcdaskTag"
)
IDLE, REMOVED, COMPLETED, HELD = 1, 3, 4, 5
STATES = {
    "status 1": (QueueState.PENDING, ""),
    "status 2": (QueueState.RUNNING, ""),
    "status 3": (QueueState.CANCELLED, ""),
    "status 4": (QueueState.COMPLETED, ""),
    "status 5": (QueueState.FAILED, ""),
    "status 6": (QueueState.RUNNING, ""),  # its output is transferred
    "status 7": (QueueState.RUNNING, "suspended"),
}
BY_USER = 1  # hold reason codes
TOO_LONG = (46, 47)
NO_EFFECT = "Of dask-jobqueue; it has no effect here."


class HtcondorQueue(Queue):
    """The door to HTCondor.

    The job script is the executable, and its ``#CONDOR`` lines are the submit description. A job
    that HTCondor starts again ends at once and is replaced. One that it holds back because of an
    error, which only a hand releases, is removed.
    """

    title = "HTCondor"
    jobqueue = ("htcondor", "HTCondorJob")
    keywords = (
        ("disk", str | int, 'Disk of each job, such as ``"1GB"``.'),
        ("job_extra_directives", dict[str, Any], "More lines of the submit description."),
        ("job_extra", dict[str, Any], "Old name of ``job_extra_directives``."),
        ("submit_command_extra", list[str], NO_EFFECT),
        ("cancel_command_extra", list[str], NO_EFFECT),
    )
    programs = ("condor_submit", "condor_q", "condor_rm", "condor_history")
    denied = re.compile(r"DENIED|[Nn]ot authorized")
    advice = "What machines have: condor_status -compact, why jobs wait: condor_q -b"
    limits = re.compile(r"MAX_JOBS_PER|exceed|[Ff]ailed to connect|[Cc]an't find address|timed out")
    canceller = "condor_rm"
    gone = re.compile("not found|couldn't find|already", re.I)
    gone_by_line = False
    job_id = '"$1"'  # the description's arguments
    needs_guard = True
    prefix = "#CONDOR"
    gpu_example = "request_gpus = 1"
    gpu_pattern = re.compile(r"\s*(?:\+|MY\.)?request_?gpus\s*=\s*(\d*)", re.I)

    def __init__(self, timeout_s: float = COMMAND_TIMEOUT_S) -> None:
        super().__init__(timeout_s)
        self._submit_extra: list[str] = []

    # What the script says

    def script(self, job: Any, request: Request, preamble: Sequence[str], command: str) -> str:
        self.refuse_nodes(request)
        self._submit_extra = shlex.split(job.submit_command)[1:]
        self.canceller = job.cancel_command
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
        lines = [f"#CONDOR {name} = {value}" for name, value in description.items()]
        text = render(job, lines, [*self.guard(request), *preamble], command)
        first, _, rest = text.partition("\n")
        return f"#!/usr/bin/env bash\n{rest}" if "condor_submit" in first else text

    @classmethod
    def requested_gpus(cls, directive: str, nodes: int = 1) -> int | None:
        found = cls.gpu_pattern.match(directive)
        return int(found[1] or 1) if found else None

    async def allocation(
        self, asked: Allocation, directives: list[str], site: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Account and walltime are directives here, which are pairs."""
        if asked.nodes > 1:
            raise UsageError(
                f"-N {asked.nodes}: HTCondor's jobs are of one node. Leave -N out, or ask for one "
                f"GPU per job with hpcdask.HTCondorCUDACluster"
            )
        extra = {}
        for line in directives:
            name, equals, value = line.partition("=")
            if not equals or not name.strip():
                raise UsageError(f"--directive {line!r} is not NAME = VALUE, as HTCondor's are")
            extra[name.strip()] = value.strip()
        if asked.account:
            extra.setdefault("accounting_group", asked.account)
        if asked.walltime:
            seconds = self.parse_walltime(asked.walltime).total_seconds()
            extra.setdefault("allowed_job_duration", f"{seconds:.0f}")
        unasked = [] if asked.memory else ["RequestMemory", "MY.DaskWorkerMemory"]
        unasked += [] if site.get("disk") else ["RequestDisk", "MY.DaskWorkerDisk"]
        return {
            **await super().allocation(asked, directives, site),
            "disk": site.get("disk") or "1GB",
            "job_directives_skip": unasked,
            "job_extra_directives": extra,
        }

    # What is asked of the queue

    async def limit(self) -> int:
        done = await self.run("condor_config_val", "-schedd", "MAX_JOBS_PER_SUBMISSION")
        text = done.stdout.strip()
        return int(text) if text.isdigit() else 20_000  # HTCondor's default

    async def submit(self, script: str, count: int) -> list[str]:
        description = await asyncio.to_thread(_description, script, count)
        command = ["condor_submit", "-terse", *self._submit_extra]
        form = rf"^(\d+)\.0\s*-\s*\1\.{count - 1}\b"
        cluster = (await self.take(script, form, *command, input=description))[1]
        return [f"{cluster}.{number}" for number in range(count)]

    async def query(self, ids: Collection[str]) -> dict[str, QueueStatus]:
        clusters = dict.fromkeys(job.partition(".")[0] for job in ids)
        jobs = await self._ads("condor_q", *clusters)
        found = helpers.pick(ids, {_id(job): _seen(job) for job in jobs})
        stuck = {_id(job) for job in jobs if job.get("JobStatus") == HELD}
        if broken := [
            job for job in stuck if job in found and found[job].state is not QueueState.PENDING
        ]:
            await self.cancel(broken)
        return found

    async def departed(self, ids: Collection[str]) -> dict[str, QueueStatus]:
        # Without a limit it reads the history to its beginning
        jobs = await self._ads("condor_history", *ids, "-limit", str(len(ids)))
        return helpers.pick(ids, {_id(job): _seen(job) for job in jobs})

    async def _ads(self, *command: str) -> list[dict[str, Any]]:
        done = await self.run(*command, "-json", "-attributes", ATTRIBUTES)
        return helpers.read_json(done, list)

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
        line.removeprefix("#CONDOR ")
        for line in path.read_text().split("\n")
        if line.startswith("#CONDOR ")
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
    status, hold = job.get("JobStatus"), str(job.get("HoldReason", "held"))
    by_user = status == HELD and job.get("HoldReasonCode") == BY_USER
    duration = job.get("AllowedJobDuration")
    return helpers.fold(
        _id(job),
        f"status {IDLE if by_user else status}",
        STATES,
        lambda: _end(job, hold),
        waits=hold if by_user else "",
        again=job.get("NumJobStarts"),
        started=float(job.get("JobCurrentStartDate") or 0) or None,
        walltime=duration if isinstance(duration, int) else None,
        nodes=str(job.get("RemoteHost") or job.get("LastRemoteHost") or "").rpartition("@")[2],
    )


def _end(job: Mapping[str, Any], hold: str) -> helpers.End:
    if job["JobStatus"] == REMOVED:
        return QueueState.CANCELLED, str(job.get("RemoveReason", "")), None
    if job["JobStatus"] == HELD:
        too_long = job.get("HoldReasonCode") in TOO_LONG
        return QueueState.TIMEOUT if too_long else QueueState.FAILED, hold, None
    by_signal = job.get("ExitBySignal")
    code = 128 + int(job.get("ExitSignal", 0)) if by_signal else int(job.get("ExitCode", 0))
    return *helpers.ended(code), code
