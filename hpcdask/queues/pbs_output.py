"""Reads the answers of PBS's ``qstat -f``.

Attributes: qstat(1B), pbs_job_attributes(7B). Exit codes and substates: PBS Professional User's
Guide, "Job Exit Status", and OpenPBS's ``job.h``. Times are local.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from typing import Literal

from . import helpers
from .job_state import QueueState, QueueStatus

#: Whose qstat it is: SLURM has a wrapper of that name.
Flavour = Literal["pbs", "torque", "slurm"]

TIME = "%a %b %d %H:%M:%S %Y"
KILLED_BY_WALLTIME = -29  # JOB_EXEC_KILL_WALLTIME
SUBSTATE_TERMINATED = "91"
STATES = {
    "Q": (QueueState.PENDING, ""),
    "H": (QueueState.PENDING, "held"),
    "W": (QueueState.PENDING, "waits for its time"),
    "T": (QueueState.PENDING, "moves"),
    "M": (QueueState.PENDING, "moved"),
    **dict.fromkeys("REB", (QueueState.RUNNING, "")),
    **dict.fromkeys("SU", (QueueState.RUNNING, "suspended")),
    **dict.fromkeys("CFX", (QueueState.COMPLETED, "")),
}


def parse_qstat(text: str) -> dict[str, dict[str, str]]:
    """Read the answer of ``qstat -f``: the attributes of each job, by its id.

    Attributes stand behind four spaces and long ones go on behind a tab; SLURM's wrapper puts
    the attributes themselves behind a tab.
    """
    jobs: dict[str, dict[str, str]] = {}
    facts: dict[str, str] = {}
    last, spaces = "", False
    for line in text.splitlines():
        if found := re.match(r"Job Id:\s*(\S+)", line):
            facts = jobs.setdefault(found[1], {})
            last, spaces = "", False
            continue
        found = re.match(r"(    |\t)([A-Za-z][\w.]*) = (.*)", line)
        if found and not (spaces and found[1] == "\t"):
            last, spaces = found[2], found[1] != "\t"
            facts[last] = found[3]
        elif last and line.startswith("\t"):
            facts[last] += line[1:]
    return jobs


def seen(job: str, facts: Mapping[str, str], flavour: Flavour) -> QueueStatus:
    """One job of ``qstat -f``."""
    name = {"pbs": "stime", "torque": "start_time", "slurm": "mtime"}[flavour]
    started = helpers.unix_time(facts.get(name), TIME)
    walltime = _seconds(facts.get("Resource_List.walltime"))
    hosts = re.findall(r"(?:^|\+)([^/+]+)/", facts.get("exec_host", ""))
    return helpers.fold(
        job,
        facts.get("job_state", ""),
        STATES,
        lambda: _end(facts, started, walltime, flavour),
        waits=facts.get("comment", ""),
        again=int(facts.get("run_count", 0)),
        started=started,
        walltime=walltime,
        nodes="+".join(dict.fromkeys(hosts)),
    )


def _end(
    facts: Mapping[str, str], started: float | None, limit: float | None, flavour: Flavour
) -> helpers.End:
    """How a job ended: state, reason and exit code."""
    text = facts.get("Exit_status", facts.get("exit_status"))
    code = int(text) if text and re.fullmatch(r"-?\d+", text) else None
    if code is not None and code >= 256:  # 256 + n after signal n
        code -= 128
    used = _seconds(facts.get("resources_used.walltime"))
    if flavour == "slurm":
        over = helpers.unix_time(facts.get("ctime"), TIME)
        if over and started and limit and over >= started + limit:
            return QueueState.TIMEOUT, "", None
        return QueueState.COMPLETED, "ended, and its exit code is not shown", None
    comment = facts.get("comment", "")
    if code == KILLED_BY_WALLTIME or (code and code > 128 and used and limit and used >= limit):
        return QueueState.TIMEOUT, comment, code
    # Nothing but qdel ends a job by SIGTERM
    if facts.get("substate") == SUBSTATE_TERMINATED or code == 128 + signal.SIGTERM:
        return QueueState.CANCELLED, comment, code
    if code is not None and code < 0:
        return QueueState.FAILED, comment or "PBS could not start it", code
    state, reason = helpers.ended(code)
    return state, reason or comment, code


def _seconds(clock: str | None) -> float | None:
    """Seconds of ``HOURS:MINUTES:SECONDS``."""
    if not clock or not re.fullmatch(r"[\d:]+", clock):
        return None
    seconds = 0.0
    for number in clock.split(":"):
        seconds = 60 * seconds + int(number or 0)
    return seconds
