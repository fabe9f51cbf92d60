"""MPI, asked only where the launcher says too little, and the end of a launch that is not whole."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Iterator

from hpcdask.bootstrap.ranks import Rank
from hpcdask.errors import LaunchError, MissingExtra
from hpcdask.logs import complain

#: Launchers that tell all nodes the same id.
SAME_ID = ("openmpi", "pals", "srun", "flux", "given", "none")
#: Variables in which launchers tell how many ranks they started.
COUNTS = ("SLURM_STEP_NUM_TASKS", "JSM_NAMESPACE_SIZE", "PMI_SIZE")
#: Seconds in which a launcher reads a rank's output, and in which ranks clean up.
READ_S, CLEAN_S = 0.5, 10


def find_rank(rank: Rank | None, timeout: float) -> Rank:
    """Return the rank, asking MPI where the launcher says too little. Raises LaunchError."""
    if rank is not None and (rank.one_node or rank.launcher in SAME_ID):
        return rank
    with _deadline(timeout, rank):
        found = _start_and_ask_mpi(rank)
    counts = [os.environ.get(name, "") for name in COUNTS]
    started = max((int(count) for count in counts if count.isdigit()), default=1)
    expected = rank.size if rank is not None else started
    if found.size != expected and (rank is not None or found.size == 1):
        told = "says that each is rank 0 of 1" if found.size == 1 else f"counts {found.size}"
        raise LaunchError(
            f"the launcher started {expected} ranks, but MPI {told}: the MPI of mpi4py is not the "
            f"launcher's. {_plugin_hint(rank)}"
        )
    return found if rank is None else dataclasses.replace(rank, launch_id=found.launch_id)


def ask_mpi() -> Rank:
    """Return this process's rank in MPI's world, with a random id that rank 0 broadcasts."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    numbers = (world.rank, world.size, node.rank, node.size)
    launch_id = world.bcast(os.urandom(12).hex() if world.rank == 0 else None, root=0)
    node.Free()
    return Rank(*numbers, socket.gethostname(), "mpi", launch_id)


def _start_and_ask_mpi(rank: Rank | None) -> Rank:
    try:
        import mpi4py

        mpi4py.rc.initialize = True
        os.environ.pop("MPI4PY_RC_INITIALIZE", None)  # the user's, for the program: it would win
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        if isinstance(error, ImportError) and error.name == "mpi4py":
            raise MissingExtra("mpi4py", "mpi", "finding this process's rank") from None
        text = " ".join(str(error).split())
        raise LaunchError(
            f"mpi4py cannot load an MPI library: {text}. {_plugin_hint(rank)}"
        ) from None
    found = ask_mpi()
    MPI.Finalize()  # it is not to outlive a rank
    return found


@contextlib.contextmanager
def _deadline(timeout: float, rank: Rank | None) -> Iterator[None]:
    """End this process, even in a call of MPI, if the block takes longer."""
    # MPI's calls cannot be interrupted and hold the interpreter's lock: a process watches
    over, met = os.pipe()
    waiting, watcher = os.getpid(), os.fork()
    if watcher == 0:
        os.close(met)
        if not select.select([over], [], [], timeout)[0]:
            who = f"rank {rank.index} of {rank.size} on {rank.host}" if rank else "a rank"
            complain(
                f"{who} waited {timeout:g} s in MPI: another rank did not start, or not under the "
                f"same MPI. See what the others printed, or allow more with --timeout"
            )
            os.kill(waiting, signal.SIGKILL)  # its janitor cleans up
        os._exit(0)
    os.close(over)
    try:
        yield
    finally:
        os.close(met)
        os.waitpid(watcher, 0)


def _plugin_hint(rank: Rank | None) -> str:
    if (rank is not None and rank.launcher == "srun") or "SLURM_STEP_ID" in os.environ:
        return (
            "Try srun --mpi=pmix (Open MPI) or --mpi=pmi2 (MPICH, Intel MPI); srun --mpi=list "
            "shows what this site has. With srun --mpi=none no MPI is needed at all"
        )
    return "Use the mpirun of the same MPI (MPI4PY_MPIABI and LD_LIBRARY_PATH choose mpi4py's)"


def abort_launch(rank: Rank, code: int) -> None:
    """End a launch in which some rank never came: MPICH's launcher and srun would wait for it."""
    if rank.launcher == "hydra" and "PMI_FD" in os.environ:
        time.sleep(READ_S)  # the launcher drops what it has not read by then
        with contextlib.suppress(OSError, ValueError):  # PMI-1's abort
            os.write(int(os.environ["PMI_FD"]), f"cmd=abort exitcode={code}\n".encode())
    if rank.launcher == "srun":
        step = f"{os.environ.get('SLURM_JOB_ID')}.{os.environ.get('SLURM_STEP_ID')}"
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it reaches this rank, too
        # what this rank leaves behind dies with the last task of its node, so it stays itself
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run(["scancel", "--signal=TERM", step], timeout=CLEAN_S, check=False)
            time.sleep(CLEAN_S)  # a step that is cancelled is killed with its janitors
            subprocess.run(["scancel", step], timeout=CLEAN_S, check=False)
