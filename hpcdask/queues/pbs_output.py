"""Reads the answers of PBS's ``qstat -f``.

Attributes: qstat(1B), pbs_job_attributes(7B). Exit codes and substates: PBS Professional User's
Guide, "Job Exit Status", and OpenPBS's ``job.h``. Times are local.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping

from . import helpers
from .job_state import QueueState, QueueStatus

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
    """Return the attributes of each job that ``qstat -f`` printed, by its id.

    Attributes stand behind four spaces, and long ones go on behind a tab.
    """
    blocks = re.split(r"^Job Id:\s*(\S+)\n", text.replace("\n\t", ""), flags=re.M)[1:]
    return {
        job: dict(re.findall(r"^    ([\w.]+) = (.*)", block, re.M))
        for job, block in zip(blocks[::2], blocks[1::2], strict=True)
    }


def read_job(job: str, facts: Mapping[str, str], torque: bool) -> QueueStatus:
    """Return one job of ``qstat -f``."""
    started = helpers.unix_time(facts.get("start_time" if torque else "stime"), TIME)
    walltime = _seconds(facts.get("Resource_List.walltime"))
    hosts = re.findall(r"(?:^|\+)([^/+]+)/", facts.get("exec_host", ""))
    return helpers.fold(
        job,
        facts.get("job_state", ""),
        STATES,
        lambda: _end(facts, walltime),
        waits=facts.get("comment", ""),
        again=int(facts.get("run_count", 0)),
        started=started,
        walltime=walltime,
        nodes="+".join(dict.fromkeys(hosts)),
    )


def _end(facts: Mapping[str, str], limit: float | None) -> helpers.End:
    """Return how a job ended: state, reason and exit code."""
    text = facts.get("Exit_status", facts.get("exit_status"))
    code = int(text) if text and re.fullmatch(r"-?\d+", text) else None
    if code is not None and code >= 256:  # 256 + n after signal n
        code -= 128
    used = _seconds(facts.get("resources_used.walltime"))
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
    """Return the seconds of ``HOURS:MINUTES:SECONDS``."""
    if not clock or not re.fullmatch(r"\d+(:\d+)*", clock):
        return None
    seconds = 0
    for number in clock.split(":"):
        seconds = 60 * seconds + int(number)
    return seconds
