"""Cancelling the jobs of a cluster until they are gone."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Collection

from hpcdask.errors import NotHere, QueueError, root_cause
from hpcdask.queues.base import Queue
from hpcdask.spec.names import parse_tag

from .folder import ClusterFolder

#: Seconds that cancelling and verifying may take. More than an unanswered submission counts.
END_S = 150.0
#: Seconds for which a submission that was cut off may still bring jobs.
UNANSWERED_S = Queue.timeout_s + 15
#: Least and most seconds between two looks at the queue.
PAUSE_S = (0.5, 10.0)


async def end_jobs(
    queue: Queue,
    name: str,
    say: Callable[[str], None],
    *,
    folder: ClusterFolder | None = None,
    only: Collection[str] | None = None,
) -> None:
    """Cancel the jobs with the tag of a cluster or batch job, until the queue has none.

    A recorded id alone proves nothing: queues use their numbers again. Jobs that a submission noted
    in `folder` may still bring are waited for. `only` names the jobs that are meant, if not all.

    Raises QueueError if jobs are left after `END_S`, or the queue did not answer until then, or at
    once if this host may not ask it.
    """
    deadline, pause = time.monotonic() + END_S, PAUSE_S[0]
    say_once = functools.cache(say)  # each text
    while True:
        live: list[str] = []
        problem: QueueError | None = None
        try:
            tags = await queue.tagged()
            ours = [job for job, tag in tags.items() if parse_tag(tag)[0] == name]
            live = [job for job in ours if only is None or job in only]
            if live:
                say_once(f"cancelling {' '.join(live)}")
                await queue.cancel(live)
        except NotHere:  # nor will it later
            raise
        except Exception as error:  # an answer that makes no sense may be any exception
            problem = error if isinstance(error, QueueError) else QueueError(root_cause(error))
            say_once(f"{problem}; trying again")
        if not live and not problem:
            if folder is None or not folder.awaits_jobs(UNANSWERED_S):
                return
            say_once("waiting for the jobs of a submission that was cut off")
        if time.monotonic() > deadline:
            raise problem or QueueError(f"these jobs do not end: {' '.join(live)}")
        await asyncio.sleep(pause)
        pause = min(2 * pause, PAUSE_S[1])
