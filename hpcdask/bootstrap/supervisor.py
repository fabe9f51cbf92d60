"""A rank's own process: it has the fork server, the program and the signals; its agent decides."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver, get_context, resource_tracker, set_forkserver_preload
from pkgutil import resolve_name
from types import FrameType
from typing import Any, NoReturn

from hpcdask import process
from hpcdask.errors import UsageError
from hpcdask.logs import complain
from hpcdask.security import private

from . import orders, ranks
from .environment import SAFE_PATH, for_workers, interpreter, without_rank
from .janitor import Janitor

PRELOAD = "hpcdask.node.preload"
#: Characters that the temporary folder may have.
SHORT_PATH = 40
#: File descriptors in one message.
MAX_FDS = 253
CONTEXT = get_context("forkserver")
#: Called in the agent, with what it does. By name: only the fork server has imported distributed.
AGENT = "hpcdask.node.host_agent:run_agent"


class Supervisor:
    """A rank's or a job's own process, with its janitor, its fork server and its program."""

    def __init__(
        self, variables: Mapping[str, str], program: Sequence[str] = (), *, interrupts: bool = False
    ) -> None:
        self._environ = without_rank(os.environ)
        self._command = program
        self._repeated = {signal.SIGINT} if interrupts else set()
        self._program: subprocess.Popen[bytes] | None = None
        self._code: int | None = None
        self._launcher = _open_launcher()
        self._marker = f"{os.urandom(12).hex()}.{os.getpid()}"
        # A launcher or a queue signals all of a job's processes, also before they have handlers
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, process.SIGNALS)
        self.janitor = Janitor(self._marker)
        # of the fork server's socket, whose path has 107 characters at most
        base = tempfile.gettempdir() if len(tempfile.gettempdir()) <= SHORT_PATH else "/tmp"
        announce = self.janitor.remove_at_end
        folder = private.make_owned_folder(base, process.owner_text(), announce)
        _start_fork_server({**for_workers(os.environ, self._marker), **variables}, folder)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def run(self, work: str, *args: Any, abort: Callable[[int], None] | None = None) -> NoReturn:
        """Start the agent, which does `work`, and end as it ends; `abort` ends the whole launch."""
        self._abort, self._aborts = abort, False
        self._line, agents_line = socket.socketpair()
        forks, agents_forks = socket.socketpair()
        given = agents_line, agents_forks, work, *args
        self._agent = CONTEXT.Process(target=_run_agent, args=given, name="agent")
        try:
            self._agent.start()
        except (OSError, EOFError):
            self._leave(_end_of_fork_server())
        agents_line.close()
        agents_forks.close()
        _run_beside(_serve_forks, forks)
        self._handle_signals()
        # a connection is reset by an agent that has not read what it was told
        with contextlib.suppress(ConnectionResetError), self._line.makefile("rb") as lines:
            for line in lines:
                self._obey(orders.read(json.loads(line)))
        self._agent.join()
        code = self._agent.exitcode or 0 if self._code is None else self._code
        if code < 0:
            complain(
                f"the process that manages the workers of {socket.gethostname()} was killed by "
                f"{process.signal_name(-code)}. Did the node run out of memory?"
            )
            code = 1
        self._leave(code)

    def _tell(self, message: orders.Message) -> None:
        with contextlib.suppress(OSError):  # the agent has ended
            self._line.sendall(orders.to_line(message.to_json()))

    def _obey(self, order: orders.Message) -> None:
        match order:
            case orders.StartProgram(variables):
                self._start_program(variables)
            case orders.Signal(number):
                self._signal_program(number)
            case orders.AbortLaunch():
                self._aborts = True
            case orders.Clean(path):
                self.janitor.remove_at_end(path)
            case orders.Leaving(code):
                self._code = code

    # The program

    def _start_program(self, variables: Mapping[str, str]) -> None:
        # The rank passes signals on. On a terminal the program stays in the foreground group,
        # where it may read and gets Ctrl-C itself.
        group = None if os.isatty(0) else 0
        self._program = program = subprocess.Popen(
            self._command,
            env={**self._environ, **variables, process.MARKER: self._marker},
            process_group=group,
        )
        self._tell(orders.ProgramStarted(program.pid))

        def wait() -> None:
            code = program.wait()
            self._tell(orders.ProgramEnded(code if code >= 0 else 128 - code))

        _run_beside(wait)

    def _signal_program(self, number: int) -> None:
        from_terminal = number == signal.SIGINT and os.isatty(0)
        if self._program is not None and not from_terminal:
            self._program.send_signal(number)

    # Signals and ends

    def _handle_signals(self) -> None:
        """Tell the agent the first signal that ends the run; the second ends this process."""
        first: list[float] = []

        def handle(number: int, frame: FrameType | None = None) -> None:
            if number in self._repeated:
                self._tell(orders.Signal(number))
            elif not first:
                first.append(time.monotonic())
                self._tell(orders.Signal(number))
            elif time.monotonic() - first[0] > process.SAME_SIGNAL_S:
                self._leave(128 + number)

        for number in process.ENDING:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup, or a shell's `&`
                signal.signal(number, handle)
        for number in process.PASSED_ON:
            signal.signal(number, lambda number, frame: self._signal_program(number))
        if self._launcher is not None:
            _run_beside(_follow_launcher, self._launcher)

    def _leave(self, code: int) -> NoReturn:
        if self._program is not None:
            with contextlib.suppress(OSError):
                self._program.kill()
        self.janitor.finish()
        if self._aborts and self._abort:
            self._abort(code)
        process.leave(code)


def _run_beside(work: Callable[..., None], *args: Any) -> None:
    threading.Thread(target=work, args=args, daemon=True).start()


def _open_launcher() -> int | None:
    """Return a descriptor that can be read once the MPI launcher is gone; None without one."""
    if (pid := ranks.mpi_launcher()) is not None:
        # an old kernel, or a Python made for one (conda), has none
        with contextlib.suppress(OSError, AttributeError):
            return os.pidfd_open(pid)
    return None


def _follow_launcher(launcher: int) -> None:
    """End this process with the MPI launcher: one that is killed, Open MPI's, ends nobody."""
    select.select([launcher], [], [])
    os.kill(os.getpid(), signal.SIGTERM)


def _serve_forks(forks: socket.socket) -> None:
    """Start processes for the agent: only who started the fork server may ask it."""
    with contextlib.suppress(OSError):  # the agent has ended
        while fds := socket.recv_fds(forks, 1, MAX_FDS)[1]:
            answer: tuple[int, ...] = ()
            with contextlib.suppress(OSError, EOFError):
                answer = forkserver.connect_to_new_process(fds)
            socket.send_fds(forks, [b"f"], answer)
            for fd in (*fds, *answer):
                os.close(fd)


def _fork_resource_tracker() -> None:
    """Run multiprocessing's resource tracker in a fork: by itself it starts another Python."""
    reads, writes = os.pipe()
    if os.fork() == 0:
        try:
            os.closerange(3, reads)
            os.closerange(reads + 1, process.FILES)
            warnings.simplefilter("ignore")  # semaphores of processes that were killed
            resource_tracker.main(reads)
        finally:
            os._exit(0)
    os.close(reads)
    vars(resource_tracker).update(ensure_running=lambda: None, getfd=lambda: writes)


def _start_fork_server(environ: Mapping[str, str], folder: str) -> None:
    safe = {SAFE_PATH: "1"} if len(interpreter()) > 1 else {}  # the preload takes it back
    known, tempfile.tempdir = dict(os.environ), folder
    set_forkserver_preload([PRELOAD])
    _fork_resource_tracker()
    try:
        os.environ.clear()
        os.environ.update({**environ, **safe})
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(known)
        tempfile.tempdir = None


def _end_of_fork_server() -> int:
    """Return the exit code of the fork server, which has ended, and say it if nobody has."""
    code = os.waitstatus_to_exitcode(os.waitpid(-1, 0)[1])
    if code != UsageError.exit_code:
        how = process.signal_name(-code) if code < 0 else f"exit code {code}"
        where = f"the process from which workers start ended on {socket.gethostname()}"
        complain(f"{where} ({how}). Did the node run out of memory?")
    return code if code > 0 else 1


def _run_agent(line: socket.socket, forks: socket.socket, work: str, *args: Any) -> None:
    """Be the agent: processes that it starts come from the same fork server."""
    lock = threading.Lock()

    def connect_to_new_process(fds: list[int]) -> tuple[int, int]:
        with lock:
            socket.send_fds(forks, [b"f"], fds)
            _, answer, _, _ = socket.recv_fds(forks, 1, 2)
        if len(answer) != 2:
            raise OSError("the fork server is gone: did the node run out of memory?")
        return answer[0], answer[1]

    vars(forkserver)["connect_to_new_process"] = connect_to_new_process
    resolve_name(AGENT)(line, resolve_name(work), *args)
