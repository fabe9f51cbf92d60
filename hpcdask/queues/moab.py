"""Moab, over Torque.

Options: the Moab manual's page of ``msub``, which reads ``#PBS`` lines; states: its pages of
``showq`` (``--xml`` and, for jobs that are over, ``-c``) and "Job States".
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Collection, Iterator

from . import helpers
from .base import Request
from .job_state import QueueState, QueueStatus
from .pbs import PbsQueue
from .script import clean_name

SELECT = re.compile(r"#PBS -l select=1:ncpus=(\d+)((?::ngpus=\d+)?)(?::mem=(\w+))?")
TAG = re.compile(r"\.hpcdask_([\w-]+(?:\.\w+)?)$")
HOLDS = ("Hold", "UserHold", "SystemHold", "BatchHold", "Deferred", "Blocked", "Staged")
OVER = ("Completed", "Removed", "Vacated")
STATES = {
    "Idle": (QueueState.PENDING, ""),
    **{word: (QueueState.PENDING, word) for word in HOLDS},
    **dict.fromkeys(("Running", "Starting", "Migrated", "Staging"), (QueueState.RUNNING, "")),
    "Suspended": (QueueState.RUNNING, "suspended"),
    **dict.fromkeys(OVER, (QueueState.COMPLETED, "")),
}


class MoabQueue(PbsQueue):
    """The door to Moab: PBS's job scripts, Moab's commands, one job at a time.

    ``showq`` shows the names of jobs but no other word of the user, so the tag is in the name.
    """

    title = "Moab"
    jobqueue = ("moab", "MoabJob")
    programs = ("msub", "showq", "canceljob")
    advice = "Queues: showq -l or qstat -Q, accounts and classes: mcredctl -q list"
    # Not those on the time and memory of one job, which do not pass
    limits = re.compile(
        r"number of (\w+ )?jobs|jobs? limit|max\w*job|too many|cannot connect|timed out"
        r"|unavailable",
        re.I,
    )
    canceller = "canceljob"
    gone = re.compile("invalid job|cannot locate|not found|unknown|already|completed", re.I)
    gone_by_line = False
    # msub -E passes Moab's own id
    job_id = '"${MOAB_JOBID:-${PBS_JOBID%%.*}}"'

    # What the script says

    def with_gpus(self, lines: list[str], request: Request) -> list[str]:
        # dask-jobqueue's default is a form of PBS Professional
        return super().with_gpus([_nodes(line) for line in lines], request)

    async def _is_torque(self) -> bool:
        return True

    def job_name(self, request: Request) -> str:
        name = clean_name(request.name, r"\w.+-", "A-Za-z", longest=100)
        return f"{name}.{request.tag.replace(':', '_')}"

    # What is asked of the queue

    async def limit(self) -> int:
        return 1

    async def submit(self, script: str, count: int) -> list[str]:
        if count != 1:
            raise ValueError("Moab takes one job at a time")
        return [(await self.take(script, r"\A\s*([\w.-]+)\s*\Z", "msub", "-E", script))[1]]

    async def query(self, ids: Collection[str]) -> dict[str, QueueStatus]:
        return _pick(ids, await self._show())

    async def departed(self, ids: Collection[str]) -> dict[str, QueueStatus]:
        return _pick(ids, await self._show("-c"))

    async def _show(self, *options: str) -> list[ElementTree.Element]:
        text = await self.answer("showq", *options, "--xml")
        return list(helpers.read_xml(text, "showq").iter("job"))

    async def tagged(self) -> dict[str, str]:
        user = helpers.user()
        return {
            job.get("JobID", ""): f"hpcdask:{tag[1]}"
            for job in await self._show()
            if job.get("User") == user and (tag := TAG.search(job.get("JobName", "")))
        }


def _nodes(line: str) -> str:
    """A select statement of dask-jobqueue in Torque's form."""
    found = SELECT.fullmatch(line)
    if not found:
        return line
    memory = f",mem={found[3]}" if found[3] else ""
    return f"#PBS -l nodes=1:ppn={found[1]}{found[2].replace('ngpus', 'gpus')}{memory}"


# What showq says


def _names(job: ElementTree.Element) -> Iterator[str]:
    """Moab's id, and the resource manager's with and without its server."""
    for name in ("JobID", "GJID", "DRMJID"):
        if value := job.get(name):
            yield value
            yield value.split(".")[0] if value[0].isdigit() else value


def _pick(ids: Collection[str], jobs: Collection[ElementTree.Element]) -> dict[str, QueueStatus]:
    found = {name: job for job in jobs for name in _names(job)}
    return {job: _seen(job, found[job]) for job in ids if job in found}


def _seen(name: str, job: ElementTree.Element) -> QueueStatus:
    """One job of ``showq --xml``; times are unix times."""
    started = float(job.get("StartTime") or 0) or None
    walltime = float(job.get("ReqAWDuration") or 0)
    over = job.get("CompletionCode") is not None
    return helpers.fold(
        name,
        "Completed" if over else job.get("State", ""),
        STATES,
        lambda: _end(job, started, walltime),
        started=started,
        walltime=walltime,
        nodes=job.get("MasterHost", ""),
    )


def _end(job: ElementTree.Element, started: float | None, walltime: float) -> helpers.End:
    """How a job ended; the code of a cancelled one reads ``CNCLD(271)``."""
    text = job.get("CompletionCode", "")
    number = re.search(r"-?\d+", text)
    code = int(number[0]) if number else None
    if code is not None and code >= 256:
        code -= 128
    over = float(job.get("CompletionTime") or 0)
    if code and started and walltime and over - started >= walltime:
        return QueueState.TIMEOUT, "", code
    if text.startswith("CNCLD") or job.get("State") == "Removed":
        return QueueState.CANCELLED, "", code
    state, reason = helpers.ended(code)
    return state, reason, code
