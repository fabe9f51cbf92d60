"""The last lines of a batch script: who starts the ranks, and how."""

from __future__ import annotations

import shlex

from hpcdask.errors import UsageError

from .request import BatchRequest

#: Systems that tell an MPI how many ranks a node gets: their slots are ranks, not cores.
COUNTED = ("slurm", "pbs")
OAR_AGENT = "export OMPI_MCA_plm_rsh_agent=oarsh PRTE_MCA_plm_ssh_agent=oarsh"


def launch_lines(system: str, asked: BatchRequest, python: str, *, counted: bool) -> list[str]:
    """Return shell lines that start the runner, one rank per GPU.

    `python` is in shell words. `counted` is whether the allocation itself says how many ranks a
    node gets.
    """
    launcher = asked.launcher or ("srun" if system == "slurm" else "mpirun")
    if asked.container:
        python = f"{asked.container} python"
    program = f"{python} -P -m hpcdask.run {shlex.join(asked.words)}"
    if launcher == "srun":
        if system != "slurm":
            raise UsageError(f"--launcher srun is SLURM's: with --system {system}, use mpirun")
        return [*_cpus(asked), f"exec srun -K {program}"]
    total = f"-n {asked.nodes * asked.ranks}"
    if asked.nodes == 1 or counted:
        return [f"exec mpirun {total} {program}"]
    lines = [
        "# each MPI has its own option for the ranks per node",
        'case "$(mpirun --version 2>&1)" in',
        f'*"Open MPI"* | *OpenRTE* | *PRRTE*) per_node="--map-by ppr:{asked.ranks}:node" ;;',
        f'*) per_node="-ppn {asked.ranks}" ;;',
        "esac",
    ]
    hosts = ""
    if system == "oar":
        lines.insert(0, f"{OAR_AGENT} HYDRA_LAUNCHER_EXEC=oarsh")
        hosts = '--hostfile "$OAR_NODEFILE" '
    return [*lines, f"exec mpirun {total} {hosts}$per_node {program}"]


def _cpus(asked: BatchRequest) -> list[str]:
    """sbatch's --cpus-per-task does not reach srun by itself in SLURM 22.05 to 23.02."""
    return [f"export SRUN_CPUS_PER_TASK={asked.cpus_per_gpu}"] if asked.cpus_per_gpu else []
