"""`Runner` and `initialize`: all ranks run the program, rank 0 goes on, the others end with it."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Sequence
from typing import Any, Unpack, get_type_hints

from distributed import Security, default_client
from distributed.core import Status
from distributed.utils import NoOpAwaitable

from hpcdask.bootstrap import ranks
from hpcdask.bootstrap.environment import interpreter
from hpcdask.client.connect import configure_client, forget_client, load_security
from hpcdask.errors import LaunchError, UsageError
from hpcdask.logs import complain
from hpcdask.process import signal_name
from hpcdask.spec.keywords import InitializeKeywords, Keyword, RunKeywords, describe, spell_out
from hpcdask.spec.specs import RunSpec, keywords_of

from . import mpi

#: Seconds that the ranks get to end after the program.
CLOSE_DEADLINE_S = 10.0


class Runner:
    """A Dask cluster from the ranks that all run this program.

    ::

        with hpcdask.Runner() as runner, Client(runner) as client:
            ...  # rank 0 only; the other ranks never come here

    The keywords are the fields of `hpcdask.spec.specs.RunSpec`, which are the options of
    ``python -m hpcdask.run``.

    Parameters
    ----------
    **options
        The fields.

    Attributes
    ----------
    scheduler_address
        Address of the scheduler, once entered.
    security
        Credentials for it.

    Raises
    ------
    UsageError
        The value of an option is not understood.
    SystemExit
        In rank 0 when the cluster did not come up (the reason was printed); in the other
        ranks when the cluster has ended.
    """

    def __init__(self, **options: Unpack[RunKeywords]) -> None:
        self.spec = RunSpec.from_keywords(options).configured()
        self.status = Status.created
        self.scheduler_address: str | None = None
        self.security = Security()
        self._process: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None

    def start(self) -> bool:
        """Start this rank's part; return True in rank 0 with the cluster ready, False in others."""
        rank, environment = ranks.detect(), dict(os.environ)
        if _mpi_is_running():
            rank = mpi.ask_mpi()  # only this process may use it
            environment[ranks.GIVEN] = rank.to_text()
        elif rank is None:
            raise LaunchError(
                "the launcher's environment does not tell this process's rank: import "
                "mpi4py.MPI before hpcdask.Runner, or use python -m hpcdask.run"
            )
        command = [*interpreter(), "-m", "hpcdask.run", *self.spec.to_argv()]
        pmi = os.environ.get("PMI_FD", "")  # the line to MPICH's launcher
        pass_on = [int(pmi)] if pmi and os.path.exists(f"/proc/self/fd/{pmi}") else []

        def start(*options: str, fds: Sequence[int] = ()) -> subprocess.Popen[bytes]:
            null = subprocess.DEVNULL
            return subprocess.Popen(
                [*command, *options], env=environment, pass_fds=[*fds, *pass_on], stdin=null
            )

        if rank.index != 0:
            with contextlib.suppress(ValueError):  # Python lets no other thread than the main one
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is for the program, in rank 0
            self._code = _exit_code(start())
            return False
        self._line, theirs = socket.socketpair()
        with theirs:
            self._process = start("--attached", str(theirs.fileno()), fds=[theirs.fileno()])
        atexit.register(self._close_at_exit)
        os.register_at_fork(after_in_child=self._forget)
        with self._line.makefile("r") as stream:
            line = stream.readline()
        if not line:
            self._code = _exit_code(self._process)
            raise SystemExit(self._code or 1)
        cluster = json.loads(line)
        configure_client(**cluster)
        self.scheduler_address = cluster["address"]
        self.security = load_security(cluster) or Security()
        self.status = Status.running
        return True

    def close(self) -> Awaitable[None]:
        """End the cluster and wait for all its ranks; in an event loop, await what this returns."""
        if self._line is None or self._process is None:
            return NoOpAwaitable()
        self.status = Status.closed
        with contextlib.suppress(OSError):
            self._line.shutdown(socket.SHUT_RDWR)  # a fork of this program may have it as well
        self._forget()
        forget_client()
        atexit.unregister(self._close_at_exit)
        try:
            return asyncio.get_running_loop().run_in_executor(None, _end, self._process)
        except RuntimeError:
            _end(self._process)
            return NoOpAwaitable()

    def _forget(self) -> None:
        """Close the line, also in a fork of the program, whose end is not the program's."""
        if self._line is not None:
            self._line.close()
            self._line = None

    def _close_at_exit(self) -> None:
        """Close the program's client first, which would else try to connect again."""
        if self._line is not None:  # else this is a fork: the cluster is its parent's
            with contextlib.suppress(ValueError):
                default_client().close(timeout=2)
            self.close()

    def __enter__(self) -> Runner:
        if not self.start():
            sys.exit(self._code)
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __await__(self) -> Any:  # a client that it was given to does
        return NoOpAwaitable().__await__()


_FIELDS = keywords_of(RunSpec)
Runner.__init__.__signature__ = spell_out(Runner.__init__, _FIELDS)  # type: ignore[attr-defined]
Runner.__doc__ = describe(Runner.__doc__ or "", _FIELDS)


def _exit_code(process: subprocess.Popen[bytes]) -> int:
    """Wait for a rank's process, and return its exit code as a shell has it."""
    code = process.wait()
    if code >= 0:
        return code
    hint = "Did the node run out of memory?"
    if -code == signal.SIGTERM:
        hint = "Another rank failed (srun -K), or the job was cancelled: see the first error"
    complain(f"this rank was killed by {signal_name(-code)}. {hint}")
    return 128 - code


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(CLOSE_DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def initialize(
    *,
    exit: bool = True,
    worker_options: dict[str, Any] | None = None,
    **options: Unpack[InitializeKeywords],
) -> bool:
    """Turn the ranks into a Dask cluster, in the place of ``dask_mpi.initialize()``.

    Rank 0 returns and is the client: ``Client()`` with no argument connects. It also carries the
    scheduler and a worker, as processes of their own, so N ranks give N workers.

    Parameters
    ----------
    exit
        Whether the other ranks exit when the cluster ends. Otherwise they return False.
    worker_options
        As in dask-mpi: more options of the workers, such as ``{"resources": {"GPU": 1}}``.
    nanny, worker_class, comm, dashboard
        Of dask-mpi, for which there is nothing to choose here.
    device, protocol, ...
        All keywords of `Runner`; None, as dask-mpi has it, for the default.

    Returns
    -------
    bool
        Whether this rank goes on as the client.
    """
    given: dict[str, Any] = {name: one for name, one in options.items() if one is not None}
    given.pop("dashboard", None)
    for name, instead in _INSTEAD.items():
        if given.pop(name, None) not in (None, True, "distributed.Nanny", "distributed.Worker"):
            raise UsageError(f"hpcdask.initialize() does not take {name}: {instead}")
    runner = Runner(**given, **(worker_options or {}))
    if runner.start():
        return True
    if exit:
        sys.exit(runner._code)
    return False


#: Keywords of dask-mpi that choose nothing here, and the reason.
_INSTEAD = {
    "nanny": "workers always have a nanny",
    "worker_class": "device chooses between GPU and CPU workers",
    "comm": "it uses the launcher's ranks",
}
_ALL = [Keyword(name, one, "") for name, one in get_type_hints(InitializeKeywords).items()]
initialize.__signature__ = spell_out(initialize, _ALL)  # type: ignore[attr-defined]


def _mpi_is_running() -> bool:
    loaded = sys.modules.get("mpi4py.MPI")
    return loaded is not None and loaded.Is_initialized() and not loaded.Is_finalized()
