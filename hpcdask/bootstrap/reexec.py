"""The first moments of a rank: before anything heavy is imported or any thread exists.

A rank executes itself once more with the variables that only work before Python or libc
start (the hash seed, the allocator's trim threshold, one BLAS thread for workers), so that all that
it forks later inherits them. The same step plants a random marker in the process's
initial environment. Linux keeps that environment readable in ``/proc/PID/environ`` and
gives it to every descendant, which is how the janitor finds them all.

The janitor is a small process in a session of its own, forked before the imports. It
waits for the rank to be gone, however that happens, then ends what the rank left and
removes its folders. Open MPI gives ranks 0.2 s between SIGTERM and SIGKILL, which is
too short for anything else.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import stat
import sys
import time

from hpcdask.process import STARTED

from .janitor import MARKER, Janitor

DEFAULTED = "HPCDASK_DEFAULTED"

#: What distributed sets before it spawns a worker (``distributed.nanny.pre-spawn-environ``)
#: and the hash seed it insists on. A template that is forked must have them from its start. The pad
#: is ours: without it the threshold has libc give memory back, and take it again, for each message.
PRE_SPAWN = {
    "PYTHONHASHSEED": "6640",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_TOP_PAD_": "1048576",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


def reexecute() -> None:
    """Execute this very command again, with the environment that descendants need.

    Returns at once in the second life, with the garbage collector off: what follows imports much
    and leaves little garbage. `hpcdask.node.forkserver.prepare_forks` turns it on again. Variables
    that the user set stay as they are, save a hash seed of 0 or ``random``, which distributed
    replaces too.
    """
    if os.environ.get(MARKER, "").endswith(f".{os.getpid()}"):
        gc.disable()
        return
    _mend_inheritance()
    environment = dict(os.environ)
    environment[STARTED] = repr(time.time())
    environment[MARKER] = f"{os.urandom(12).hex()}.{os.getpid()}"
    if environment.get("PYTHONHASHSEED") in ("0", "random"):
        del environment["PYTHONHASHSEED"]
    environment["SPT_NOENV"] = "1"  # setproctitle would write over the environment in /proc
    environment[DEFAULTED] = ",".join(name for name in PRE_SPAWN if name not in environment)
    _execute_again({**PRE_SPAWN, **environment})


def adopt_configured_pre_spawn(janitor: Janitor, **given: str) -> None:
    """Execute once more if the user's Dask configuration asks for other pre-spawn variables.

    The janitor of this life goes first: it would take the next one's for what is left. More
    variables for the next life may be given.
    """
    import dask.config

    configured = dask.config.get("distributed.nanny.pre-spawn-environ", {}) or {}
    ours = os.environ.get(DEFAULTED, "").split(",")
    changed = {
        name: str(value)
        for name, value in configured.items()
        if value is not None
        and (name in ours or name not in os.environ)
        and os.environ.get(name) != str(value)
        and not (name == "PYTHONHASHSEED" and str(value) == "0")
    }
    if changed:
        janitor.dismiss()
        _execute_again({**os.environ, **given, **changed})


def _mend_inheritance() -> None:
    """Restore what daemons may lack: standard streams, and children that can be waited for.

    Pipes would take the streams' numbers, and be lost when those are redirected.
    """
    for stream in range(3):
        try:
            lost = not os.get_inheritable(stream)  # a file that libffi keeps open has its number
        except OSError:
            lost = True
        if lost:
            os.dup2(os.open(os.devnull, os.O_RDWR), stream)
            os.set_inheritable(stream, True)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _execute_again(environment: dict[str, str]) -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.flush()
    given = sys.orig_argv[1:]
    command = [sys.executable, *given] if sys.flags.safe_path else [*interpreter(), *given]
    os.execve(sys.executable, command, environment)


def interpreter() -> list[str]:
    """This Python as a command, which imports nothing from the current folder by itself.

    In that folder, such as /tmp, another user may have put modules.
    """
    found = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    only_there = found not in sys.path[1:] and os.path.samefile(found, ".")  # not installed
    return [sys.executable] if only_there else [sys.executable, "-P"]


def wants_folders() -> bool:
    """Return whether modules beside programs count: `-P` is ours, these are the user's settings."""
    return not (os.environ.get("PYTHONSAFEPATH") or sys.flags.isolated)


def add_working_folder() -> None:
    """Append the current folder to the module path, unless any user may write in it."""
    if not wants_folders():
        return
    with contextlib.suppress(OSError):  # it is gone
        folder = os.getcwd()
        if folder not in sys.path and not os.stat(folder).st_mode & stat.S_IWOTH:
            sys.path.append(folder)


def end_on_interrupt() -> None:
    """Until there are handlers, Ctrl-C ends this process without a traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def restore_environment() -> None:
    """Take back, for the user's program, the thread limits that only workers want."""
    for name in os.environ.pop(DEFAULTED, "").split(","):
        if name.endswith("_NUM_THREADS"):
            os.environ.pop(name, None)
