"""OAR.

Options: oarsub(1). ``oarsub -S`` reads ``#OAR`` lines without any quotes and takes no path with
spaces, so the lines are split here like shell words and go onto the command line, as
dask-jobqueue does. States, events and times: oarstat(1), its ``-f -J``, and OAR's ``Stat.pm``.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

from hpcdask.errors import QueueError, UsageError

from . import helpers
from .base import Allocation, Queue, Request
from .job_state import JobState, QueueStatus

TAG = "# HPCDASK_TAG="
RUNS = ("Launching", "Running", "Resuming", "Finishing", "toError")
STATES = {
    "Waiting": (JobState.PENDING, ""),
    **{word: (JobState.PENDING, word) for word in ("Hold", "toLaunch", "toAckReservation")},
    **dict.fromkeys(RUNS, (JobState.RUNNING, "")),
    "Suspended": (JobState.RUNNING, "suspended"),
    "Terminated": (JobState.COMPLETED, ""),
    "Error": (JobState.FAILED, ""),
}
ENDS = {
    "WALLTIME": JobState.TIMEOUT,
    "BESTEFFORT_KILL": JobState.PREEMPTED,
    "FRAG_JOB_REQUEST": JobState.CANCELLED,
}
#: Paths of output that oarsub takes.
NAMEABLE = re.compile(r"[\w./%\\ -]+", re.ASCII)
DASK_DEFAULT = re.compile(r"/nodes=1/core=\d+")


class OarQueue(Queue):
    """OAR, which gives each element of an array, and each restart, an id of its own."""

    title = "OAR"
    jobqueue = ("oar", "OARJob")
    programs = ("oarsub", "oarstat", "oardel")
    advice = "Resources and their properties: oarnodes, queues: oarstat --help"
    # Not those on the time of one job, which do not pass
    limits = re.compile(
        r"too many|number of (\w+ )?jobs|jobs? limit|cannot connect|connection", re.I
    )
    gone = re.compile(
        "already|not found|does not exist|no job|unknown|^Deleting|will be deleted", re.I
    )
    array_limit = ("", "", 1000)  # each is a row of its own in OAR's database
    job_id = '"$OAR_JOB_ID"'
    prefix = "#OAR"
    name_option = "-n"
    quoted_options = "-q --project"
    name_form = (r"\w .,:;=@+()-", "", 100)
    gpu_example = "oarsub -l gpu=1"
    gpu_options = ("-l", "--resource")
    # Behind gpu= a number, or ALL or BEST
    gpu_pattern = re.compile(r"(?:^|[/}+])gpu=(\d*)", re.I)
    walltime_forms = "HOURS, HOURS:MINUTES, HOURS:MINUTES:SECONDS"
    nodes_variable = "OAR_NODEFILE"
    mpirun_setup = (
        "export OMPI_MCA_plm_rsh_agent=oarsh PRTE_MCA_plm_ssh_agent=oarsh HYDRA_LAUNCHER_EXEC=oarsh"
    )
    mpirun_option = '--hostfile "$OAR_NODEFILE"'

    # What the script says

    def with_gpus(self, lines: list[str], request: Request) -> list[str]:
        """Add the GPUs to the header's resources, unless the user's resources have them.

        GPUs stand below the node, and bring the cores that belong to them: dask-jobqueue's own
        ``/nodes=1/core=8`` becomes ``/nodes=1/gpu=2``. The type is the property ``gpu_model``, or
        another as in ``gpu_type="gpu_mem>=40000"``.
        """
        for number, line in enumerate(lines):
            if line.startswith("#OAR -l "):
                spec = _add(line.removeprefix("#OAR -l "), request)
                return [*lines[:number], f"#OAR -l {shlex.quote(spec)}", *lines[number + 1 :]]
        return [*lines, f"#OAR -l {shlex.quote(_add('/nodes=1', request))}"]

    def with_directives(self, lines: list[str], job: Any, request: Request) -> list[str]:
        log = f"{request.folder}/queue-%jobid%.log"
        log = shlex.quote(log) if NAMEABLE.fullmatch(log) else "/dev/null"
        return [*lines, f"#OAR -O {log}", f"#OAR -E {log}", f"{TAG}{request.tag}"]

    @classmethod
    def parse_walltime(cls, text: str) -> timedelta:
        units = "smh"[max(0, 2 - text.count(":")) :]  # the first number is of hours
        return helpers.parse_clock(text, units, cls.walltime_forms)

    async def allocation(
        self, asked: Allocation, directives: list[str], site: Mapping[str, Any]
    ) -> dict[str, Any]:
        keywords = await super().allocation(asked, directives, site)
        if asked.cpus_per_gpu and asked.gpus_per_node:
            raise UsageError("--cpus-per-gpu: OAR's GPUs bring their cores. Leave it out")
        if asked.memory is None:
            keywords["memory_per_core_property_name"] = "not_applicable"
        elif not site.get("memory-per-core-property-name"):
            raise UsageError(
                "--mem: in OAR memory is a property of the site. Set "
                "jobqueue.oar.memory-per-core-property-name in Dask's configuration (oarnodes "
                "lists the properties), or leave --mem out"
            )
        if any(re.match(r"-l\b", line) for line in asked.directives):
            keywords["job_directives_skip"] = ["#OAR -l /nodes="]
        cores = "" if asked.gpus_per_node else f"/core={asked.cores}"
        return {**keywords, "resource_spec": f"/nodes={asked.nodes}{cores}"}

    # What is asked of the queue

    async def submit(self, script: str, count: int) -> list[str]:
        text = await helpers.read(script)
        options = shlex.split("\n".join(re.findall("^#OAR (.*)", text, re.M)))
        if count > 1:
            options += ["--array", str(count)]
        done = await self.run("oarsub", *options, _command(script, text))
        ids = re.findall(r"^OAR_JOB_ID=(\d+)", done.stdout, re.M)
        if done.returncode or (not ids and "ERROR" in done.stdout + done.stderr):
            raise self.refused(done, script)
        if len(ids) != count:
            raise QueueError(f"oarsub answered {self.words(done)!r} instead of {count} job ids")
        return ids

    async def query(self, ids: Collection[str]) -> dict[str, QueueStatus]:
        arguments = [word for job in ids for word in ("-j", job)]
        found = helpers.pick(ids, await self._stat(*arguments))
        return {job: _read_job(job, facts) for job, facts in found.items()}

    async def _stat(self, *arguments: str) -> dict[str, dict[str, Any]]:
        done = await self.run("oarstat", "-f", "-J", *arguments)
        if done.returncode and self.gone.search(done.stderr):
            return {}
        return self.read_json(done, dict)

    async def tagged(self) -> dict[str, str]:
        jobs = await self._stat("-u", helpers.user())
        return {
            job: tag[1]
            for job, facts in jobs.items()
            if (tag := re.search(r"HPCDASK_TAG=(hpcdask:[\w.-]+)", facts.get("command") or ""))
        }


def _command(script: str, text: str) -> str:
    """Return the command that the node runs; oarstat shows it, so it holds the tag."""
    tags = [f"HPCDASK_TAG={tag}" for tag in re.findall(f"^{TAG}(\\S+)", text, re.M)]
    interpreter = shlex.split(text.partition("\n")[0].removeprefix("#!"))
    return shlex.join(["env", *tags, *interpreter, os.path.abspath(script)])


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


def _read_job(job: str, facts: Mapping[str, Any]) -> QueueStatus:
    """Return one job of ``oarstat -f -J``; if OAR could not start it, it made copies."""
    events = facts.get("events") or ()
    told = [e["description"] for e in events if e.get("type") == "RESUBMIT_JOB_AUTOMATICALLY"]
    seen = helpers.fold(
        job,
        word := facts.get("state", ""),
        STATES,
        lambda: _end(facts, word),
        waits=str(facts.get("message") or "") if word == "Waiting" else "",
        started=float(facts.get("startTime") or 0) or None,
        walltime=float(facts.get("walltime") or 0),
        nodes="+".join(dict.fromkeys(facts.get("assigned_network_address") or ())),
    )
    return replace(seen, copies=tuple(re.findall(r"=> (\d+)", " ".join(told))))


def _end(facts: Mapping[str, Any], word: str) -> helpers.End:
    status, failed = facts.get("exit_code"), word == "Error"
    code = None
    if status not in (None, ""):  # as of wait(2)
        code = 128 + (int(status) & 127) if int(status) & 127 else int(status) >> 8
    message = str(facts.get("message") or "")
    events = {event.get("type") for event in facts.get("events") or ()}
    if known := next((ENDS[event] for event in ENDS if event in events), None):
        return known, message, code
    state, reason = helpers.ended(code, failed=failed)
    return state, reason or (message if failed else ""), code
