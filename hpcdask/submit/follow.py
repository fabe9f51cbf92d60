"""Waiting for a batch job: its log as it grows, its end, its exit code."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from hpcdask.errors import QueueError
from hpcdask.jobs.cancel import end_jobs
from hpcdask.jobs.logs import GrowingFile
from hpcdask.jobs.state import lasting
from hpcdask.queues.base import Queue
from hpcdask.queues.job_state import OVER, JobState, QueueStatus

from .batch import Batch

#: Least and most seconds between two questions to the queue; it is asked less and less often.
POLL_S = (0.5, 10.0)
#: Seconds between two looks at the log.
LOOK_S = 0.25
#: Seconds for which a queue may not answer, or not show the job.
SILENT_S, MISSING_S = 600.0, 30.0

Say = Callable[[str], None]


async def submit_and_wait(batch: Batch, say: Say) -> int:
    """Submit a job, copy its log to stdout, and return the exit code of its program.

    SIGINT and SIGTERM cancel the job; a second one leaves it. Raises Refused or QueueError if the
    queue does not take the job, or does not answer for long.
    """
    loop = asyncio.get_running_loop()
    stops: asyncio.Queue[signal.Signals] = asyncio.Queue()
    signals = (signal.SIGINT, signal.SIGTERM)
    for number in signals:
        loop.add_signal_handler(number, stops.put_nowait, number)
    try:
        job_id = await batch.submit()  # an answer that is given up would leave a job
        tell(batch, job_id, say)
        log = GrowingFile(batch.log(job_id))
        waiting: asyncio.Future[Any] = asyncio.ensure_future(wait(batch.queue, job_id, log, say))
        stopped = asyncio.ensure_future(stops.get())
        await asyncio.wait({waiting, stopped}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
    if waiting.done():
        return result(batch, job_id, waiting.result(), say)
    waiting.cancel()
    number = stopped.result()
    say(f"{number.name}: cancelling job {job_id} (a second one leaves it)")
    try:
        await end_jobs(batch.queue, batch.name, lambda _: None)
        say(f"job {job_id} is cancelled and gone")
    except QueueError as error:
        say(f"error: {error}")
    copy(log, say)
    return 128 + int(number)


def copy(log: GrowingFile, say: Say) -> None:
    """Write what is new in a log to stdout."""
    try:
        sys.stdout.buffer.write(log.read())
        sys.stdout.flush()
    except BrokenPipeError:
        say(f"nobody reads stdout any more; the wait goes on. Log: {log.path}")
        with open(os.devnull, "wb") as null:
            os.dup2(null.fileno(), sys.stdout.fileno())


def tell(batch: Batch, job_id: str, say: Say) -> None:
    """Say which job it is, and where its log is."""
    say(f"job {job_id} submitted to {batch.queue.title}")
    say(f"log {batch.log(job_id)}")


async def wait(queue: Queue, job_id: str, log: GrowingFile, say: Say) -> QueueStatus:
    """Wait for the end of a job, and copy its log meanwhile.

    Raises QueueError if the queue does not answer for `SILENT_S`, or has forgotten the job.
    """
    pause, told = POLL_S[0], ""
    answered = shown = time.monotonic()
    while True:
        now, text = time.monotonic(), told
        try:
            found = await queue.query([job_id]) or await queue.departed([job_id])
            answered = now
        except QueueError as error:
            if now > answered + SILENT_S:
                raise
            found, shown, text = {}, now, f"{error}; asking again"
        if seen := found.get(job_id):
            if seen.state in OVER:
                copy(log, say)
                return seen
            runs = f"runs{f' on {seen.nodes}' if seen.nodes else ''}"
            how = runs if seen.state is JobState.RUNNING else f"is {seen.words}"
            lasts = lasting([seen], type(queue)).values()
            shown, text = now, ". ".join([f"job {job_id} {how}", *lasts])
        elif now > shown + MISSING_S:
            raise QueueError(
                f"{queue.title} does not show job {job_id} any more, and how it ended is not "
                f"known. See its log {log.path}"
            )
        if text != told:
            say(text)
            told, pause = text, POLL_S[0]
        until = time.monotonic() + pause
        while time.monotonic() < until:
            copy(log, say)
            await asyncio.sleep(min(pause, LOOK_S))
        pause = min(2 * pause, POLL_S[1])


def result(batch: Batch, job_id: str, seen: QueueStatus, say: Say) -> int:
    """Return the exit code for a job that is over; say what is wrong, and where to read more."""
    code = seen.exit_code
    if seen.state is JobState.COMPLETED and code == 0:
        return 0
    say(f"job {job_id} has ended: {seen.words}{', exit code unknown' if code is None else ''}")
    of_program = seen.state in (JobState.COMPLETED, JobState.FAILED)
    code = code if of_program and code and 0 < code < 256 else 1
    if seen.copies:
        say(f"the queue runs it again as job {', '.join(seen.copies)}")
    if not batch.log(job_id).exists():
        say(f"it has written no log at {batch.log(job_id)}")
    return code
