"""Submits jobs, in as few commands as the queue and the site's limits admit."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from hpcdask.errors import NoAnswer, NotHere, QueueError, Refused
from hpcdask.jobs.folder import ClusterFolder
from hpcdask.queues.base import Queue

#: Seconds between two attempts at a limit of the site; doubled up to the second number.
RETRY_S = (15.0, 300.0)


@dataclass
class Submitter:
    """Submits the script of one group; `add` gets new ids, `missing` says how many are to come.

    A queue that is at a limit, or silent, is not tried again before `retry_at`, in unix time.
    `unanswered` tells whether the queue may have jobs whose ids it did not tell.
    """

    queue: Queue
    folder: ClusterFolder
    tag: str
    add: Callable[[Collection[str]], None]
    missing: Callable[[], int]
    group: str = ""
    retry_at: float = 0.0
    unanswered: bool = False
    _retry_s: float = RETRY_S[0]

    async def submit(self, count: int, known: Collection[str]) -> None:
        """Submit this many jobs, or fewer if fewer are missing by then; `known` are there already.

        Raises Refused if the queue does not take them, and NoAnswer if not all are there; what is
        left for `retry_at` is ``for_now``. Raises QueueError if nobody knows what is there.
        """
        try:
            if self.unanswered:
                await self.adopt(known)
            largest = max(1, await self.queue.limit())
        except QueueError as error:
            self._wait()
            if error.for_now or isinstance(error, NotHere):
                raise
            raise NoAnswer(str(error)) from error
        before = set(known)
        try:
            while (count := min(count, self.missing())) > 0:
                before, some = set(known), min(count, largest)
                try:
                    await self._submit(some)
                except Refused as error:
                    if not error.fewer or some == 1:
                        raise
                    largest = some // 2
                    continue
                count -= some
            self._retry_s = RETRY_S[0]
        except QueueError as error:
            if not isinstance(error, Refused):
                self.unanswered = True
                with contextlib.suppress(QueueError):
                    if await self.adopt(before) >= count:
                        return
            if error.for_now:
                self._wait()
            raise

    def _wait(self) -> None:
        self.retry_at = time.time() + self._retry_s
        self._retry_s = min(2 * self._retry_s, RETRY_S[1])

    async def _submit(self, count: int) -> None:
        """Submit jobs with one command."""
        # the shared file system may be slow
        submission = await asyncio.to_thread(self.folder.new_submission, self.group)
        ids = await self.queue.submit(str(submission.script), count)
        self.add(ids)
        await asyncio.to_thread(submission.record, ids)

    async def adopt(self, known: Collection[str]) -> int:
        """Add the jobs that a submission made though its command gave no answer; how many.

        Raises QueueError when the queue does not say.
        """
        tagged = await self.queue.tagged()
        mine = [job_id for job_id, tag in tagged.items() if tag == self.tag]
        if found := [job_id for job_id in mine if job_id not in known]:
            await asyncio.to_thread(lambda: self.folder.new_submission(self.group).record(found))
            self.add(found)
        return len(found)
