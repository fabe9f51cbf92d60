"""Moab over Torque, after its manual's pages of ``msub``, ``showq``, "Job States"; never run."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from . import helpers
from .base import Request
from .job_state import JobState, QueueStatus
from .pbs import PbsQueue

STATES = {
    **dict.fromkeys(("Idle", "Staged", "Blocked", "Deferred"), (JobState.PENDING, "")),
    **dict.fromkeys(("Hold", "UserHold", "SystemHold", "BatchHold"), (JobState.PENDING, "held")),
    **dict.fromkeys(("Running", "Starting", "Migrated", "Staging"), (JobState.RUNNING, "")),
    "Suspended": (JobState.RUNNING, "suspended"),
    **dict.fromkeys(("Completed", "Removed", "Vacated"), (JobState.COMPLETED, "")),
}


class MoabQueue(PbsQueue):
    """Moab: PBS's job scripts, Moab's commands, one job at a time, the tag at the name's end."""

    title = "Moab"
    jobqueue = ("moab", "MoabJob")
    programs = ("msub", "showq", "canceljob")
    gone = re.compile("invalid job|cannot locate|not found|unknown|already|completed", re.I)
    array_limit = ("", "", 1)
    version = "Torque"
    job_id = '"$MOAB_JOBID"'  # set by msub -E

    def header(self, job: Any, name: str) -> list[str]:
        # dask-jobqueue's default is PBS Professional's form
        select, nodes = r"select=1:ncpus=(\d+):mem=(\w+)$", r"nodes=1:ppn=\1,mem=\2"
        return [re.sub(select, nodes, line) for line in super().header(job, name)]

    def job_name(self, request: Request) -> str:
        return f"{super().job_name(request)[:100]}.{request.tag.replace(':', '_')}"

    async def submit(self, script: str, count: int) -> list[str]:
        return [(await self.take(script, r"\A\s*([\w.-]+)\s*\Z", "msub", "-E", script))[1]]

    async def query(self, ids: Collection[str]) -> dict[str, QueueStatus]:
        return helpers.pick(ids, {job["JobID"]: _read_job(job) for job in await self._jobs()})

    async def departed(self, ids: Collection[str]) -> dict[str, QueueStatus]:
        return helpers.pick(ids, {job["JobID"]: _read_job(job) for job in await self._jobs("-c")})

    async def _jobs(self, *options: str) -> list[dict[str, str]]:
        text = await self.answer("showq", *options, "--xml")
        return [job.attrib for job in helpers.read_xml(text, "showq").iter("job")]

    async def tagged(self) -> dict[str, str]:
        mine = [job for job in await self._jobs() if job["User"] == helpers.user()]
        tags = {job["JobID"]: job.get("JobName", "").rpartition(".hpcdask_") for job in mine}
        return {job: f"hpcdask:{tag}" for job, (_, found, tag) in tags.items() if found}


def _read_job(job: dict[str, str]) -> QueueStatus:
    """Return one job of ``showq --xml``; the exit code of a cancelled one reads ``CNCLD(271)``."""
    code = job.get("CompletionCode", "")
    return helpers.fold(
        job["JobID"],
        "Completed" if code else job["State"],
        STATES,
        lambda: _end(code),
        started=float(job.get("StartTime") or 0) or None,
        walltime=float(job.get("ReqAWDuration") or 0),
        nodes=job.get("MasterHost", ""),
    )


def _end(text: str) -> helpers.End:
    number = int("".join(re.findall(r"\d", text)) or 0)
    code = number - 128 if number >= 256 else number
    return (JobState.CANCELLED, "", code) if "CNCLD" in text else (*helpers.ended(code), code)
