"""The process of a detached cluster as seen from outside: its start, its wait, its end."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import subprocess
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from distributed.core import rpc

from hpcdask.errors import ClusterError, HpcdaskError, QueueError
from hpcdask.jobs import detached
from hpcdask.jobs.detached import ENDED, ENDING, RUNNING, ControlRecord
from hpcdask.jobs.folder import ClusterFolder
from hpcdask.logs import say
from hpcdask.queues.job_state import OVER
from hpcdask.queues.registry import queue_class
from hpcdask.security.credentials import load_credentials, to_security
from hpcdask.security.private import write_private

from .request import Making
from .service import LOOK_TIMEOUT_S, call

T = TypeVar("T")
#: Seconds that a detached cluster has to end, with its jobs.
END_TIMEOUT_S = 240.0
#: Seconds between two looks at its record.
RECORD_PAUSE_S = 0.2

#: The same while its end also needs the queue's word.
LOOK_PAUSE_S = 1.0
#: Seconds between two questions to the queue about a scheduler's job.
QUEUE_PAUSE_S = 5.0


async def end(folder: ClusterFolder, why: str) -> None:
    """End a detached cluster, whether or not its process answers, and see that it is over.

    Raises HpcdaskError if it is not.
    """
    record = await asyncio.to_thread(ControlRecord.read, folder)
    if folder.ended is not None or record is None:
        return
    told = False
    if record.state == RUNNING:
        with contextlib.suppress(OSError, HpcdaskError):
            keys = load_credentials(str(folder.keys)) if record.tls else {}
            access: Any = to_security(keys).get_connection_args("client")
            async with (
                asyncio.timeout(LOOK_TIMEOUT_S),
                rpc(record.address, connection_args=access) as scheduler,
            ):
                await call(scheduler, "shutdown", why=why)
                told = True
    if not told and record.state != ENDING:
        dataclasses.replace(record, state=ENDING, why=why).write(folder)
        await _stop_process(folder)
    deadline = time.monotonic() + END_TIMEOUT_S
    asks = detached.scheduler_job(folder) is not None
    while not await _is_over(folder):
        if time.monotonic() > deadline:
            raise ClusterError(
                f"{folder.name} has not ended within {END_TIMEOUT_S:g} s. Log: "
                f"{detached.control_log(folder)}"
            )
        await asyncio.sleep(LOOK_PAUSE_S if asks else RECORD_PAUSE_S)


async def unless_ended(asking: Coroutine[Any, Any, T], folder: ClusterFolder) -> T:
    """Wait for an answer of a detached cluster. Raises OSError soon if it has ended.

    Dask tries for half a minute to connect to a scheduler that is gone.
    """
    asked = asyncio.ensure_future(asking)
    try:
        while not (await asyncio.wait([asked], timeout=LOOK_PAUSE_S))[0]:
            with contextlib.suppress(HpcdaskError):
                record = await asyncio.to_thread(ControlRecord.read, folder)
                if record is None or record.state == ENDED:
                    raise ConnectionError("it has ended")
        return await asked
    finally:
        asked.cancel()


async def _is_over(folder: ClusterFolder) -> bool:
    """Return whether all jobs and the process are gone; ends those of a process that has died."""
    now = ClusterFolder.open(folder.path)
    if now.ended is None:
        await detached.settle(now)
        return False
    if (job_id := detached.scheduler_job(folder)) is None:
        return now.owner.lives() is not True or now.owner.pid == os.getpid()
    seen = (await queue_class(folder.queue)().query([job_id])).get(job_id)
    return seen is None or seen.state in OVER


async def _stop_process(folder: ClusterFolder) -> None:
    """End a scheduler that waits in the queue or does not answer."""
    queue = queue_class(folder.queue)()
    if (job_id := detached.scheduler_job(folder)) is not None:
        await queue.cancel([job_id])
    elif folder.owner.lives() and folder.owner.pid != os.getpid():
        os.kill(folder.owner.pid, signal.SIGTERM)
    elif folder.owner.lives() is None:
        raise ClusterError(
            f"{folder.name} is a process of {folder.owner.host} and does not answer: there, try "
            f"hpcdask down {folder.name}"
        )


def ended(folder: ClusterFolder, why: str) -> ClusterError:
    log = detached.control_log(folder)
    return ClusterError(f"the cluster {folder.name} has ended: {why or 'cleaned up'}. Log: {log}")


def make_folder(making: Making) -> ClusterFolder:
    folder = ClusterFolder.create(making.preview.id, making.request.system, base=making.base)
    try:
        ControlRecord(making.request.name, idle_timeout_s=making.request.idle_timeout_s).write(
            folder
        )
        making.request.save(folder)
    except BaseException:
        detached.mark_ended(folder, "it could not be made")
        raise
    return folder


async def launch(making: Making, folder: ClusterFolder) -> None:
    """Submit the scheduler's job, or start its process."""
    script = folder.path / "control.sh"
    try:
        await asyncio.to_thread(write_private, str(script), making.script(folder))
        script.chmod(0o700)
        if making.scheduler is None:
            await asyncio.to_thread(_start_process, str(script))
        else:
            (job_id,) = await making.preview.queue.submit(str(script), 1)
            detached.record_job(folder, job_id)
    except (HpcdaskError, OSError) as error:
        detached.mark_ended(folder, f"its scheduler could not be started: {error}")
        raise


def _start_process(script: str) -> None:
    """Run a script outside of this process's tree, session and terminal."""
    null, words = subprocess.DEVNULL, ["setsid", "--fork", "bash", script]
    subprocess.run(words, stdin=null, stdout=null, stderr=null, check=True, timeout=60)


async def await_running(folder: ClusterFolder, timeout_s: float) -> ControlRecord:
    """Wait until the cluster's process can be reached, which may be long in a queue."""
    deadline, asked, told = time.monotonic() + timeout_s, 0.0, ""
    while True:
        record = await asyncio.to_thread(ControlRecord.read, folder)
        if record is None or record.state in (ENDING, ENDED):
            raise ended(folder, record.why if record else "its record is gone")
        if record.state == RUNNING:  # whether it lives, the connection shows
            return record
        if time.monotonic() - asked > QUEUE_PAUSE_S:
            asked = time.monotonic()
            if why := await detached.settle(folder):
                raise ended(folder, why)
            if (waits := await _waiting(folder)) and waits != told:
                told = waits
                say(waits)
        if time.monotonic() > deadline:
            what = told or f"{record.name} has not started"
            raise ClusterError(
                f"{what}, after {timeout_s:g} s. It goes on to wait: "
                f'hpcdask.attach("{record.name}") later, or hpcdask down {record.name}. Log: '
                f"{folder.log_path('control')}"
            )
        await asyncio.sleep(RECORD_PAUSE_S)


async def _waiting(folder: ClusterFolder) -> str:
    """Return what a scheduler's job waits for, in words; empty if it does not wait."""
    if (job_id := detached.scheduler_job(folder)) is None:
        return ""
    with contextlib.suppress(QueueError):
        queue = queue_class(folder.queue)()
        seen = (await queue.query([job_id])).get(job_id)
        if seen is not None and seen.state not in OVER:
            reason = f" ({seen.reason})" if seen.reason else ""
            return queue.judge(seen, f"the scheduler's job {job_id} is {seen.state}{reason}")
    return ""
