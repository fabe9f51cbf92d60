"""Readers of the output of ``squeue`` and ``sacct``, into `QueueStatus`.

States: "JOB STATE CODES" of squeue(1) and sacct(1).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from hpcdask.errors import QueueError

from . import helpers
from .job_state import OVER, QueueState, QueueStatus

#: After each column of squeue; the last one may contain it.
DELIMITER = ";"
#: Columns of squeue that `parse_squeue` reads. A reason is free text.
COLUMNS = ("JobArrayID", "State", "RestartCnt", "exit_code", "StartTime", "EndTime", "NodeList")
LAST_COLUMN = "Reason"
#: Columns of sacct that `parse_sacct` reads.
SACCT_COLUMNS = ("JobID", "ExitCode", "Start", "NodeList", "State")
#: Makes the commands print unix times, and the elements of an array whole.
ENVIRONMENT = {"SLURM_TIME_FORMAT": "%s", "SLURM_BITSTR_LEN": "0"}

STATES = {
    "PENDING": QueueState.PENDING,
    "RESV_DEL_HOLD": QueueState.PENDING,  # held, as its reservation is gone
    "REQUEUED": QueueState.REQUEUED,
    "REQUEUE_FED": QueueState.REQUEUED,
    "REQUEUE_HOLD": QueueState.REQUEUED,
    "SPECIAL_EXIT": QueueState.REQUEUED,
    "CONFIGURING": QueueState.PENDING,  # its nodes boot
    "POWER_UP_NODE": QueueState.PENDING,
    "COMPLETING": QueueState.RUNNING,  # still on its nodes
    "EXPEDITING": QueueState.RUNNING,
    "RESIZING": QueueState.RUNNING,
    "RUNNING": QueueState.RUNNING,
    "SIGNALING": QueueState.RUNNING,
    "STAGE_OUT": QueueState.RUNNING,
    "STOPPED": QueueState.RUNNING,
    "SUSPENDED": QueueState.RUNNING,
    "BOOT_FAIL": QueueState.FAILED,
    "CANCELLED": QueueState.CANCELLED,
    "COMPLETED": QueueState.COMPLETED,
    "DEADLINE": QueueState.TIMEOUT,
    "FAILED": QueueState.FAILED,
    "LAUNCH_FAILED": QueueState.FAILED,
    "NODE_FAIL": QueueState.FAILED,
    "OUT_OF_MEMORY": QueueState.FAILED,
    "PREEMPTED": QueueState.PREEMPTED,
    "RECONFIG_FAIL": QueueState.FAILED,
    "REVOKED": QueueState.CANCELLED,
    "TIMEOUT": QueueState.TIMEOUT,
}
#: States that `QueueState` says as well, so that the reason need not.
PLAIN = {"PENDING", "RUNNING", "REQUEUED", "COMPLETED", "FAILED", "CANCELLED", "PREEMPTED"}
#: Ends that are not the job's doing: the code is SLURM's own.
NOT_BY_ITSELF = {"BOOT_FAIL", "DEADLINE", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT"}
NO_REASON = {"", "None", "(null)"}
#: Seconds by which the controller's clock may be ahead of ours all the same.
SKEW_S = 30.0


def columns(*names: str) -> str:
    """Return the value of squeue's ``--Format``."""
    return ",".join(f"{name}:{DELIMITER}" for name in names)


def rows(text: str, count: int) -> Iterator[list[str]]:
    """Yield the `count` columns of each job and element that squeue printed.

    Raises QueueError if it printed lines, and none has this form.
    """
    lines = [line for line in text.splitlines() if line and not line.startswith("CLUSTER:")]
    if lines and not any(re.match(r"\d+[_+;]", line) for line in lines):
        raise QueueError(f"squeue answered {lines[0][:200]!r}, which is not what was asked for")
    for line in lines:
        row = line.split(DELIMITER, count - 1)
        if len(row) == count:  # else the rest of a comment with a line end
            for job_id in expand(row[0]):
                yield [job_id, *row[1:-1], row[-1].removesuffix(DELIMITER)]


def expand(job: str) -> list[str]:
    """Return the ids of an array's waiting elements from ``12_[0-8:2,11%5]``.

    ``squeue --array`` leaves some out: SLURM 22.05 shows ``12_[0-398:2]`` without its last element.
    Raises QueueError if it is not shown whole.
    """
    array, bracket, elements = job.partition("_[")
    if not bracket:
        return [job] if re.fullmatch(r"\d+(_\d+)?", job) else []  # not ours: 12+0
    part = r"(\d+)(?:-(\d+))?(?::(\d+))?"
    if not re.fullmatch(rf"{part}(,{part})*(%\d+)?\]", elements):
        raise QueueError(f"squeue shortened {job[:200]!r}, so that some jobs are not known")
    return [f"{array}_{index}" for index in helpers.elements(elements.partition("%")[0])]


def parse_squeue(text: str, now: float) -> dict[str, QueueStatus]:
    """Read the jobs that squeue printed with `COLUMNS` and `LAST_COLUMN`.

    A state that is not known here is `QueueState.UNKNOWN`.
    """
    seen = {}
    for row in rows(text, len(COLUMNS) + 1):
        job, word, restarts, status, started, ends, nodes, reason = row
        state = STATES.get(word, QueueState.UNKNOWN)
        start, end = _time(started), _time(ends)
        if word == "COMPLETING" and (end is None or end > now + SKEW_S):
            state = QueueState.REQUEUED  # its end is that of its next life
        if state is QueueState.PENDING and int(restarts):
            state = QueueState.REQUEUED
        running = state is QueueState.RUNNING
        seen[job] = QueueStatus(
            job,
            state,
            reason=_reason(word, reason),
            exit_code=_code(word, status),
            restarts=int(restarts),
            started=start if running or state in OVER else None,
            # what completes has no walltime left to hand over before
            ends=end if running and word != "COMPLETING" else None,
            nodes=nodes if nodes not in NO_REASON else "",
        )
    return seen


def parse_sacct(text: str) -> dict[str, QueueStatus]:
    """Read the jobs that are over of what sacct printed with `SACCT_COLUMNS`.

    A site's greetings may stand before them.
    """
    seen = {}
    for line in text.splitlines():
        row = line.split("|", len(SACCT_COLUMNS) - 1)
        if len(row) < len(SACCT_COLUMNS):
            continue
        job, status, started, nodes, words = row
        word, _, by = words.partition(" by ")  # CANCELLED by 1000
        if (state := STATES.get(word)) in OVER:
            for job_id in expand(job):
                seen[job_id] = QueueStatus(
                    job_id,
                    state,
                    reason=_reason(word, f"by user {by}" if by else ""),
                    exit_code=_code(word, status),
                    started=_time(started),
                    nodes="" if nodes.startswith("None") else nodes,
                )
    return seen


def left(ids: Collection[str], shown: Collection[str]) -> dict[str, QueueStatus]:
    """Return elements that are over because their array is shown without them.

    An element that is cancelled while it waits leaves the array without a record of its own, in the
    controller and in accounting.
    """
    arrays = {job_id.partition("_")[0] for job_id in shown}
    return {
        job_id: QueueStatus(job_id, QueueState.CANCELLED, "before it started")
        for job_id in ids
        if "_" in job_id and job_id not in shown and job_id.partition("_")[0] in arrays
    }


def _reason(word: str, reason: str) -> str:
    known = [] if reason in NO_REASON else [reason]
    return ": ".join(known if word in PLAIN else [word, *known])


def _code(word: str, status: str) -> int | None:
    """Return the exit code of ``code:signal``, or of the status of wait(2) from squeue."""
    if STATES.get(word) not in OVER or word in NOT_BY_ITSELF:
        return None
    code, colon, signal = status.partition(":")
    exited, signalled = int(code), int(signal or 0)
    if not colon:
        exited, signalled = exited >> 8, exited & 0x7F
    if signalled:
        return 128 + signalled
    # 0 stands for unknown as well
    return exited if exited or word == "COMPLETED" else None


def _time(text: str) -> float | None:
    return float(text) if text.isdecimal() else None
