"""Refusals and failures of SLURM's commands, and what to do about them."""

from __future__ import annotations

import re
import subprocess

from hpcdask.errors import NoAnswer, QueueError, Refused

#: Limits on what there may be at a time; other limits, such as a time limit, do not pass.
LIMITS = re.compile(
    r"SubmitJob|MaxSubmit|MaxJobCount|temporarily unable to accept|Resource temporarily unavail"
    r"|Unable to contact slurm controller|Invalid job array specification"
    r"|Munge \w+ failed|munged is up|authentication error|partition not available",
    re.I,
)
#: Those for which fewer jobs are as many: the controller, munge, a partition that is down.
TOO_BUSY = re.compile(
    r"temporarily unable|temporarily unavail|Unable to contact"
    r"|Munge \w+ failed|munged is up|authentication error|partition not available",
    re.I,
)
#: Said of all limits alike; older versions say no more.
SOME_LIMIT = re.compile(r"job submit limit", re.I)
NAMED_LIMIT = re.compile(r"\b(QOS|Assoc)\w*(Limit|Violation|Max\w+)|\bPart\w+Limit")
#: SLURM may have taken the job and its answer was lost: what sbatch decodes is an answer.
LOST_ANSWER = re.compile(
    r"timed out|Zero Bytes|Connection reset|Communication|Munge decode failed", re.I
)
OVER_ALREADY = re.compile(r"Invalid job id specified|already complet", re.I)

#: Reasons of jobs that wait for more than free nodes, such as another limit, or to be released.
LASTING = re.compile(
    r"(Partition|QOS|Assoc|Account|Invalid|BadConstraints|JobHeld|ReservationDeleted)"
    r"|(Max\w+Per|DependencyNeverSatisfied|ReqNodeNotAvail|Nodes required for job are DOWN)"
)
#: What a refusal or a reason is about, and what lists the valid ones.
ADVICE = (
    (r"invalid partition", "Partitions: sinfo -s"),  # whose name may be that of an account
    (r"accounting/QOS policy|invalid qos|QOS\w*Limit", "Limits: sacctmgr show qos"),
    (r"^Assoc", "Limits: sacctmgr show assoc user=$USER"),
    (r"JobHeld", "Release them: scontrol release JOB"),
    (r"NotAvail|DRAINED", "Nodes: sinfo -R"),
    (r"PartitionConfig|PartitionNodeLimit", 'What partitions have: sinfo -o "%P %D %c %m %G %l"'),
    (r"account", "Accounts: sacctmgr show assoc user=$USER format=account,partition,qos"),
    (r"time.?limit|--time", 'Time limits: sinfo -o "%P %l"'),
    (r"feature|constraint", 'Features: sinfo -o "%P %f"'),
    (r"reservation", "Reservations: scontrol show reservation"),
    (r"node name", "Nodes: sinfo -N"),
    (r"gres|generic resource|node config|gpu|tres", 'GPUs, cores, memory: sinfo -o "%P %G %c %m"'),
    (r"partition", "Partitions: sinfo -s"),
)


def refused(done: subprocess.CompletedProcess[str], script: str) -> QueueError:
    """Return the error of a submission that failed; `done` is sbatch."""
    text = words(done)
    if LOST_ANSWER.search(text):
        return NoAnswer(
            f"sbatch got no answer for {script}: {text}. See with squeue whether the job is there"
        )
    limit = LIMITS.search(text) or (SOME_LIMIT.search(text) and not NAMED_LIMIT.search(text))
    advice = _advice(text)
    return Refused(
        f"sbatch refused the job: {text}. Script kept at {script}{advice and f'. {advice}'}",
        for_now=bool(limit),
        fewer=bool(limit) and not TOO_BUSY.search(text),
    )


def lasting(reason: str) -> str | None:
    """Return advice on jobs that wait for this reason; None where that ends by itself."""
    return _advice(reason) if LASTING.match(reason) else None


def _advice(text: str) -> str:
    return next((how for about, how in ADVICE if re.search(about, text, re.I)), "")


def failed(done: subprocess.CompletedProcess[str]) -> QueueError:
    """Return the error of any other command that failed."""
    text = words(done)
    passes = LOST_ANSWER.search(text) or TOO_BUSY.search(text)
    kind = NoAnswer if passes else QueueError
    return kind(f"{done.args[0]} failed: {text}. See whether it works in a terminal")


def words(done: subprocess.CompletedProcess[str]) -> str:
    """Return what a command said in one line, without what SLURM puts before each of its lines."""
    said = done.stderr.strip() or done.stdout.strip()
    bare = re.sub(r"(?m)^\w+: (error: )?|Batch job submission failed: ", "", said)
    lines = dict.fromkeys(line.strip().rstrip(".") for line in bare.splitlines() if line.strip())
    return "; ".join(lines)[:500] or f"exit code {done.returncode}"
