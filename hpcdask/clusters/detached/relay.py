"""The queue's commands in the process of a detached cluster whose node may not run all of them.

What the node may not run, as trying shows, an agent on another host runs; see `agent`. It calls
here with this user's keys, over TLS only, and waits for commands.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from distributed import Security
from distributed.core import Server

from hpcdask.errors import NoAnswer, QueueError, Refused, UsageError
from hpcdask.queues.base import Queue
from hpcdask.queues.helpers import words

Done = subprocess.CompletedProcess[str]
#: Seconds that an agent waits for a command before it asks again, and after which a silent one
#: counts as gone.
CALL_S, GONE_S = 5.0, 15.0
#: Seconds that the first agent has to come, and beside a command's limit until its outcome is here.
START_S, MARGIN_S = 60.0, 15.0
#: Commands that an agent runs at a time.
LANES = 4


@dataclass
class Order:
    """A command for the agent, which got it at `given`, by the monotonic clock; 0 until then."""

    command: Sequence[str]
    input: str | None
    env: Mapping[str, str] | None
    timeout_s: float
    outcome: asyncio.Future[Done] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    given: float = 0.0


@dataclass
class Relay:
    """Takes the place of `Queue.run_here`.

    `access` gives the host at which to listen, and the keys. `address` is where an agent is to
    call; empty while none is needed. `needed` is called when one is, and `arrived` when it is here.
    """

    name: str
    access: Callable[[], tuple[str, Security]]
    needed: Callable[[], None]
    arrived: Callable[[], None]
    address: str = ""
    _denied: dict[str, str] = field(default_factory=dict)  # commands, and why
    _unfit: set[str] = field(default_factory=set)  # agents' hosts that may not either
    _agent: tuple[str, int] | None = None  # host and process id
    _seen: float = 0.0  # when it called last; before the first one, when it was needed
    _orders: asyncio.Queue[Order | None] = field(default_factory=asyncio.Queue)
    _given: dict[float, Order] = field(default_factory=dict)
    _server: Server | None = None

    async def run(
        self, queue: Queue, command: Sequence[str], input: str | None, env: Mapping[str, str] | None
    ) -> Done:
        """Run a command here if this node may. Raises Refused if nobody can, and QueueError."""
        program = command[0]
        if program not in self._denied:
            why = "there is none"
            if shutil.which(program) is not None:
                done = await queue.run_here(*command, input=input, env=env)
                if not _is_denied(queue, done):
                    return done
                why = words(done)
            self._denied[program] = why
        if self._server is None:
            await self._listen()
        done = await self._by_agent(Order(command, input, env, queue.timeout_s))
        if _is_denied(queue, done) and self._agent is not None:  # another host may be better
            self._unfit.add(self._agent[0])
            self._agent, self._seen = None, 0.0
        return done

    async def _listen(self) -> None:
        host, security = self.access()
        if not security.require_encryption:
            raise UsageError(
                f"{self._missing()}. An agent on another host could do so, but only with TLS: "
                f"leave security=False out"
            )
        self._server, self._seen = Server({"exchange": self.exchange}), time.monotonic()
        await self._server.listen(f"tls://{host}:0", **security.get_listen_args("scheduler"))
        self.address = self._server.address
        self.needed()

    def _missing(self) -> str:
        program, why = next(reversed(self._denied.items()))
        return f"submissions are not possible: {socket.gethostname()} may not run {program} ({why})"

    @property
    def lacks_agent(self) -> bool:
        """Whether an agent is needed, and none is there."""
        silent = time.monotonic() > self._seen + GONE_S and len(self._given) < LANES
        return bool(self.address) and (self._agent is None or silent)

    @property
    def problem(self) -> str:
        """Why commands cannot be run, and what to do; empty while they can, or an agent starts."""
        if not self.lacks_agent:
            return ""
        start = f"run hpcdask attach {self.name}"
        if self._agent is not None:
            return (
                f"submissions are not possible: the agent on {self._agent[0]} is gone; {start} "
                f"there to start it again"
            )
        if time.monotonic() < self._seen + START_S:
            return ""
        return f"{self._missing()}; {start} on a host that may, to start an agent there"

    async def _by_agent(self, order: Order) -> Done:
        self._orders.put_nowait(order)
        try:
            while not order.outcome.done():
                if problem := self.problem:
                    refused = Refused(problem, for_now=True, fewer=False)
                    raise NoAnswer(problem) if order.given else refused
                if order.given and time.monotonic() > order.given + order.timeout_s + MARGIN_S:
                    raise NoAnswer(f"the agent has not told how {order.command[0]} ended")
                await asyncio.wait([order.outcome], timeout=1.0)
            return order.outcome.result()
        finally:
            order.outcome.cancel()
            self._given.pop(order.given, None)

    async def exchange(self, agent: tuple[str, int], done: bytes) -> dict[str, bytes]:
        """Take the outcome of an agent's command and give it the next; ``end`` if it is to end."""
        came, agent = self.lacks_agent, (agent[0], agent[1])
        if agent[0] in self._unfit or (agent != self._agent and not came):
            return {"end": b""}
        self._agent, self._seen = agent, time.monotonic()
        if came:
            self.arrived()
        if done:
            number, outcome = pickle.loads(done)
            order = self._given.pop(number, None)
            if order is not None and not order.outcome.done():
                failed = isinstance(outcome, QueueError)
                (order.outcome.set_exception if failed else order.outcome.set_result)(outcome)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CALL_S):
                return await self._next()
        return {}

    async def _next(self) -> dict[str, bytes]:
        while (order := await self._orders.get()) is not None:
            if not order.outcome.done():
                order.given = time.monotonic()
                self._given[order.given] = order
                told = (order.given, order.command, order.input, order.env, order.timeout_s)
                return {"order": pickle.dumps(told)}
        return {"end": b""}

    async def close(self) -> None:
        """Tell the agent that the cluster has ended."""
        if self._server is not None:
            for _ in range(LANES):
                self._orders.put_nowait(None)
            await asyncio.sleep(0.1)  # for the answers to go; without one, it sees the end itself
            await self._server.close()


def _is_denied(queue: Queue, done: Done) -> bool:
    return bool(done.returncode and queue.denied.search(done.stderr + done.stdout))
