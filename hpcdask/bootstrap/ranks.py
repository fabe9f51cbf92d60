"""Detection of the rank, from the variables that the launcher put into the environment.

MPI itself is asked only by `hpcdask.runner.rendezvous`, and only where this says too little.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hpcdask.process import process_start, process_status
from hpcdask.queues.environment import job_id

#: Set by `hpcdask.Runner` for the process that it starts: the rank that its own MPI found.
GIVEN = "HPCDASK_RANK"


@dataclass(frozen=True)
class Rank:
    """Process that a launcher started, with its place among all and among those of its node.

    The launcher is ``openmpi``, ``hydra`` (MPICH, Intel MPI), ``mvapich``, ``flux``, ``pals``,
    ``srun``, ``mpi`` (found out by asking MPI) or ``none`` (started by hand: one rank). The launch
    id is the same for all ranks of one launch, and for no other: it holds the launcher's own id,
    the job's id and its restart count.
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
        """This rank for the environment of another process."""
        return json.dumps(dataclasses.asdict(self) | {"launcher": "given"})


def detect(environ: Mapping[str, str] | None = None) -> Rank | None:
    """Read this process's rank from the launcher's variables, by default those of this process.

    None where a launcher started this process but says too little: then MPI must be asked.
    """
    environ = os.environ if environ is None else environ
    if GIVEN in environ:
        return Rank(**json.loads(environ[GIVEN]))
    found = ((name, numbers) for name, read in LAUNCHERS.items() if (numbers := read(environ)))
    launcher, numbers = next(found)
    *places, launch = numbers
    if any(place is None for place in places):
        return None
    launcher, job = ("none", "") if numbers is ALONE else (launcher, job_id(environ))
    launch_id = "-".join(filter(None, (launcher, launch or _launcher_id(), job)))
    index, size, local_index, local_size = (place or 0 for place in places)
    return Rank(index, size, local_index, local_size, socket.gethostname(), launcher, launch_id)


#: Index and size of a rank, the same on its node, and the launcher's own id of the launch if it has
#: one; None for a number that is not said.
Numbers = tuple[int | None, int | None, int | None, int | None, str | None]
ALONE: Numbers = (0, 1, 0, 1, None)


def _number(environ: Mapping[str, str], *names: str) -> int | None:
    found = (environ[name] for name in names if re.fullmatch(r"\d+", environ.get(name, "")))
    return next(map(int, found), None)


Reader = Callable[[Mapping[str, str]], Numbers | None]


def _variables(
    index: str,
    size: Sequence[str],
    local_index: Sequence[str],
    local_size: Sequence[str],
    launch: str = "",
) -> Reader:
    """Read each number from the first of some variables that has one, where there is an index."""

    def read(environ: Mapping[str, str]) -> Numbers | None:
        if index not in environ:
            return None
        return (
            _number(environ, index),
            _number(environ, *size),
            _number(environ, *local_index),
            _number(environ, *local_size),
            environ.get(launch),
        )

    return read


def _world(prefix: str, launch: str = "") -> Reader:
    size, local_index, local_size = f"{prefix}_SIZE", f"{prefix}_LOCAL_RANK", f"{prefix}_LOCAL_SIZE"
    return _variables(f"{prefix}_RANK", [size], [local_index], [local_size], launch)


def _shell(environ: Mapping[str, str]) -> Numbers | None:
    """A shell from ``srun --pty``: the user is the launcher."""
    one = "SLURM_PTY_PORT" in environ and environ.get("SLURM_STEP_NUM_TASKS") == "1"
    return ALONE if one and "MPI_LOCALRANKID" not in environ else None


def _srun(environ: Mapping[str, str]) -> Numbers | None:
    if not {"SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"} <= environ.keys():
        return None
    if {"PMI_RANK", "MPI_LOCALRANKID"} <= environ.keys():
        return None  # of Hydra's mpirun, which starts its daemons by srun
    return (
        _number(environ, "SLURM_PROCID"),
        _number(environ, "SLURM_STEP_NUM_TASKS"),
        _number(environ, "SLURM_LOCALID"),
        _slurm_local_size(environ),
        f"step{environ['SLURM_STEP_ID']}",
    )


def _flux(environ: Mapping[str, str]) -> Numbers | None:
    if "FLUX_TASK_RANK" not in environ or "MPI_LOCALRANKID" in environ:  # Hydra's, started by it
        return None
    index, size, nodes, local = (
        _number(environ, f"FLUX_{name}")
        for name in ("TASK_RANK", "JOB_SIZE", "JOB_NNODES", "TASK_LOCAL_ID")
    )
    share = None  # ranks of a node, where all have as many and stand side by side
    if index is not None and size and nodes and size % nodes == 0:
        share = size // nodes if index % (size // nodes) == local else None
    return index, size, local, share, environ.get("FLUX_JOB_ID")


def _no_launcher(environ: Mapping[str, str]) -> Numbers:
    if any(name in environ for name in ("PMIX_RANK", "PMI_FD", "JSM_NAMESPACE_RANK")):
        return None, None, None, None, None  # of one that says no more
    return ALONE


#: In the order in which they are looked for: a launcher may start its ranks by another one.
LAUNCHERS: dict[str, Reader] = {
    "openmpi": _world("OMPI_COMM_WORLD", "PMIX_NAMESPACE"),
    "mvapich": _world("MV2_COMM_WORLD"),
    "flux": _flux,
    "pals": _variables(
        "PALS_RANKID",
        ("PMI_SIZE", "PALS_SIZE"),
        ("PALS_LOCAL_RANKID", "PMI_LOCAL_RANK"),
        ("PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"),
        "PALS_APID",
    ),
    "shell": _shell,
    "srun": _srun,
    "hydra": _variables(
        "PMI_RANK",
        ("PMI_SIZE",),
        ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
    ),
    "none": _no_launcher,
}


def from_mpi(comm: object) -> Rank:
    """Ask an MPI communicator (``mpi4py.MPI.Comm``) instead of the environment.

    The launch id is a random one that rank 0 broadcasts.
    """
    from mpi4py import MPI

    assert isinstance(comm, MPI.Comm)
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    numbers = (comm.rank, comm.size, node.rank, node.size)
    launch_id = comm.bcast(os.urandom(12).hex() if comm.rank == 0 else None, root=0)
    node.Free()
    return Rank(*numbers, socket.gethostname(), "mpi", launch_id)


def launcher_pid() -> int:
    """Return the id of the launcher's process on this node, or of the parent without one.

    Wrappers, which bind a GPU say, and the starters of containers may stand between the two.
    """
    pid = parent = os.getppid()
    while pid > 1 and (status := process_status(pid)):
        if is_launcher(status[0]):
            return pid
        pid = int(status[2])
    return parent


def mpi_launcher() -> tuple[int, str] | None:
    """Return process id and start of the MPI launcher on this node; None without one."""
    pid = launcher_pid()
    status = process_status(pid)
    return (pid, process_start(pid)) if status and is_launcher(status[0]) else None


def is_launcher(name: str) -> bool:
    """Return whether processes of this name start MPI's ranks, with all cores of the job."""
    names = "prte|orte|mpirun|mpiexec|mpispawn|hydra|pmi_proxy|prun|pals"
    return re.match(names, name) is not None


def _launcher_id() -> str:
    """Id of the launcher's process on this node: all its ranks descend from it."""
    parent = launcher_pid()
    return f"p{parent}.{process_start(parent)}"


def _slurm_local_size(environ: Mapping[str, str]) -> int | None:
    """Number of this step's tasks on this node, from a list such as ``2(x3),1``."""
    counts: list[int] = []
    for part in environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            return None
        counts += [int(match[1])] * int(match[2] or 1)
    node = environ.get("SLURM_NODEID", "")
    return counts[int(node)] if node.isdigit() and int(node) < len(counts) else None
