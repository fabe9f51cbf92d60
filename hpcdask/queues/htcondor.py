"""HTCondor, after its manual's htcondor-jdl(1), job ClassAd attributes, condor_q(1); never run."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from . import helpers
from .base import Queue, Request
from .job_state import JobState, QueueStatus

STATES = {
    "status 1": (JobState.PENDING, ""),
    **dict.fromkeys(("status 3", "status 4"), (JobState.COMPLETED, "")),
    "status 5": (JobState.PENDING, "held"),
    **dict.fromkeys(("status 2", "status 6"), (JobState.RUNNING, "")),
    "status 7": (JobState.RUNNING, "suspended"),
}


class HtcondorQueue(Queue):
    """HTCondor: the job script is the executable, its ``#CONDOR`` lines the submit description."""

    title = "HTCondor"
    jobqueue = ("htcondor", "HTCondorJob")
    programs = ("condor_submit", "condor_q", "condor_rm", "condor_history")
    advice = "What machines have: condor_status -compact, why jobs wait: condor_q -b"
    limits = re.compile(r"MAX_JOBS_PER|[Ff]ailed to connect|[Cc]an't find address|timed out")
    gone = re.compile("not found|couldn't find|already", re.I)
    job_id = '"$1"'  # the description's arguments
    needs_guard = True
    array_limit = ("", "", 1000)
    launchers = ()
    prefix = "#CONDOR"
    gpu_example = "request_gpus = 1"
    gpu_pattern = re.compile(r"\s*(?:\+|MY\.)?request_?gpus\s*=\s*(\d*)", re.I)

    def script(self, job: Any, request: Request, preamble: Sequence[str], command: str) -> str:
        self.refuse_nodes(request)
        header = {**job.job_header_dict, "batch_name": _text(request.name)}
        if request.gpus:
            header["request_gpus"] = request.gpus
            if kind := request.gpu_type:
                named = re.search("[=<>]", kind) is None
                header["require_gpus"] = f'DeviceName == "{kind}"' if named else kind
        number = "$(ClusterId).$(ProcId)"
        log = f"{_text(request.folder)}/queue-{number}.log"
        header |= {"arguments": number, "output": log, "error": log}
        header["MY.HpcdaskTag"] = f'"{request.tag}"'
        # HTCondor holds jobs that failed; 1 is a user's own hold
        header["periodic_remove"] = "JobStatus == 5 && HoldReasonCode != 1"
        lines = [f"#CONDOR {name} = {value}" for name, value in header.items()]
        text = helpers.render(job, lines, [*self.guard(request), *preamble], command)
        return "#!/usr/bin/env bash\n" + text.partition("\n")[2]

    @classmethod
    def requested_gpus(cls, directive: str, nodes: int = 1) -> int | None:
        found = cls.gpu_pattern.match(directive)
        return int(found[1] or 1) if found else None

    async def submit(self, script: str, count: int) -> list[str]:
        os.chmod(script, 0o700)
        lines = re.findall(r"^#CONDOR (.*)", await helpers.read(script), re.M)
        lines += [f"executable = {_text(script)}", f"queue {count}", ""]
        form = rf"^(\d+)\.0\s*-\s*\1\.{count - 1}\b"
        found = await self.take(script, form, "condor_submit", "-terse", input="\n".join(lines))
        return [f"{found[1]}.{number}" for number in range(count)]

    async def query(self, ids: Collection[str]) -> dict[str, QueueStatus]:
        ads = await self._ads("condor_q", *dict.fromkeys(job.partition(".")[0] for job in ids))
        return helpers.pick(ids, {_id(ad): _read_job(ad) for ad in ads})

    async def departed(self, ids: Collection[str]) -> dict[str, QueueStatus]:
        # Without a limit it reads the history to its beginning
        ads = await self._ads("condor_history", *ids, "-limit", str(len(ids)))
        return helpers.pick(ids, {_id(ad): _read_job(ad) for ad in ads})

    async def _ads(self, *command: str) -> list[dict[str, Any]]:
        return self.read_json(await self.run(*command, "-json"), list)

    async def tagged(self) -> dict[str, str]:
        ads = await self._ads("condor_q", "-constraint", "HpcdaskTag =!= undefined")
        mine = {_id(ad): ad for ad in ads if ad["Owner"] == helpers.user()}
        return {job: ad["HpcdaskTag"] for job, ad in mine.items() if ad["JobStatus"] not in (3, 4)}


def _text(value: str) -> str:
    """Return a value of a submit description, whose quotes are text."""
    return helpers.one_line(value, "a value of the job").replace("$", "$(DOLLAR)")


def _id(ad: Mapping[str, Any]) -> str:
    return f"{ad['ClusterId']}.{ad['ProcId']}"


def _read_job(ad: Mapping[str, Any]) -> QueueStatus:
    """Return the job of a ClassAd."""
    return helpers.fold(
        _id(ad),
        f"status {ad['JobStatus']}",
        STATES,
        lambda: _end(ad),
        waits=ad.get("HoldReason", ""),
        again=ad.get("NumJobStarts"),
        started=ad.get("JobCurrentStartDate"),
        walltime=ad.get("AllowedJobDuration"),
        nodes=(ad.get("RemoteHost") or ad.get("LastRemoteHost") or "").rpartition("@")[2],
    )


def _end(ad: Mapping[str, Any]) -> helpers.End:
    reason = ad.get("RemoveReason", "")
    if "PeriodicRemove" in reason:
        return JobState.FAILED, ad.get("LastHoldReason", reason), None
    if ad["JobStatus"] == 3:
        return JobState.CANCELLED, reason, None
    code = 128 + ad["ExitSignal"] if ad.get("ExitBySignal") else ad.get("ExitCode")
    return *helpers.ended(code), code
