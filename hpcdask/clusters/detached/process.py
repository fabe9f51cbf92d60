"""The process of a detached cluster as seen from outside: its start, its wait, its end."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import subprocess
import time
from typing import Any

from distributed import Security
from distributed.core import rpc

from hpcdask.errors import ClusterError, HpcdaskError, NotHere, QueueError
from hpcdask.jobs import detached
from hpcdask.jobs.detached import ENDED, ENDING, RUNNING, ControlRecord
from hpcdask.jobs.folder import ClusterFolder, new_name
from hpcdask.logs import say
from hpcdask.queues.registry import queue_class
from hpcdask.security.credentials import load_credentials, to_security
from hpcdask.security.private import write_private

from .protocol import ANSWER_S, ask
from .request import Making

#: Seconds that a detached cluster has to end, with its jobs.
END_TIMEOUT_S = 240.0
#: Seconds between two reads of its record; where these also ask the queue; and between two
#: questions to the queue about a scheduler's job.
RECORD_PAUSE_S, END_PAUSE_S, QUEUE_PAUSE_S = 0.2, 1.0, 5.0


async def start(making: Making) -> ClusterFolder:
    """Make a cluster's folder, and submit the scheduler's job or start its process."""
    request = making.request
    await asyncio.to_thread(detached.refuse_taken, request.name, making.options.base)
    folder = await asyncio.to_thread(
        ClusterFolder.create, new_name(request.name), request.system, making.options.base
    )
    script = folder.path / "control.sh"
    try:
        ControlRecord(request.name, idle_timeout_s=request.idle_timeout_s).write(folder)
        request.save(folder)
        await asyncio.to_thread(write_private, str(script), making.script(folder))
        script.chmod(0o700)
        if making.scheduler is None:  # outside of this process's tree, session and terminal
            words = ["setsid", "--fork", "bash", str(script)]
            quiet: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
            await asyncio.to_thread(lambda: subprocess.run(words, check=True, timeout=60, **quiet))
        else:
            (job_id,) = await making.options.queue.submit(str(script), 1)
            detached.record_job(folder, job_id)
    except BaseException as error:
        detached.mark_ended(folder, f"its scheduler could not be started: {error}")
        raise
    return folder


async def await_running(folder: ClusterFolder, timeout_s: float) -> ControlRecord:
    """Wait until the cluster's process can be reached, which may be long in a queue.

    Raises ClusterError if it ends, or is not there in time.
    """
    deadline, asked, told = time.monotonic() + timeout_s, 0.0, ""
    while True:
        record = await asyncio.to_thread(ControlRecord.read, folder)
        if record is None or record.state in (ENDING, ENDED):
            raise ended(folder, record.why if record else "its record is gone")
        if record.state == RUNNING:  # whether it lives, the connection shows
            return record
        if time.monotonic() - asked > QUEUE_PAUSE_S:
            asked = time.monotonic()
            try:
                if why := await detached.settle(folder):
                    raise ended(folder, why)
                waits = await _waiting(folder)
            except NotHere:
                raise
            except QueueError as error:  # it may answer later
                waits = str(error)
            if waits and waits != told:
                told = waits
                say(waits)
        if time.monotonic() > deadline:
            raise ClusterError(
                f"{told or f'{record.name} has not started'}, after {timeout_s:g} s. It goes on to "
                f'wait: hpcdask.attach("{record.name}") later, or hpcdask down {record.name}'
                f"{detached.see_log(folder)}"
            )
        await asyncio.sleep(RECORD_PAUSE_S)


async def _waiting(folder: ClusterFolder) -> str:
    """Return what a scheduler's job waits for, in words; empty if it does not wait."""
    if (seen := await detached.scheduler_status(folder)) is None:
        return ""
    reason = f" ({seen.reason})" if seen.reason else ""
    text = f"the scheduler's job {seen.id} is {seen.state}{reason}"
    return queue_class(folder.queue).judge(seen, text)


def security_of(folder: ClusterFolder, record: ControlRecord) -> Security:
    """Return the credentials of a cluster's clients."""
    return to_security(load_credentials(str(folder.keys)) if record.tls else {})


async def end(folder: ClusterFolder, why: str) -> None:
    """End a detached cluster, whether or not its process answers, and see that it is over.

    Raises HpcdaskError if it is not.
    """
    record = await asyncio.to_thread(ControlRecord.read, folder)
    if folder.ended is not None or record is None:
        return
    answers = record.state == RUNNING and await _is_told(folder, record, why)
    to_stop = not answers and record.state != ENDING
    if to_stop:  # a process that only starts reads this, and cleans up
        dataclasses.replace(record, state=ENDING, why=why).write(folder)
    deadline, problem = time.monotonic() + END_TIMEOUT_S, ""
    while True:
        try:
            if to_stop:
                await _stop(folder, record)
                to_stop = False
            now = ClusterFolder.open(folder.path)
            if now.ended is None:
                await detached.settle(now)  # its process may have died
            elif not await _is_there(now, record):
                return
            problem = ""
        except NotHere:
            raise
        except QueueError as error:  # it may answer later
            problem = f" ({error})"
        if time.monotonic() > deadline:
            raise ClusterError(
                f"{folder.name} has not ended within {END_TIMEOUT_S:g} s{problem}"
                f"{detached.see_log(folder)}"
            )
        by_queue = detached.scheduler_job(folder) is not None
        await asyncio.sleep(END_PAUSE_S if by_queue else RECORD_PAUSE_S)


async def _is_told(folder: ClusterFolder, record: ControlRecord, why: str) -> bool:
    """Send the request to end, and return whether the cluster has answered."""
    with contextlib.suppress(OSError, HpcdaskError):
        access: Any = security_of(folder, record).get_connection_args("client")
        async with (
            asyncio.timeout(ANSWER_S),
            rpc(record.address, connection_args=access) as scheduler,
        ):
            await ask(scheduler, "down", 0, why)
            return True
    return False


async def _stop(folder: ClusterFolder, record: ControlRecord) -> None:
    """End a scheduler that waits in the queue or does not answer."""
    owner = folder.owner  # until the cluster runs, the process that makes it
    if detached.scheduler_job(folder) is not None:
        await detached.cancel_scheduler(folder)
    elif owner.lives() is None:
        raise ClusterError(
            f"{folder.name} is a process of {owner.host} and does not answer: there, try "
            f"hpcdask down {folder.name}"
        )
    elif owner.lives() and record.state == RUNNING:
        os.kill(owner.pid, signal.SIGTERM)


async def _is_there(folder: ClusterFolder, record: ControlRecord) -> bool:
    """Return whether the process of a cluster that is over, or its job, is still there."""
    if detached.scheduler_job(folder) is None:
        return record.state == RUNNING and folder.owner.lives() is True
    return await detached.scheduler_status(folder) is not None


def ended(folder: ClusterFolder, why: str) -> ClusterError:
    """Return the error on a cluster that is over."""
    text = f"the cluster {folder.name} has ended: {why or 'cleaned up'}"
    return ClusterError(f"{text}{detached.see_log(folder)}")
