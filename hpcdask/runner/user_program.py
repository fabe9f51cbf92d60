"""Rank 0's hold on the user's program."""

from __future__ import annotations

import os
import signal
import socket
from typing import Any

from hpcdask.bootstrap.environment import own_process
from hpcdask.bootstrap.orders import MessageStream, ProgramEnded, SignalProgram, StartProgram
from hpcdask.client import scheduler_file
from hpcdask.client.connect import program_variables
from hpcdask.logs import say
from hpcdask.node.host_agent import HostAgent
from hpcdask.process import TERM_DEADLINE_S, process_status
from hpcdask.queues.environment import job_id
from hpcdask.security.credentials import Credentials

from .protocol import Events


class UserProgram:
    """The program of a run: a child of the rank's own process, the one that started it, or none.

    `line` leads to the program that started this rank, or is None: its end is the program's.
    `signalled` is the signal that ends the run, once there was one; a child has started if it
    `runs`.
    """

    def __init__(
        self,
        agent: HostAgent,
        events: Events,
        *,
        exists: bool,
        line: socket.socket | None,
        timeout: float,
    ) -> None:
        self.exists = exists
        self.attached = line is not None
        self.signalled: int | None = None
        self.runs = False
        self._agent, self._events, self._line, self._timeout = agent, events, line, timeout
        self._cluster: dict[str, Any] = {}

    def start(self, address: str, credentials: Credentials, *, on_gpus: bool) -> None:
        """Start the program while the workers come up; its first ``Client()`` waits for `ready`."""
        if not self.exists:
            return
        self._cluster = {"address": address, "file": self._file, "on_gpus": on_gpus}
        scheduler_file.write(
            self._file,
            address,
            credentials,
            job=job_id(),
            gpus=on_gpus,
            ready=self.attached,
            timeout=self._timeout,
        )
        if not self.attached:
            self._agent.tell(StartProgram(program_variables(**self._cluster)))

    def ready(self) -> None:
        """Let the program have the cluster."""
        if self._line is not None:
            self._events.start(self._attend(self._line))
        elif self.exists:
            scheduler_file.note(self._file, ready=True)

    async def _attend(self, line: socket.socket) -> None:
        line.setblocking(False)
        channel = await MessageStream.over(line)
        channel.send(**self._cluster)
        while await channel.receive() is not None:
            pass
        self._events.put(ProgramEnded(0))

    @property
    def _file(self) -> str:
        return os.path.join(self._agent.scratch, "scheduler.json")

    def process(self) -> dict[str, int]:
        """Return the id of its process by its name in `hpcdask stacks`, if it runs on this node."""
        if self.attached:
            status = process_status(own_process())
            return {"program": int(status[2])} if status else {}
        return {}

    def end_by(self, number: int) -> None:
        """End the program by a signal, and the run some time later."""
        self.signalled = number
        self.signal(number)
        if number != signal.SIGINT:
            name = signal.Signals(number).name
            say(f"{name}: the run ends, and the program has {TERM_DEADLINE_S:g} s to end before it")
            self._events.put_later(TERM_DEADLINE_S, "program")

    def signal(self, number: int) -> None:
        """Send the program a signal."""
        self._agent.tell(SignalProgram(number))
