"""The last lines of a batch script: who starts the ranks, and how."""

from __future__ import annotations

import shlex

from hpcdask.errors import UsageError
from hpcdask.queues.base import Queue

from .request import BatchRequest


def launch_lines(queue: Queue, asked: BatchRequest, python: str) -> list[str]:
    """Return shell lines that start the runner, one rank per GPU; `python` is in shell words."""
    launcher = asked.launcher or queue.launchers[0]
    if launcher not in queue.launchers:
        usable = " or ".join(queue.launchers)
        raise UsageError(f"--launcher {launcher} is not {queue.title}'s: use {usable}")
    if asked.container:
        python = f"{asked.container} python"
    program = f"{python} -P -m hpcdask.run {shlex.join(asked.words)}"
    if launcher == "srun":
        # sbatch's --cpus-per-task does not reach srun by itself in SLURM 22.05 to 23.02
        cpus = asked.cpus_per_gpu
        exports = [f"export SRUN_CPUS_PER_TASK={cpus}"] if cpus else []
        return [*exports, f"exec srun -K {program}"]
    total = f"-n {asked.nodes * asked.ranks}"
    if asked.nodes == 1 or queue.counts_ranks:
        return [f"exec mpirun {total} {program}"]
    return [
        *filter(None, [queue.mpirun_setup]),
        "# each MPI has its own option for the ranks per node",
        'case "$(mpirun --version 2>&1)" in',
        f'*"Open MPI"* | *OpenRTE* | *PRRTE*) per_node="--map-by ppr:{asked.ranks}:node" ;;',
        f'*) per_node="-ppn {asked.ranks}" ;;',
        "esac",
        " ".join(
            ["exec mpirun", total, *filter(None, [queue.mpirun_option]), "$per_node", program]
        ),
    ]
