"""Rank 0's hold on the user's program."""

from __future__ import annotations

import os
import signal

from hpcdask.logs import say
from hpcdask.node.forking import ForkedProcess
from hpcdask.process import TERM_DEADLINE_S

from .agent import RankAgent
from .events import Events


class UserProgram:
    """The program of a run: a process of rank 0, the one that started this rank, or none.

    Its end is the event ``program``; if it does not end in time after a signal, ``deadline``.
    `line` leads to the program that started this rank, or is None: its end is the program's.
    `signalled` is the signal that ends the run, once there was one.
    """

    def __init__(
        self,
        agent: RankAgent,
        events: Events,
        *,
        exists: bool,
        line: ForkedProcess | None,
    ) -> None:
        self.exists = exists
        self.attached = line is not None
        self.signalled: int | None = None
        self._agent, self._events, self._line = agent, events, line

    def start(self, address: str, on_gpus: bool) -> None:
        """Start the program: the cluster is ready at this address, with workers on GPUs or none."""
        if self._line is not None:
            self._events.start(self._attend(self._line, address, on_gpus))
        elif self._agent.program is not None:
            self._agent.start_program(address, on_gpus)
            self._events.start(self._wait(self._agent.program))

    async def _wait(self, program: ForkedProcess) -> None:
        self._events.happened("program", await program.wait())

    async def _attend(self, line: ForkedProcess, address: str, on_gpus: bool) -> None:
        channel = await line.channel()
        channel.send(**self._agent.order_to_start(address, on_gpus).to_json())
        while await channel.receive() is not None:
            pass
        self._events.happened("program", 0)

    def process(self) -> dict[str, int]:
        """The id of its process by its name in `hpcdask stacks`, if it runs on this node."""
        if self.attached:
            return {"program": os.getppid()}
        return {"program": self._agent.program.pid} if self._agent.program is not None else {}

    def end_by(self, number: int) -> None:
        """A signal ends the run: the program gets it, and some time."""
        self.signalled = number
        self.signal(number)
        if number != signal.SIGINT:
            name = signal.Signals(number).name
            say(f"{name}: the run ends, and the program has {TERM_DEADLINE_S:g} s to end before it")
            self._events.later(TERM_DEADLINE_S, "deadline")

    def signal(self, number: int) -> None:
        """Send it a signal."""
        self._agent.pass_on(number)
