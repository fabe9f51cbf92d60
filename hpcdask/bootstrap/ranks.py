"""Detection of the rank from the variables that the launcher put into the environment."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hpcdask.process import process_start, process_status
from hpcdask.queues.registry import job_id

#: Set by `hpcdask.Runner` for the process that it starts: the rank that its own MPI found.
GIVEN = "HPCDASK_RANK"
#: Processes that start MPI's ranks, with all cores of the job.
MPI_LAUNCHERS = re.compile("prte|orte|mpirun|mpiexec|mpispawn|hydra|pmi_proxy|prun|pals")


@dataclass(frozen=True)
class Rank:
    """Process that a launcher started, with its place among all and among those of its node.

    The launcher is a key of `LAUNCHERS`, or ``mpi`` (found out by asking MPI); ``none`` is a rank
    started by hand. The launch id is of one launch alone: by launcher, job and restart count.
    """

    index: int
    size: int
    local_index: int
    local_size: int
    host: str
    launcher: str
    launch_id: str

    @property
    def one_node(self) -> bool:
        """Return whether all ranks of the launch are on this node."""
        return self.local_size == self.size

    def to_text(self) -> str:
        """Return this rank for the environment of another process."""
        return json.dumps(dataclasses.asdict(self) | {"launcher": "given"})


#: Four numbers of a rank, in the order of `Rank`, and the launcher's id of the launch; None for
#: what it does not tell.
Numbers = tuple[int | None, int | None, int | None, int | None, str | None]
ALONE: Numbers = (0, 1, 0, 1, None)


def detect(environ: Mapping[str, str] | None = None) -> Rank | None:
    """Read this process's rank from the launcher's variables; None where MPI must be asked."""
    environ = os.environ if environ is None else environ
    if GIVEN in environ:
        return Rank(**json.loads(environ[GIVEN]))
    found = ((name, numbers) for name, read in LAUNCHERS.items() if (numbers := read(environ)))
    launcher, numbers = next(found)
    *places, launch = numbers
    if None in places:
        return None
    job = job_id(environ, installed=False)
    if numbers is ALONE:
        launcher, job = "none", ""
    pid = mpi_launcher() or os.getppid()  # all ranks of a node descend from it
    launch = launch or f"p{pid}.{process_start(pid)}"
    launch_id = "-".join(filter(None, (launcher, launch, job)))
    index, size, local_index, local_size = (place or 0 for place in places)
    return Rank(index, size, local_index, local_size, socket.gethostname(), launcher, launch_id)


def _number(environ: Mapping[str, str], names: str) -> int | None:
    found = (environ.get(name, "") for name in names.split())
    return next((int(text) for text in found if text.isdecimal()), None)


def _variables(*names: str, launch: str = "") -> Callable[[Mapping[str, str]], Numbers | None]:
    """Return a reader of four numbers, each by names of variables; none without an index."""

    def read(environ: Mapping[str, str]) -> Numbers | None:
        if names[0] not in environ:
            return None
        index, size, local_index, local_size = (_number(environ, name) for name in names)
        return index, size, local_index, local_size, environ.get(launch)

    return read


def _world(prefix: str, launch: str = "") -> Callable[[Mapping[str, str]], Numbers | None]:
    names = (f"{prefix}_{what}" for what in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
    return _variables(*names, launch=launch)


def _shell(environ: Mapping[str, str]) -> Numbers | None:
    """Read the variables of a shell from ``srun --pty``: the user is the launcher."""
    one = "SLURM_PTY_PORT" in environ and environ.get("SLURM_STEP_NUM_TASKS") == "1"
    return ALONE if one and "MPI_LOCALRANKID" not in environ else None


def _srun(environ: Mapping[str, str]) -> Numbers | None:
    if not {"SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"} <= environ.keys():
        return None
    if {"PMI_RANK", "MPI_LOCALRANKID"} <= environ.keys():
        return None  # of Hydra's mpirun, which starts its daemons by srun
    names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
    index, size, local = (_number(environ, name) for name in names)
    return index, size, local, _slurm_local_size(environ), f"step{environ['SLURM_STEP_ID']}"


def _slurm_local_size(environ: Mapping[str, str]) -> int | None:
    """Return the number of this step's tasks on this node, from a list such as ``2(x3),1``."""
    counts: list[int] = []
    for part in environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            return None
        counts += [int(match[1])] * int(match[2] or 1)
    node = _number(environ, "SLURM_NODEID")
    return counts[node] if node is not None and node < len(counts) else None


def _flux(environ: Mapping[str, str]) -> Numbers | None:
    if "FLUX_TASK_RANK" not in environ or "MPI_LOCALRANKID" in environ:  # Hydra's, started by it
        return None
    names = ("TASK_RANK", "JOB_SIZE", "JOB_NNODES", "TASK_LOCAL_ID")
    index, size, nodes, local = (_number(environ, f"FLUX_{name}") for name in names)
    share = None  # ranks of a node, where all have as many and stand side by side
    if index is not None and size and nodes and size % nodes == 0:
        share = size // nodes if index % (size // nodes) == local else None
    return index, size, local, share, environ.get("FLUX_JOB_ID")


def _no_launcher(environ: Mapping[str, str]) -> Numbers:
    untold = any(name in environ for name in ("PMIX_RANK", "PMI_FD", "JSM_NAMESPACE_RANK"))
    return (None,) * 5 if untold else ALONE


#: In the order in which they are looked for: a launcher may start its ranks by another one.
LAUNCHERS: dict[str, Callable[[Mapping[str, str]], Numbers | None]] = {
    "openmpi": _world("OMPI_COMM_WORLD", "PMIX_NAMESPACE"),
    "mvapich": _world("MV2_COMM_WORLD"),
    "flux": _flux,
    "pals": _variables(
        "PALS_RANKID",
        "PMI_SIZE PALS_SIZE",
        "PALS_LOCAL_RANKID PMI_LOCAL_RANK",
        "PALS_LOCAL_SIZE PMI_LOCAL_SIZE",
        launch="PALS_APID",
    ),
    "shell": _shell,
    "srun": _srun,
    "hydra": _variables(
        "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID PMI_LOCAL_RANK", "MPI_LOCALNRANKS PMI_LOCAL_SIZE"
    ),
    "none": _no_launcher,
}


def mpi_launcher() -> int | None:
    """Return the process of the MPI launcher on this node, above wrappers and containers."""
    pid = os.getppid()
    while pid > 1 and (status := process_status(pid)):
        if MPI_LAUNCHERS.match(status[0]):
            return pid
        pid = int(status[2])
    return None
