"""Finding the jobs of a cluster, and cancelling them until they are gone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from hpcdask.errors import NotHere, QueueError, root_cause
from hpcdask.queues.base import Queue
from hpcdask.queues.commands import COMMAND_TIMEOUT_S
from hpcdask.spec.tags import parse_tag

from .folder import ClusterFolder

#: Seconds that cancelling and verifying may take. More than an unanswered submission counts.
END_S = 150.0
#: Seconds for which a submission that was cut off may still bring jobs.
UNANSWERED_S = COMMAND_TIMEOUT_S + 15
#: Least and most seconds between two looks at the queue.
PAUSE_S = (0.5, 10.0)


async def end_jobs(
    queue: Queue,
    find: Callable[[], Awaitable[list[str]]],
    say: Callable[[str], None],
    awaited: Callable[[], bool] = lambda: False,
) -> list[str]:
    """Cancel the jobs that `find` says are not over, and return those still there after `END_S`.

    `awaited` tells whether more may come. Raises QueueError if the queue did not answer until then,
    or at once if this host may not ask it.
    """
    deadline = time.monotonic() + END_S
    pause, told = PAUSE_S[0], set[str]()

    def say_once(text: str) -> None:
        if text not in told:
            told.add(text)
            say(text)

    while True:
        live: list[str] = []
        problem: QueueError | None = None
        try:
            live = await find()
            if live:
                say_once(f"cancelling {' '.join(live)}")
                await queue.cancel(live)
        except NotHere:  # nor will it later
            raise
        except Exception as error:  # an answer that makes no sense may be any exception
            problem = QueueError(error if isinstance(error, QueueError) else root_cause(error))
            say_once(f"{problem}; trying again")
        if not live and not problem:
            if not awaited():
                return []
            say_once("waiting for the jobs of a submission that was cut off")
        if time.monotonic() > deadline:
            if problem:
                raise problem
            return live
        await asyncio.sleep(pause)
        pause = min(2 * pause, PAUSE_S[1])


async def end_cluster(folder: ClusterFolder, queue: Queue, say: Callable[[str], None]) -> list[str]:
    """Cancel the jobs with the tag of a cluster that nobody holds any more; return what is left.

    A recorded id alone proves nothing: queues use their numbers again.
    """

    async def find() -> list[str]:
        found = await queue.tagged()
        return [job_id for job_id, tag in found.items() if parse_tag(tag)[0] == folder.name]

    return await end_jobs(queue, find, say, lambda: may_bring_more(folder))


def may_bring_more(folder: ClusterFolder) -> bool:
    """Return whether the end of the notebook may have cut off a submission that goes on."""
    age = folder.unanswered_s()
    return age is not None and age < UNANSWERED_S
