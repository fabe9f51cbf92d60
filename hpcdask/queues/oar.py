"""OAR.

Options: oarsub(1). ``oarsub -S`` reads ``#OAR`` lines without any quotes and takes no path with
spaces, so the lines are split here like shell words and go onto the command line, as
dask-jobqueue does. States, events and times: oarstat(1), its ``-f -J``, and OAR's ``Stat.pm``.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar

from hpcdask.errors import QueueError, UsageError
from hpcdask.queues.base import Queue, Request
from hpcdask.queues.script import one_line, render

from . import helpers
from .job_state import QueueState, QueueStatus

#: Not those on the time of one job, which do not pass.
LIMITS = re.compile(r"too many|number of (\w+ )?jobs|jobs? limit|cannot connect|connection", re.I)
TAG = "# HPCDASK_TAG="
WAITS = ("Waiting", "Hold", "toLaunch", "toAckReservation")
RUNS = ("Launching", "Running", "Suspended", "Resuming", "Finishing", "toError")
DASK_DEFAULT = re.compile(r"/nodes=1/core=\d+")
GONE = re.compile(r"already|not found|does not exist|no job|unknown", re.I)


class OarQueue(Queue):
    """The door to OAR, which gives each element of an array, and each restart, an id of its own."""

    title: ClassVar[str] = "OAR"
    programs: ClassVar[tuple[str, ...]] = ("oarsub", "oarstat", "oardel")
    advice: ClassVar[str] = "Resources and their properties: oarnodes, queues: oarstat --help"
    job_id: ClassVar[str] = '"$OAR_JOB_ID"'

    # What the script says

    def script(self, job: Any, request: Request, preamble: Sequence[str], command: str) -> str:
        helpers.one_node(request, self.title)
        name = helpers.clean_name(request.name, r"\w .,:;=@+()-", longest=100)
        lines = helpers.quoted_header(
            job, "#OAR", shlex.quote(name), shlex.quote, ("-q", "--project"), "-n"
        )
        if request.gpus:
            lines = _with_gpus(lines, request)
        lines += helpers.renamed(request.name, name, self.title)
        log = one_line(f"{request.folder}/queue-%jobid%.log", "the folder of logs")
        log = "/dev/null" if "'" in log else shlex.quote(log)  # OAR puts it between such quotes
        lines += [f"#OAR -O {log}", f"#OAR -E {log}", f"{TAG}{request.tag}"]
        return render(helpers.with_header(job, lines), [], preamble, command)

    @staticmethod
    def parse_walltime(text: str) -> timedelta:
        units = "smh"[max(0, 2 - text.count(":")) :]  # the first number is of hours
        return helpers.parse_clock(text, units, "HOURS, HOURS:MINUTES, HOURS:MINUTES:SECONDS")

    # What is asked of the queue

    async def limit(self) -> int:
        return 1000  # each is a row of its own in OAR's database

    async def submit(self, script: str, count: int) -> list[str]:
        text = await helpers.read(script)
        options = [
            word
            for line in text.splitlines()
            if line.startswith("#OAR ")
            for word in shlex.split(line.removeprefix("#OAR "))
        ]
        if count > 1:
            options += ["--array", str(count)]
        done = await self.run("oarsub", *options, _command(script, text))
        ids = re.findall(r"^OAR_JOB_ID=(\d+)", done.stdout, re.M)
        if done.returncode or (not ids and "ERROR" in done.stdout + done.stderr):
            raise helpers.refused(done, script, self.advice, LIMITS)
        if len(ids) != count:
            raise QueueError(f"oarsub answered {helpers.words(done)!r} instead of {count} job ids")
        return ids

    async def query(self, ids: Collection[str]) -> dict[str, QueueStatus]:
        arguments = [word for job in ids for word in ("-j", job)]
        found = await self._stat(*arguments)
        return {job: _seen(job, found[job]) for job in ids if job in found}

    async def _stat(self, *arguments: str) -> dict[str, dict[str, Any]]:
        done = await self.run("oarstat", "-f", "-J", *arguments)
        if done.returncode and GONE.search(done.stderr):
            return {}
        try:
            found = json.loads(done.stdout or "{}")
        except ValueError:
            found = None
        if done.returncode or not isinstance(found, dict):
            raise QueueError(f"oarstat failed: {helpers.words(done)}")
        return found

    async def cancel(self, ids: Collection[str]) -> None:
        done = await self.run("oardel", *ids)
        said = (done.stderr + done.stdout).strip()
        if done.returncode and not GONE.search(said):
            raise QueueError(f"oardel failed: {helpers.words(done)}")

    async def tagged(self) -> dict[str, str]:
        jobs = await self._stat("-u", helpers.user())
        return {
            job: tag[1]
            for job, facts in jobs.items()
            if (tag := re.search(r"HPCDASK_TAG=(hpcdask:[\w.-]+)", facts.get("command") or ""))
        }


def _command(script: str, text: str) -> str:
    """What the node runs, through a shell; oarstat shows it, so the tag is in it."""
    tag = re.search(f"^{TAG}(\\S+)", text, re.M)
    interpreter = shlex.split(text.partition("\n")[0].removeprefix("#!"))
    setting = [f"HPCDASK_TAG={tag[1]}"] if tag else []
    return shlex.join(["env", *setting, *interpreter, os.path.abspath(script)])


# GPUs


def _with_gpus(lines: Sequence[str], request: Request) -> list[str]:
    """The header with the GPUs in its resources, unless the user's resources have them.

    GPUs stand below the node, and bring the cores that belong to them: dask-jobqueue's own
    ``/nodes=1/core=8`` becomes ``/nodes=1/gpu=2``. The type is the property ``gpu_model``, or
    another as in ``gpu_type="gpu_mem>=40000"``.
    """
    for number, line in enumerate(lines):
        if line.startswith("#OAR -l "):
            spec = _add(line.removeprefix("#OAR -l "), request)
            return [*lines[:number], f"#OAR -l {shlex.quote(spec)}", *lines[number + 1 :]]
    return [*lines, f"#OAR -l {shlex.quote(_add('/nodes=1', request))}"]


def _add(spec: str, request: Request) -> str:
    resources, comma, walltime = spec.partition(",")
    if "gpu=" in resources or "gpu_device=" in resources:
        return spec
    if DASK_DEFAULT.fullmatch(resources):
        resources = f"/nodes=1/gpu={request.gpus}"
    else:
        host = re.match(r"(.*?/?\b(?:nodes|host|network_address)=\w+)(.*)", resources)
        if not host or "+" in resources:
            raise UsageError(
                f"resource_spec={resources!r}: hpcdask cannot tell where its GPUs belong. Write "
                f"them into resource_spec, such as /nodes=1/gpu=1, and leave gpus_per_job out"
            )
        resources = f"{host[1]}/gpu={request.gpus}{host[2]}"
    if request.gpu_type is not None:
        known = re.search(r"[=<>]", request.gpu_type)
        wanted = request.gpu_type if known else f"gpu_model='{request.gpu_type}'"
        resources = f"{{{wanted}}}{resources}"
    return f"{resources}{comma}{walltime}"


# What oarstat says


def _seen(job: str, facts: Mapping[str, Any]) -> QueueStatus:
    """One job of ``oarstat -f -J``."""
    word = facts.get("state", "")
    started = float(facts.get("startTime") or 0) or None
    walltime = float(facts.get("walltime") or 0)
    ends = started + walltime if started and walltime else None
    nodes = "+".join(dict.fromkeys(facts.get("assigned_network_address") or ()))
    state, reason, code = QueueState.STARTING, "", None
    if word in WAITS:
        state = QueueState.PENDING
        reason = str(facts.get("message") or "") if word == "Waiting" else word
        started = ends = None
    elif word in ("Terminated", "Error"):
        state, reason, code = _end(facts, word)
    elif word not in RUNS:
        state, reason = QueueState.UNKNOWN, word
    elif word == "Suspended":
        reason = "suspended"
    return QueueStatus(job, state, reason, code, 0, started, ends, nodes)


def _end(facts: Mapping[str, Any], word: str) -> tuple[QueueState, str, int | None]:
    status = facts.get("exit_code")  # as of wait(2)
    code = None
    if status not in (None, ""):
        code = 128 + (int(status) & 127) if int(status) & 127 else int(status) >> 8
    events = {event.get("type") for event in facts.get("events") or ()}
    message = str(facts.get("message") or "")
    for event, state in (
        ("WALLTIME", QueueState.TIMEOUT),
        ("BESTEFFORT_KILL", QueueState.PREEMPTED),
        ("FRAG_JOB_REQUEST", QueueState.CANCELLED),
    ):
        if event in events:
            return state, message, code
    state, reason = helpers.ended(code)
    if word == "Error" and state is QueueState.COMPLETED:
        state = QueueState.FAILED
    return state, reason or (message if word == "Error" else ""), code
