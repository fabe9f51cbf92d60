"""``python -m hpcdask.clusters.detached.agent FOLDER``: submits for a cluster whose node may not.

It runs on a host that may, such as a login node, in a session of its own. It calls the cluster's
process, runs the queue's commands that it is told, and ends with the cluster, or what that left.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import socket
import sys
import time
from typing import Any

from distributed.core import rpc

from hpcdask.errors import HpcdaskError, QueueError
from hpcdask.jobs import detached
from hpcdask.jobs.detached import ENDED, ControlRecord
from hpcdask.jobs.folder import ClusterFolder
from hpcdask.logs import say
from hpcdask.queues.registry import queue_class
from hpcdask.security.credentials import load_credentials, to_security

from .relay import CALL_S, LANES

#: Seconds that a call may take beside the time for which it waits.
ANSWER_S = 30.0
#: Seconds between two attempts to call, and after which one gives up.
PAUSE_S, GIVE_UP_S = 5.0, 3600.0


async def serve(folder: ClusterFolder) -> str:
    """Run commands until the cluster ends; why it is over."""
    keys = to_security(load_credentials(str(folder.keys)))
    heard = time.monotonic()
    while (began := time.monotonic()) < heard + GIVE_UP_S:
        record = ControlRecord.read(folder)
        if record is None or record.state == ENDED:
            return "the cluster has ended"
        try:
            access: Any = keys.get_connection_args("client")
            async with rpc(record.agent, connection_args=access) as control:
                await _work(control, folder.queue)
                return "the cluster has ended, or another agent is there"
        except OSError as error:  # TimeoutError is one
            say(f"{record.agent} does not answer: {error}")
        if time.monotonic() > began + 2 * (CALL_S + ANSWER_S):  # it has answered
            heard = time.monotonic()
        with contextlib.suppress(HpcdaskError):
            if why := await detached.settle(folder):
                return why
        await asyncio.sleep(PAUSE_S)
    return f"the cluster's process has not answered for {GIVE_UP_S:g} s"


async def _work(control: rpc, system: str) -> None:
    """Until one is told to end. Raises OSError if there is no answer."""
    lanes = [asyncio.create_task(_lane(control, system)) for _ in range(LANES)]
    try:
        over, _ = await asyncio.wait(lanes, return_when=asyncio.FIRST_COMPLETED)
        for lane in over:
            lane.result()
    finally:
        for lane in lanes:
            lane.cancel()
        await asyncio.gather(*lanes, return_exceptions=True)


async def _lane(control: rpc, system: str) -> None:
    """Run one command after the other."""
    me, done = (socket.gethostname(), os.getpid()), b""
    while True:
        async with asyncio.timeout(CALL_S + ANSWER_S):
            answer = await control.exchange(agent=me, done=done)
        if "end" in answer:
            return
        done = await _obey(system, answer["order"]) if answer else b""


async def _obey(system: str, order: bytes) -> bytes:
    """Run a command of the queueing system's own, no other, and return the outcome."""
    number, command, text, env, timeout_s = pickle.loads(order)
    queue = queue_class(system)()
    queue.timeout_s = timeout_s
    outcome: Any
    try:
        if command[0] not in (*queue.programs, *queue.more_programs):
            raise QueueError(f"the agent runs commands of {queue.title} only, not {command[0]}")
        outcome = await queue.run_here(*command, input=text, env=env)
    except QueueError as error:
        outcome = error
    return pickle.dumps((number, outcome))


def main(path: str) -> int:
    """From the command line to the exit code."""
    os.umask(0o077)
    log = os.open(os.path.join(path, "agent.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir("/")
    try:
        say(f"the agent ends: {asyncio.run(serve(ClusterFolder.open(path)))}")
    except (HpcdaskError, OSError) as error:
        say(f"the agent ends: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
