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

from .security import private

MARKER = "HPCDASK_RANK_MARKER"
STARTED = "HPCDASK_STARTED"
DEFAULTED = "HPCDASK_DEFAULTED"

#: Seconds after which the janitor leaves a process that does not die (hung driver, file system).
KILL_DEADLINE_S = 30.0
#: More than a rank has open by then.
FILES = 4096
#: What distributed sets before it spawns a worker (``distributed.nanny.pre-spawn-environ``)
#: and the hash seed it insists on. A template that is forked must have them from its start.
PRE_SPAWN = {
    "PYTHONHASHSEED": "6640",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


def reexecute() -> None:
    """Execute this very command again, with the environment that descendants need.

    Returns at once in the second life, with the garbage collector off: what follows imports much
    and leaves little garbage. `hpcdask.template.prepare_forks` turns it on again. Variables that
    the user set stay as they are, save a hash seed of 0 or ``random``, which distributed replaces
    too.
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

    The janitor of this life goes first: it would take the next one's for what is left.

    Parameters
    ----------
    janitor
        Of this rank.
    **given
        More variables for the next life.
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
    """Have what daemons may start without: standard streams, and children that can be waited for.

    Pipes would take the streams' numbers, and be lost when those are redirected.
    """
    for stream in range(3):
        try:
            os.fstat(stream)
        except OSError:  # the next file gets the least number that is free
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
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
    """Whether modules beside programs are to be found: `-P` is ours, these are the user's word."""
    return not (os.environ.get("PYTHONSAFEPATH") or sys.flags.isolated)


def add_working_folder() -> None:
    """Have modules of the current folder found, after all others, unless any user may put some."""
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


#: What happened here, and before in the processes it was forked from: seconds since launch, event.
marks: list[tuple[float, str]] = []


def mark(event: str) -> None:
    """Remember when this happened; with HPCDASK_TRACE set, print it."""
    if STARTED not in os.environ:
        return
    seconds = time.time() - float(os.environ[STARTED])
    marks.append((seconds, event))
    if os.environ.get("HPCDASK_TRACE"):
        print(f"hpcdask: {seconds:7.3f} s  {os.getpid()}  {event}", file=sys.stderr, flush=True)


def process_start(pid: int) -> str:
    """When a process started, in the kernel's ticks: with its id, it names one process for good.

    Empty if the process is gone.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[19].decode()
    except OSError:
        return ""


def owner_text(pid: int | None = None) -> str:
    """What is written into a folder of a process of this node, and names that process for good.

    Host and process id namespace come first: a process id means something only within both.
    """
    pid = os.getpid() if pid is None else pid
    space = os.readlink("/proc/self/ns/pid")
    return f"{os.uname().nodename} {space} {pid} {process_start(pid)}"


def detach_standard_streams(*, output: bool) -> None:
    """Point stdin, and with `output` stdout and stderr too, at /dev/null.

    A launcher waits until every copy of a rank's stdout is closed, and only the user's
    program may read its stdin.
    """
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    if output:
        os.dup2(null, 1)
        os.dup2(null, 2)
    if null > 2:
        os.close(null)


class Janitor:
    """Handle on the janitor process of this rank.

    Attributes
    ----------
    pid
        Process id of the janitor.
    """

    def __init__(self, pid: int, pipe: int) -> None:
        self.pid = pid
        self._pipe = pipe

    @classmethod
    def start(cls) -> Janitor:
        """Fork the janitor. Call it before heavy imports and before any thread."""
        read_end, write_end = os.pipe()
        rank = os.getpid()
        owner = owner_text()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(write_end)
                _watch(rank, owner, read_end, os.environ[MARKER])
            finally:
                os._exit(0)
        os.close(read_end)
        return cls(pid, write_end)

    def remove_at_end(self, path: str) -> None:
        """Have a file or folder removed when this rank and its processes are gone."""
        self._tell(b"later ", path)

    def remove_at_once(self, path: str) -> None:
        """Have it removed when this rank is gone: another cluster may take the name then."""
        self._tell(b"now ", path)

    def forget(self, path: str) -> None:
        """Leave it alone, whatever it is then."""
        with contextlib.suppress(OSError):  # somebody has ended the janitor
            self._tell(b"never ", path)

    def _tell(self, when: bytes, path: str) -> None:
        os.write(self._pipe, when + os.fsencode(path) + b"\0")

    def dismiss(self) -> None:
        """Have it end now, with all that this rank has forked."""
        os.close(self._pipe)
        os.waitpid(self.pid, 0)

    def release_in_child(self) -> None:
        """Drop a forked child's copy of the pipe, whose end tells that the rank is gone."""
        os.close(self._pipe)


def _watch(rank: int, owner: str, pipe: int, marker: str) -> None:
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    detach_standard_streams(output=True)
    os.closerange(3, pipe)  # MPICH leaves copies of the streams, and waits for their end
    os.closerange(pipe + 1, FILES)
    os.chdir("/")
    received = b""
    while chunk := os.read(pipe, 65536):
        received += chunk
    told = {}
    for entry in filter(None, received.split(b"\0")):
        when, _, path = entry.partition(b" ")
        told[path] = when  # the last word on each holds
    for path, when in told.items():
        if when == b"now":
            private.remove(os.fsdecode(path), owner)
    deadline = time.monotonic() + KILL_DEADLINE_S
    while time.monotonic() < deadline and (
        victims := marked_processes(marker, besides={rank, os.getpid()})
    ):
        for victim in victims:
            try:
                os.kill(victim, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(0.01)
    for path, when in told.items():
        if when == b"later":
            private.remove(os.fsdecode(path), owner)


def marked_processes(marker: str, besides: set[int]) -> list[int]:
    """Living processes whose initial environment holds `marker`.

    multiprocessing's resource tracker is left out: it ends by itself once the
    others are gone, and unlinks their semaphores on the way.
    """
    needle = f"{MARKER}={marker}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) in besides:
            continue
        try:
            with open(f"/proc/{entry}/environ", "rb") as file:
                if needle not in file.read().split(b"\0"):
                    continue
            with open(f"/proc/{entry}/cmdline", "rb") as file:
                if b"multiprocessing.resource_tracker" in file.read():
                    continue
            with open(f"/proc/{entry}/stat", "rb") as file:
                if file.read().rpartition(b")")[2].split()[0] in (b"Z", b"X"):
                    continue
        except OSError:
            continue
        found.append(int(entry))
    return found
