"""Flux.

Options: flux-batch(1), the directives of RFC 36, templates such as ``{{id.dec}}``; states, fields:
flux-jobs(1), its ``--json``; exceptions: RFC 21; ids: RFC 19; variables: flux-environment(7).
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection, Mapping
from datetime import timedelta
from typing import Any

from hpcdask.errors import UsageError

from . import helpers
from .base import Allocation, Queue, Request
from .job_state import QueueState, QueueStatus
from .script import double_quoted, one_line

STATES = {
    **dict.fromkeys(("DEPEND", "PRIORITY", "SCHED"), (QueueState.PENDING, "")),
    **dict.fromkeys(("RUN", "CLEANUP"), (QueueState.RUNNING, "")),
    "INACTIVE": (QueueState.COMPLETED, ""),
}
RESULTS = {"CANCELED": QueueState.CANCELLED, "TIMEOUT": QueueState.TIMEOUT}
#: Of Flux's own durations.
UNITS = {
    "s": timedelta(seconds=1),
    "m": timedelta(minutes=1),
    "h": timedelta(hours=1),
    "d": timedelta(days=1),
}
#: Digits of ids, behind a letter f with or without a hook.
BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"


class FluxQueue(Queue):
    """The door to Flux, whose jobs are instances of Flux themselves, in which ``flux run`` works.

    Ids are decimal numbers here, which all commands take and which files can be named after. Flux
    has no attribute of a job that a list shows and no site checks, so the tag ends the job's name.
    """

    title = "Flux"
    jobqueue = ("flux", "FluxJob")
    programs = ("flux",)
    advice = "Queues: flux queue list, resources: flux resource list"
    limits = re.compile(
        r"max jobs limit|limit exceeded|temporarily|timed out|submission .*disabled", re.I
    )
    canceller = "flux cancel"
    gone = re.compile(r"job is inactive|\bunknown( job id)?$|unknown job", re.M)
    job_id = '"$(flux job id "$FLUX_ENCLOSING_ID")"'
    prefix = "#flux:"
    name_option = "--job-name"
    quoted_options = "--queue --bank"
    gpu_example = "#flux: --gpus-per-slot=1"
    gpu_options = ("-g", "--gpus-per-slot", "--gpus-per-task", "--gpus-per-node")
    gpu_pattern = re.compile(r"^(\d+)$")
    walltime_forms = "MINUTES:SECONDS, HOURS:MINUTES:SECONDS, 30m, 2h, 1d"
    launchers = ("flux", "mpirun")

    # What the script says

    def job_name(self, request: Request) -> str:
        return f"{one_line(request.name, 'the job name')}:{request.tag}"

    def name_directive(self, name: str) -> str:
        return f"{self.name_option}={self.quote(name)}"

    def quote(self, value: str) -> str:
        """Its reader takes the quotes of a shell, but three that touch for a block's begin."""
        return value if value == shlex.quote(value) else double_quoted(value, self.prefix)

    def with_directives(self, lines: list[str], job: Any, request: Request) -> list[str]:
        if request.gpu_type is not None:
            lines = [*lines, f"#flux: --requires={self.quote(request.gpu_type)}"]
        if request.gpus:
            lines = [*lines, f"#flux: --gpus-per-slot={request.gpus}"]
        log = f"{one_line(request.folder, 'the folder of logs')}/queue-{{{{id.dec}}}}.log"
        return [*lines, f"#flux: --output={self.quote(log)}"]

    @classmethod
    def parse_walltime(cls, text: str) -> timedelta:
        """Flux takes a number without a unit as minutes, others as seconds: it is refused."""
        if found := re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text):
            return float(found[1]) * UNITS[found[2]]
        return super().parse_walltime(text if ":" in text else "")

    async def allocation(
        self, asked: Allocation, directives: list[str], site: Mapping[str, Any]
    ) -> dict[str, Any]:
        if asked.memory is not None:
            raise UsageError("--mem: Flux gives no memory by itself. Leave it out")
        # A slot is a node's share of the job
        shape = [f"--nodes={asked.nodes}", f"--nslots={asked.nodes}"]
        shape.append(f"--cores-per-slot={asked.cores}")
        return {
            "job_directives_skip": ["--nodes=", "--nslots=", "--cores-per-slot="],
            "job_extra_directives": [*shape, *directives],
        }

    # What is asked of the queue

    async def submit(self, script: str, count: int) -> list[str]:
        # The hook of the letter is not for every locale
        form = r"^\u0192?f?([1-9A-HJ-NP-Za-km-z]+)$"
        env = {"FLUX_F58_FORCE_ASCII": "1"}
        found = await self.take(script, form, "flux", "batch", script, env=env)
        return [str(_decimal(found[0]))]

    async def query(self, ids: Collection[str]) -> dict[str, QueueStatus]:
        jobs = map(_seen, await self._list(*ids))
        return helpers.pick(ids, {job.id: job for job in jobs})

    async def _list(self, *arguments: str) -> list[dict[str, Any]]:
        """Facts of jobs; of those that are unknown it says so, and fails if they are all."""
        done = await self.run("flux", "jobs", "--json", *arguments)
        if not done.stdout.strip() and self.gone.search(done.stderr):
            return []
        try:
            found = json.loads(done.stdout)
        except ValueError:
            raise self.failed(done) from None
        jobs: list[dict[str, Any]] = found.get("jobs", [found])
        return jobs

    async def tagged(self) -> dict[str, str]:
        jobs = await self._list("--count=0")
        found = ((job, re.search(r":(hpcdask:[\w.-]+)$", job.get("name", ""))) for job in jobs)
        return {str(job["id"]): tag[1] for job, tag in found if tag}


def _decimal(text: str) -> int:
    """An id in base 58 as a number."""
    number = 0
    for digit in text[1:]:
        number = number * 58 + BASE58.index(digit)
    return number


# What flux jobs says


def _seen(facts: Mapping[str, Any]) -> QueueStatus:
    """One job of ``flux jobs --json``; what is not known yet is left out there."""
    started, expires = facts.get("t_run"), facts.get("expiration")
    reason = facts.get("annotations", {}).get("sched", {}).get("reason_pending", "")
    return helpers.fold(
        str(facts["id"]),
        facts.get("state", ""),
        STATES,
        lambda: _end(facts),
        waits="held (urgency 0)" if facts.get("urgency") == 0 else reason,
        started=started,
        walltime=expires - started if started and expires else None,
        nodes=facts.get("nodelist", ""),
    )


def _end(facts: Mapping[str, Any]) -> helpers.End:
    result, code = facts.get("result", ""), facts.get("returncode")
    exception = facts.get("exception") or {}
    why = exception.get("note") or exception.get("type") or ""
    if code is not None and code < 0:  # by a signal, or by an exception before it ran
        waited = facts.get("waitstatus")
        code = 128 + (waited & 127) if waited is not None and waited & 127 else None
    state, reason = helpers.ended(code)
    if state is QueueState.COMPLETED and result != "COMPLETED":
        state = QueueState.FAILED
    return RESULTS.get(result, state), why or reason, code
