"""The rank's own process, which the launcher started: thin, so that it starts at once.

It owns the fork server, the program and the signals. Its agent, a process of the fork server that
has imported distributed by then, makes all decisions; the two exchange lines of JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver, get_context, resource_tracker, set_forkserver_preload
from typing import Any, NoReturn

from hpcdask.errors import UsageError
from hpcdask.logs import complain
from hpcdask.process import (
    ENDING,
    MARKER,
    PASSED_ON,
    SAME_SIGNAL_S,
    SIGNALS,
    leave,
    owner_text,
    process_start,
    process_status,
    signal_name,
)
from hpcdask.security import private

from . import orders, ranks
from .environment import SAFE_PATH, for_workers, interpreter, new_marker, without_rank
from .janitor import Janitor
from .orders import MessageStream

#: Seconds that the resource tracker gets to end.
TRACKER_S = 1.0
PRELOAD = "hpcdask.node.preload"
#: Characters that the temporary folder may have.
SHORT_PATH = 40
#: File descriptors in one message.
MAX_FDS = 253
CONTEXT = get_context("forkserver")
Agent = Callable[..., None]


class Supervisor:
    """A rank or a job's process on a node, with its janitor and its fork server.

    ``program`` is the command of the user's program, if it has one. With ``interrupts`` SIGINT is
    for a program that started this process itself, which may get several.
    """

    def __init__(
        self, variables: Mapping[str, str], program: Sequence[str] = (), *, interrupts: bool = False
    ) -> None:
        marker = new_marker()
        self._environ = without_rank(os.environ)
        self._command = program
        self._repeated = {signal.SIGINT} if interrupts else set()
        self._program: subprocess.Popen[bytes] | None = None
        self._launcher = ranks.mpi_launcher()
        self._marker = marker
        # A launcher or a queue signals all of a job's processes, also before they have handlers
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        self.janitor = Janitor.start(marker)
        self._folder = self._make_folder()
        _start_fork_server({**for_workers(os.environ, marker), **variables}, self._folder)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _make_folder(self) -> str:
        """Make the folder of the fork server's socket, whose path has 107 characters at most."""
        base = tempfile.gettempdir() if len(tempfile.gettempdir()) <= SHORT_PATH else "/tmp"
        folder = os.path.join(base, f"hpcdask-{os.getuid()}-{secrets.token_hex(8)}")
        self.janitor.remove_at_end(folder)
        os.mkdir(folder, 0o700)
        with open(os.path.join(folder, private.OWNER), "w") as file:
            file.write(owner_text())
        return folder

    def run(self, agent: Agent, *args: Any, abort: Callable[[int], None] = leave) -> NoReturn:
        """Start the agent with these arguments, serve it, and end this process as it ends.

        ``abort`` ends the whole launch with an exit code.
        """
        self._abort, self._aborts = abort, False
        line, theirs = socket.socketpair()
        self._forks, agents_forks = socket.socketpair()
        self._agent = CONTEXT.Process(
            target=_run_agent, args=(agent, theirs, agents_forks, *args), name="agent"
        )
        try:
            self._agent.start()
        except (OSError, EOFError):
            self._leave(_end_of_fork_server())
        theirs.close()
        agents_forks.close()
        asyncio.run(self._serve(line))
        raise AssertionError("it leaves by itself")

    async def _serve(self, line: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        line.setblocking(False)
        self._line = await MessageStream.over(line)
        loop.add_reader(self._forks, self._fork)
        self._handle_signals()
        while (message := await self._line.receive()) is not None:
            match orders.read(message):
                case orders.StartProgram(variables):
                    program = asyncio.create_task(self._run_program(variables))
                    program.add_done_callback(lambda task: task.result())
                case orders.SignalProgram(number):
                    self._signal_program(number)
                case orders.AbortLaunch():
                    self._aborts = True
                case orders.Clean(path, "later"):
                    self.janitor.remove_at_end(path)
                case orders.Clean(path, "now"):
                    self.janitor.remove_at_once(path)
                case orders.Clean(path, "never"):
                    self.janitor.forget(path)
        await asyncio.to_thread(self._agent.join)
        self._end()

    def _tell(self, message: orders.Message) -> None:
        self._line.send(**message.to_json())

    def _fork(self) -> None:
        """Start a process for the agent: only who started the fork server may ask it."""
        data, fds, _, _ = socket.recv_fds(self._forks, 1, MAX_FDS)
        if not data:
            asyncio.get_running_loop().remove_reader(self._forks)
            return
        answer: tuple[int, ...] = ()
        with contextlib.suppress(OSError, EOFError):
            answer = forkserver.connect_to_new_process(fds)
        with contextlib.suppress(OSError):
            socket.send_fds(self._forks, [b"f"], answer)
        for fd in (*fds, *answer):
            os.close(fd)

    # The program

    async def _run_program(self, variables: Mapping[str, str]) -> None:
        # The rank passes signals on. On a terminal the program stays in the foreground group,
        # where it may read and gets Ctrl-C itself.
        group = None if os.isatty(0) else 0
        self._program = subprocess.Popen(  # noqa: ASYNC220 (its wait is in a thread)
            self._command,
            env={**self._environ, **variables, MARKER: self._marker},
            process_group=group,
        )
        self._tell(orders.ProgramStarted(self._program.pid))
        code = await asyncio.to_thread(self._program.wait)
        self._tell(orders.ProgramEnded(code if code >= 0 else 128 - code))

    def _signal_program(self, number: int) -> None:
        from_terminal = number == signal.SIGINT and os.isatty(0)
        if self._program is not None and not from_terminal:
            self._program.send_signal(number)

    # Signals and ends

    def _handle_signals(self) -> None:
        """Tell the agent the first signal that ends the run; the second ends this process."""
        loop = asyncio.get_running_loop()
        first: list[float] = []

        def handle(number: int) -> None:
            if number in self._repeated:
                self._tell(orders.Signal(number))
            elif not first:
                first.append(time.monotonic())
                self._tell(orders.Signal(number))
            elif time.monotonic() - first[0] > SAME_SIGNAL_S:
                self._leave(128 + number)

        for number in ENDING:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup, or a shell's `&`
                loop.add_signal_handler(number, handle, number)
        for number in PASSED_ON:
            loop.add_signal_handler(number, self._signal_program, number)
        if self._launcher is not None:
            self._watch_launcher(*self._launcher, lambda: handle(signal.SIGTERM))

    def _watch_launcher(self, pid: int, start: str, lost: Callable[[], None]) -> None:
        """Call `lost` when the MPI launcher is gone: killed, Open MPI's ends nobody."""
        loop = asyncio.get_running_loop()
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            loop.call_soon(lost)
            return
        except (OSError, AttributeError):  # an old kernel, or a Python made for one (conda)
            return

        def notice() -> None:
            loop.remove_reader(fd)
            lost()

        loop.add_reader(fd, notice)
        if process_start(pid) != start:
            loop.call_soon(notice)

    def _end(self) -> None:
        """End this process: its agent has ended."""
        code = self._agent.exitcode or 0
        if code < 0:
            complain(
                f"the process that manages the workers of {socket.gethostname()} was killed by "
                f"{signal_name(-code)}. Did the node run out of memory?"
            )
            code = 1
        self._leave(code)

    def _leave(self, code: int) -> NoReturn:
        if self._program is not None:
            with contextlib.suppress(OSError):
                self._program.kill()
        _end_fork_server(besides=self.janitor.pid)
        private.remove(self._folder, owner_text())
        if self._aborts:  # SLURM ends the janitor, too
            self._abort(code)
        leave(code)


def _start_fork_server(environ: Mapping[str, str], folder: str) -> None:
    """Start multiprocessing's fork server with this environment, while the caller goes on."""
    tempfile.tempdir = folder
    set_forkserver_preload([PRELOAD])
    known = dict(os.environ)
    try:
        os.environ.clear()
        os.environ.update(environ)
        if len(interpreter()) > 1:
            os.environ[SAFE_PATH] = "1"  # the preload takes it back
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(known)
        tempfile.tempdir = None


def _end_fork_server(besides: int) -> None:
    """End the fork server and its resource tracker: the launcher waits for who holds the output."""
    children = [
        int(name)
        for name in os.listdir("/proc")
        if name.isdigit() and process_status(int(name))[2:3] == [str(os.getpid())]
    ]
    if (fd := resource_tracker.getfd()) is not None:  # it ends when nobody may tell it more
        os.close(fd)
    for pid in set(children) - {besides}:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
            if b"resource_tracker" not in file.read():
                os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + TRACKER_S
    while set(children) - {besides} and time.monotonic() < deadline:
        children = [pid for pid in children if pid != besides and not _is_reaped(pid)]
        time.sleep(0.005)


def _is_reaped(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def _end_of_fork_server() -> int:
    """Return the exit code of the fork server, which has ended, and say it if nobody has."""
    code = os.waitstatus_to_exitcode(os.waitpid(-1, 0)[1])
    if code != UsageError.exit_code:
        complain(
            f"the process from which workers start ended on {socket.gethostname()} "
            f"({signal_name(-code) if code < 0 else f'exit code {code}'}). Did the node run out of "
            f"memory?"
        )
    return code if code > 0 else 1


def _run_agent(agent: Agent, line: socket.socket, forks: socket.socket, *args: Any) -> None:
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
    agent(line, *args)
