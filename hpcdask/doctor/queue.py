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
#: Variables by which the systems tell a job of its GPUs.
GPU_VARIABLES = re.compile(r"(SLURM|PBS|LSB|SGE|FLUX|_CONDOR)_\w*(GPU|GRES|TRES)", re.IGNORECASE)


@dataclass(frozen=True)
class QueueFacts(Record):
    """Job of this process, its variables about GPUs, and the output of SLURM's commands.

    `request` is how to get a GPU.
    """

    system: str = ""
    job: str | None = None
    request: str = ""
    gpus: dict[str, str] = field(default_factory=dict)
    srun: str = ""
    controller: str = ""

    @classmethod
    def read(cls) -> QueueFacts:
        """Read the job's variables, and ask SLURM where there is an ``srun``."""
        (system, _), job = title_and_request(), job_id()
        gpus = {name: value for name, value in os.environ.items() if GPU_VARIABLES.match(name)}
        # the last line is an effect of those before
        srun = _output("srun", "--version").rpartition("; ")[2]
        # of a job with many nodes, all would ask
        controller = _output("scontrol", "ping") if srun.startswith("slurm") and not job else ""
        return cls(system, job, how_to_request(job), gpus, srun, controller)


def _output(*command: str) -> str:
    """Return what a command prints, or why it does not answer; empty where there is none."""
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
    advice = "SLURM may not work on this node, or not be needed: see srun --version"
    if known.srun.startswith("slurm"):
        yield finding("srun", "ok", known.srun)
    elif known.srun:
        yield finding("srun", "warning" if known.job else "note", known.srun, advice)
    if known.controller and " is UP" not in known.controller:
        value = f"its controller does not answer, so nothing can be submitted: {known.controller}"
        advice = "See scontrol ping, and munge -n | unmunge; tell the site's staff"
        yield finding("SLURM", "warning", value, advice)
