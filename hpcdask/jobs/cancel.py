"""Finding the jobs of a cluster, and cancelling them until they are gone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from hpcdask.errors import NotHere, QueueError, root_cause
from hpcdask.queues.base import Queue
from hpcdask.queues.commands import COMMAND_TIMEOUT_S
from hpcdask.spec.names import parse_tag

from .folder import ClusterFolder

#: Seconds that cancelling and verifying may take. More than an unanswered submission counts.
END_S = 150.0
#: Seconds for which a submission that was cut off may still bring jobs.
UNANSWERED_S = COMMAND_TIMEOUT_S + 15
#: Least and most seconds between two looks at the queue.
PAUSE_S = (0.5, 10.0)


async def end_jobs(
    queue: Queue,
    is_meant: Callable[[str, str], bool],
    say: Callable[[str], None],
    may_bring_more: Callable[[], bool] = lambda: False,
) -> None:
    """Cancel the jobs whose id and tag `is_meant` chooses, until the queue has none.

    A recorded id alone proves nothing: queues use their numbers again. Raises QueueError if jobs
    are left after `END_S`, or the queue did not answer until then, or at once if this host may not
    ask it.
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
            live = [one for one, tag in (await queue.tagged()).items() if is_meant(one, tag)]
            if live:
                say_once(f"cancelling {' '.join(live)}")
                await queue.cancel(live)
        except NotHere:  # nor will it later
            raise
        except Exception as error:  # an answer that makes no sense may be any exception
            problem = error if isinstance(error, QueueError) else QueueError(root_cause(error))
            say_once(f"{problem}; trying again")
        if not live and not problem:
            if not may_bring_more():
                return
            say_once("waiting for the jobs of a submission that was cut off")
        if time.monotonic() > deadline:
            raise problem or QueueError(f"these jobs do not end: {' '.join(live)}")
        await asyncio.sleep(pause)
        pause = min(2 * pause, PAUSE_S[1])


async def end_cluster(folder: ClusterFolder, queue: Queue, say: Callable[[str], None]) -> None:
    """Cancel the jobs of a cluster that nobody holds any more; raise as `end_jobs` does."""

    def is_meant(job_id: str, tag: str) -> bool:
        return parse_tag(tag)[0] == folder.name

    await end_jobs(queue, is_meant, say, lambda: may_bring_more(folder))


def may_bring_more(folder: ClusterFolder) -> bool:
    """Return whether the end of the notebook may have cut off a submission that goes on."""
    return time.time() - max(folder.unanswered(), default=0) < UNANSWERED_S
