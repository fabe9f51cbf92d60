"""Job of the queueing system: its variables about GPUs, and whether SLURM's commands work."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from hpcdask.queues.environment import how_to_request, job_id, title_and_request
from hpcdask.spec.records import Record

from .report import Finding

if TYPE_CHECKING:
    from .nodes import Node

finding = partial(Finding, "job")
#: Seconds for a command of SLURM.
COMMAND_DEADLINE_S = 8.0
#: Part of an answer where SLURM is installed, and the machine belongs to none.
NO_SLURM = "establish a configuration source"
#: Variables by which the systems tell a job of its GPUs.
GPU_VARIABLES = re.compile(r"(SLURM|PBS|LSB|SGE|FLUX|_CONDOR)_\w*(GPU|GRES|TRES)", re.IGNORECASE)


@dataclass(frozen=True)
class QueueFacts(Record):
    """Job of this process, its variables about GPUs, and SLURM's answer, empty where it is not.

    `request` is how to get a GPU.
    """

    system: str = ""
    job: str | None = None
    request: str = ""
    gpus: dict[str, str] = field(default_factory=dict)
    slurm: str = ""

    @classmethod
    def read(cls) -> QueueFacts:
        """Read the job's variables, and ask SLURM: its controller, but not from all of its jobs."""
        (system, _), job = title_and_request(), job_id()
        gpus = {name: value for name, value in os.environ.items() if GPU_VARIABLES.match(name)}
        slurm = _answer("srun", "--version") if job else _answer("scontrol", "ping")
        return cls(system, job, how_to_request(job), gpus, slurm)


def _answer(*command: str) -> str:
    """Return the end of what a command prints, or why it does not answer; empty without it."""
    if not shutil.which(command[0]):
        return ""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMMAND_DEADLINE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]} does not answer: {error}"
    return "; ".join(f"{done.stdout}{done.stderr}".splitlines())[-200:] or "prints nothing"


def check(known: QueueFacts, node: Node) -> Iterator[Finding]:
    """Yield findings on the job on one node, and on SLURM."""
    if known.job:
        gpus = " ".join(f"{name}={value}" for name, value in sorted(known.gpus.items()))
        value = f"{known.system} {known.job.partition('.r')[0]}"
        yield finding("job", "ok", f"{value}, {gpus or 'no GPUs by its variables'}")
    if known.slurm.startswith("slurm") or " is UP" in known.slurm:
        yield finding("SLURM", "ok", known.slurm)
    elif known.slurm:
        advice = "See scontrol ping, and munge -n | unmunge; tell the site's staff"
        none_here = not known.job and NO_SLURM in known.slurm
        yield finding("SLURM", "note" if none_here else "warning", known.slurm, advice)
