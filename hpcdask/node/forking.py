"""The processes that a rank forks before it starts an event loop, a thread, MPI or CUDA.

All descend from a rank that has imported everything once. Each waits on a socket to be told
what to do, and ends when the socket does.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

from hpcdask.bootstrap.janitor import Janitor
from hpcdask.process import detach_standard_streams

from .channel import MessageStream
from .gpu_probe import GpuProbe


@dataclass
class ForkedProcess:
    """A forked process, the rank's end of its socket, and whether it was seen to end."""

    pid: int
    sock: socket.socket
    ended: bool = False

    async def channel(self) -> MessageStream:
        """The socket as a channel. Call it once."""
        self.sock.setblocking(False)
        return await MessageStream.over(self.sock)

    async def wait(self) -> int:
        """Wait for its end, in a thread, and return the exit code: 128 + n after signal n."""
        _, status = await asyncio.to_thread(os.waitpid, self.pid, 0)
        self.ended = True
        code = os.waitstatus_to_exitcode(status)
        return code if code >= 0 else 128 - code

    def send_signal(self, number: int) -> None:
        """Send a signal; to a process that is gone, do nothing."""
        if self.ended:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


@dataclass
class Forker:
    """Forks children that hold nothing of the rank but their own socket.

    The pipes of janitor and probe only the rank may hold.
    """

    janitor: Janitor
    probe: GpuProbe | None = None
    _socks: list[socket.socket] = field(default_factory=list)

    def close_in_child(self) -> None:
        """Drop what belongs to the rank."""
        self.janitor.release_in_child()
        if self.probe is not None:
            self.probe.release_in_child()
        for sock in self._socks:
            sock.close()

    def fork(self, body: Callable[[socket.socket], None]) -> ForkedProcess:
        """Fork a child that runs `body` and ends. Returns in the rank only."""
        child = self.fork_into()
        if isinstance(child, ForkedProcess):
            return child
        code = 1
        try:
            detach_standard_streams(output=False)
            body(child)
            code = 0
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(code)

    def fork_into(self) -> ForkedProcess | socket.socket:
        """Fork. Returns a `ForkedProcess` in the rank, and the child's own end in the child."""
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            ours.close()
            self.close_in_child()
            return theirs
        theirs.close()
        self._socks.append(ours)
        return ForkedProcess(pid, ours)
