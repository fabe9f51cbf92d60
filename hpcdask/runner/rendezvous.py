"""Rendezvous: the ranks learn where rank 0 is.

Rank 0 publishes one small note: its address, a nonce, and the credentials. Everything else goes
over the control line (`hpcdask.runner.control`). The note is a file, 0600, renamed into place, in a
0700 folder that is named after the launch: the launcher's id, the job's id and its restart count,
so that an earlier life of a requeued job cannot be mistaken for this one. Where the launcher has no
id that all nodes know, MPI broadcasts a random one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import select
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import termios
import time
from dataclasses import dataclass, field

from hpcdask.bootstrap.ranks import Rank, from_mpi
from hpcdask.errors import LaunchError, MissingExtra
from hpcdask.logs import complain
from hpcdask.security import private
from hpcdask.security.credentials import Credentials
from hpcdask.spec.records import Record

#: The file with the note.
NOTE = "note.json"
#: Launchers that tell all nodes the same id.
SAME_ID = ("openmpi", "pals", "srun", "flux", "given", "none")
#: In which launchers tell how many ranks they started.
COUNTS = ("SLURM_STEP_NUM_TASKS", "JSM_NAMESPACE_SIZE", "PMI_SIZE")
#: Seconds that a launcher gets to read a rank's output before it is told to end.
READ_DEADLINE_S = 2.0


@dataclass(frozen=True)
class RendezvousInfo(Record):
    """Rank 0's note: where it listens, and what it takes to be let in.

    `host` is its node's name. A rank that cannot reach the address may try `others`.
    """

    address: str
    port: int
    host: str
    nonce: str
    credentials: Credentials
    others: list[str] = field(default_factory=list)


class Rendezvous:
    """Rank 0's note in a private folder.

    For the ranks of one node the folder is in the temporary folder. With `shared`, ranks of other
    nodes must see it: then it is in the home folder, or in the folder that Dask's configuration
    names as ``hpcdask.shared-directory``. `launch_id` is the same for all ranks of this launch and
    for no other.
    """

    def __init__(self, launch_id: str, *, shared: bool) -> None:
        import dask.config

        base = tempfile.gettempdir()
        if shared:
            base = dask.config.get("hpcdask.shared-directory", None) or os.path.expanduser("~")
        name = f".hpcdask-{os.geteuid()}-{hashlib.sha256(launch_id.encode()).hexdigest()[:16]}"
        self.folder = os.path.join(os.path.abspath(base), name)
        self._launch_id = launch_id

    def publish(self, info: RendezvousInfo) -> None:
        """Write the note, over that of a life that left one."""
        text = json.dumps({**info.to_json(), "launch": self._launch_id})
        try:
            private.make_folder(self.folder)
            private.write_private(os.path.join(self.folder, NOTE), text)
        except OSError as error:
            raise LaunchError(
                f"the ranks cannot meet in {self.folder}: {error.strerror}. It must be a place "
                f"that all nodes share and you can write: set TMPDIR or HOME, or "
                f"hpcdask.shared-directory in Dask's configuration"
            ) from None

    def fetch(self) -> RendezvousInfo | None:
        """The note as it stands. It may be an older life's: then nobody answers at its address."""
        with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):  # ESTALE, too
            os.listdir(os.path.dirname(self.folder))  # makes NFS look again
            found = dict(json.loads(private.read(os.path.join(self.folder, NOTE))))
            if found.pop("launch", None) == self._launch_id:
                return RendezvousInfo.from_json(found)
        return None

    def close(self) -> None:
        """Remove the folder."""
        private.remove(self.folder)


def meet(rank: Rank | None, timeout: float) -> tuple[Rank, Rendezvous]:
    """Find the rank as `find_rank` does, and the way to meet."""
    rank = find_rank(rank, timeout)
    return rank, Rendezvous(rank.launch_id, shared=not rank.one_node)


def find_rank(rank: Rank | None, timeout: float) -> Rank:
    """Return the rank; MPI is asked where the launcher says too little.

    An MPI that does not start within `timeout` seconds ends this process. Raises LaunchError if MPI
    cannot be started, or says something else than the launcher.
    """
    if rank is None or not (rank.one_node or rank.launcher in SAME_ID):
        return _ask_mpi(rank, timeout)
    return rank


def _ask_mpi(rank: Rank | None, timeout: float) -> Rank:
    """Return the rank with an id that all ranks of the launch have, and no other launch."""
    deadline = MPIDeadline(timeout, rank)
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
    found = from_mpi(MPI.COMM_WORLD)
    MPI.Finalize()  # it is not to outlive a rank
    deadline.met()
    if rank is None:
        counts = [os.environ.get(name, "") for name in COUNTS]
        started = max((int(count) for count in counts if count.isdigit()), default=1)
        if found.size == 1 and started > 1:
            raise mismatch(started, 1, found)
        return found
    if found.size != rank.size:
        raise mismatch(rank.size, found.size, rank)
    return dataclasses.replace(rank, launch_id=found.launch_id)


def abort_launch(rank: Rank, code: int) -> None:
    """End a launch, with `code`, in which some rank never came.

    MPICH's launcher and srun would wait for it.
    """
    if rank.launcher == "hydra" and "PMI_FD" in os.environ:
        _wait_until_read()  # the launcher drops what it has not read yet
        with contextlib.suppress(OSError, ValueError):  # PMI-1's abort
            os.write(int(os.environ["PMI_FD"]), f"cmd=abort exitcode={code}\n".encode())
    if rank.launcher == "srun":
        step = f"{os.environ.get('SLURM_JOB_ID')}.{os.environ.get('SLURM_STEP_ID')}"
        with contextlib.suppress(OSError, subprocess.SubprocessError):  # srun waits, as it does
            subprocess.run(
                ["scancel", step], timeout=READ_DEADLINE_S, capture_output=True, check=False
            )


def _wait_until_read() -> None:
    """Wait until the launcher has read what this process wrote to its standard streams."""
    deadline = time.monotonic() + READ_DEADLINE_S
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed
            stream.flush()
            number = stream.fileno()
            if not stat.S_ISFIFO(os.fstat(number).st_mode):
                continue
            while time.monotonic() < deadline:
                (unread,) = struct.unpack("i", fcntl.ioctl(number, termios.FIONREAD, bytes(4)))
                if not unread:
                    break
                time.sleep(0.005)  # pipes have no event for it


def mismatch(expected: int, size: int, rank: Rank) -> LaunchError:
    """The error for ranks of which MPI counts others than the launcher, mostly each alone."""
    counts = "says that each is rank 0 of 1" if size == 1 else f"counts {size}"
    return LaunchError(
        f"the launcher started {expected} ranks, but MPI {counts}: the MPI of mpi4py is not the "
        f"launcher's. {_plugin_hint(rank)}"
    )


def _plugin_hint(rank: Rank | None) -> str:
    if (rank is not None and rank.launcher == "srun") or "SLURM_STEP_ID" in os.environ:
        return (
            "Try srun --mpi=pmix (Open MPI) or --mpi=pmi2 (MPICH, Intel MPI); srun --mpi=list "
            "shows what this site has. With srun --mpi=none no MPI is needed at all"
        )
    return "Use the mpirun of the same MPI (MPI4PY_MPIABI and LD_LIBRARY_PATH choose mpi4py's)"


class MPIDeadline:
    """Ends this process if MPI does not come back in time.

    MPI's calls cannot be interrupted and hold the interpreter's lock, so a process watches, not a
    thread. It is forked before MPI starts.
    """

    def __init__(self, timeout: float, rank: Rank | None) -> None:
        read_end, self._pipe = os.pipe()
        waiting = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.close(self._pipe)
                if not select.select([read_end], [], [], timeout)[0]:
                    _give_up(waiting, timeout, rank)
            finally:
                os._exit(0)
        os.close(read_end)

    def met(self) -> None:
        """MPI came back."""
        os.close(self._pipe)
        os.waitpid(self._pid, 0)


def _give_up(waiting: int, timeout: float, rank: Rank | None) -> None:
    who = f"rank {rank.index} of {rank.size} on {rank.host}" if rank else "a rank"
    complain(
        f"{who} waited {timeout:g} s in MPI: another rank did not start, or not under the same "
        f"MPI. See what the others printed, or allow more with --timeout"
    )
    os.kill(waiting, signal.SIGKILL)  # its janitor cleans up
