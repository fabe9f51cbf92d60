"""All jobs of this user's clusters, whoever started them: what `hpcdask jobs` and `cleanup` see."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import dataclass, field

from hpcdask.errors import HpcdaskError, UsageError
from hpcdask.queues.base import Queue
from hpcdask.queues.job_state import OVER, QueueStatus
from hpcdask.queues.registry import queue_class, systems
from hpcdask.spec.tags import parse_tag

from .detached import SCHEDULER, scheduler_job
from .folder import ClusterFolder, list_clusters
from .state import WAITING, JobReport, JobState

#: Seconds for a queueing system that no cluster's folder names.
GUESS_TIMEOUT_S = 10.0


@dataclass
class ClusterRecord:
    """A cluster of this user that is not over, or has jobs; `jobs` are those in the queue.

    `folder` is None if this base does not know it: removed, or in another one. `scheduler` is the
    scheduler's job of a detached cluster. `groups` are those of the jobs that have one.
    """

    name: str
    queue: str
    folder: ClusterFolder | None
    jobs: dict[str, QueueStatus] = field(default_factory=dict)
    scheduler: QueueStatus | None = None
    groups: dict[str, str] = field(default_factory=dict)

    @property
    def lives(self) -> bool | None:
        """Return whether its notebook lives; None if that cannot be seen from here."""
        if self.scheduler is not None:
            return True
        if self.folder and self.folder.ended is None and scheduler_job(self.folder):
            return False  # the queue does not show it
        return self.folder.lives() if self.folder else None

    @property
    def elsewhere(self) -> str | None:
        """The other machine whose processes its jobs are, if they are."""
        known = self.folder and self.queue in systems()
        if self.folder is None or not (known and queue_class(self.queue).is_local):
            return None
        host = self.folder.owner.host
        return None if host == os.uname().nodename else host

    def reports(self) -> Iterator[tuple[JobReport, bool]]:
        """Each job as its cluster sees it, and True, or as the queue does, and False.

        A cluster that is gone tells nothing, and one whose word the queue contradicts is behind.
        What waits in a notebook's own process, or is unknown, the queue does not show.
        """
        known = self.folder.reports() if self.folder and self.lives is not False else {}
        submitted = self.folder.submitted() if self.folder else {}
        for job_id, seen in self.jobs.items():
            report = known.pop(job_id, None)
            if report is None or report.contradicts(seen):
                since, group = submitted.get(job_id), self.groups.get(job_id, "")
                yield JobReport.of_queue(seen, since, group), False
            else:
                yield report, True
        for report in known.values():
            if self.lives and report.state in WAITING | {JobState.UNKNOWN}:
                yield report, True


async def survey(base: str | None) -> tuple[list[ClusterRecord], dict[str, str]]:
    """Find all clusters of this user that are not over or have jobs.

    Every queueing system that a cluster's folder in `base` names is asked, and those whose commands
    are there, since folders may have been removed. The second answer is the systems of theirs that
    did not answer, with what is wrong.
    """
    folders = {folder.name: folder for folder in list_clusters(base)}
    named = {
        folder.queue
        for folder in folders.values()
        if folder.ended is None or folder.submissions()  # else it has nothing there
    }
    clusters = {
        folder.name: ClusterRecord(folder.name, folder.queue, folder)
        for folder in folders.values()
        if folder.ended is None
    }
    problems = {}
    # a system that a folder names comes first: another one's commands may be wrappers around it
    names = sorted(systems(), key=lambda name: name not in named)
    answers = await asyncio.gather(*(_ask(name, name in named) for name in names))
    for system, answer in zip(names, answers, strict=True):
        if isinstance(answer, HpcdaskError):
            if system in named:
                problems[system] = str(answer)
            continue
        for job_id, (tag, seen) in answer.items():
            name, group = parse_tag(tag)
            folder = folders.get(name)
            if (of := folders.get(name.removeprefix(SCHEDULER))) and of.name != name:
                # the scheduler of a detached cluster, which is its notebook, as it were
                clusters.setdefault(of.name, ClusterRecord(of.name, system, of)).scheduler = seen
                continue
            found = clusters.setdefault(name, ClusterRecord(name, system, folder))
            if found.queue == system:
                found.jobs[job_id] = seen
                found.groups[job_id] = group
    return list(clusters.values()), problems


async def _ask(name: str, named: bool) -> dict[str, tuple[str, QueueStatus]] | HpcdaskError:
    """The jobs with a tag of hpcdask that are not over, by id."""
    try:
        queue: Queue = queue_class(name)()
        queue.check("The other systems are shown", "nothing is known of the jobs of")
        if not named:
            queue.timeout_s = GUESS_TIMEOUT_S
        tags = await queue.tagged()
        seen = await queue.query(tags) if tags else {}
    except HpcdaskError as error:
        return error
    return {
        job_id: (tags[job_id], job)
        for job_id, job in seen.items()
        if job_id in tags and job.state not in OVER
    }


def choose(
    clusters: list[ClusterRecord], names: tuple[str, ...], every: bool
) -> list[ClusterRecord]:
    """Return the clusters of a `survey` whose jobs `hpcdask cleanup` cancels.

    Those named, by the start of a name where only one has it, and without names all whose notebook
    is gone; with `every` also those of this base whose notebook cannot be seen from here. Raises
    UsageError if there is no cluster of a name.
    """
    known = [cluster.name for cluster in clusters]
    names = tuple(_full(name, known) for name in names)
    if unknown := [name for name in names if name not in known]:
        raise UsageError(
            f"no cluster of yours that is not over is called {', '.join(unknown)}. "
            f"There {'are: ' + ', '.join(known) if known else 'is none'}"
        )
    if names:
        return [cluster for cluster in clusters if cluster.name in names]
    # what has no folder here may live in another base
    return [c for c in clusters if c.folder and (c.lives is False or (every and c.lives is None))]


def _full(name: str, known: list[str]) -> str:
    """The only known name that begins so."""
    found = [one for one in known if one.startswith(name)]
    return found[0] if len(found) == 1 and name else name
