"""Moab, over Torque.

Options: the Moab manual's page of ``msub``, which reads ``#PBS`` lines; states: its pages of
``showq`` (``--xml`` and, for jobs that are over, ``-c``) and "Job States".
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Collection, Iterator, Sequence
from typing import Any, ClassVar

from hpcdask.errors import QueueError
from hpcdask.queues.base import Request
from hpcdask.queues.pbs import PbsQueue

from . import helpers
from .job_state import QueueState, QueueStatus

#: Not those on the time and memory of one job, which do not pass.
LIMITS = re.compile(
    r"number of (\w+ )?jobs|jobs? limit|max\w*job|too many|cannot connect|timed out|unavailable",
    re.I,
)
GONE = re.compile(r"invalid job|cannot locate|not found|unknown|already|completed", re.I)
SELECT = re.compile(r"#PBS -l select=1:ncpus=(\d+)((?::ngpus=\d+)?)(?::mem=(\w+))?")
TAG = re.compile(r"\.hpcdask_([\w-]+)$")
WAITS = ("Idle", "Hold", "UserHold", "SystemHold", "BatchHold", "Deferred", "Blocked", "Staged")
RUNS = ("Running", "Starting", "Suspended", "Migrated", "Staging")
OVER = ("Completed", "Removed", "Vacated")


class MoabQueue(PbsQueue):
    """The door to Moab: PBS's job scripts, Moab's commands, one job at a time.

    ``showq`` shows the names of jobs but no other word of the user, so the tag is in the name.
    """

    title: ClassVar[str] = "Moab"
    programs: ClassVar[tuple[str, ...]] = ("msub", "showq", "canceljob")
    advice: ClassVar[str] = "Queues: showq -l or qstat -Q, accounts and classes: mcredctl -q list"
    # msub -E passes Moab's own id
    job_id: ClassVar[str] = '"${MOAB_JOBID:-${PBS_JOBID%%.*}}"'

    # What the script says

    def script(self, job: Any, request: Request, preamble: Sequence[str], command: str) -> str:
        # dask-jobqueue's default is a form of PBS Professional
        header = "\n".join(_nodes(line) for line in job.job_header.split("\n"))
        moab = helpers.with_header(job, [header])
        moab.job_extra_directives = job.job_extra_directives
        return super().script(moab, request, preamble, command)

    def job_name(self, request: Request) -> str:
        name = helpers.clean_name(request.name, r"\w.+-", "A-Za-z", longest=100)
        return f"{name}.{request.tag.replace(':', '_')}"

    # What is asked of the queue

    async def limit(self) -> int:
        return 1

    async def submit(self, script: str, count: int) -> list[str]:
        if count != 1:
            raise ValueError("Moab takes one job at a time")
        done = await self.run("msub", "-E", script)
        if done.returncode:
            raise helpers.refused(done, script, self.advice, LIMITS)
        lines = done.stdout.split()
        if len(lines) != 1 or not re.fullmatch(r"[\w.-]+", lines[0]):
            raise QueueError(f"msub answered {helpers.words(done)!r} instead of a job's id")
        return lines

    async def query(self, ids: Collection[str]) -> dict[str, QueueStatus]:
        return _pick(ids, await self._show())

    async def departed(self, ids: Collection[str]) -> dict[str, QueueStatus]:
        return _pick(ids, await self._show("-c"))

    async def _show(self, *options: str) -> list[ElementTree.Element]:
        done = await self.run("showq", *options, "--xml")
        if done.returncode:
            raise QueueError(f"showq failed: {helpers.words(done)}")
        try:
            return list(ElementTree.fromstring(done.stdout).iter("job"))
        except ElementTree.ParseError as error:
            raise QueueError(f"the XML of showq is broken: {error}") from None

    async def cancel(self, ids: Collection[str]) -> None:
        done = await self.run("canceljob", *ids)
        if done.returncode and not GONE.search(done.stderr + done.stdout):
            raise QueueError(f"canceljob failed: {helpers.words(done)}")

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
    word = job.get("State", "")
    started = float(job.get("StartTime") or 0) or None
    walltime = float(job.get("ReqAWDuration") or 0)
    ends = started + walltime if started and walltime else None
    state, reason, code = QueueState.STARTING, "", None
    if word in WAITS:
        state, reason = QueueState.PENDING, "" if word == "Idle" else word
        started = ends = None
    elif word in OVER or job.get("CompletionCode") is not None:
        state, reason, code = _end(job, started, walltime)
    elif word not in RUNS:
        state, reason = QueueState.UNKNOWN, word
    elif word == "Suspended":
        reason = "suspended"
    return QueueStatus(name, state, reason, code, 0, started, ends, job.get("MasterHost", ""))


def _end(
    job: ElementTree.Element, started: float | None, walltime: float
) -> tuple[QueueState, str, int | None]:
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
