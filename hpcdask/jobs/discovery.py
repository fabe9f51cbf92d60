"""All jobs of this user's clusters, whoever started them: what `hpcdask list` and `down` see."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import dataclass, field

from hpcdask.errors import HpcdaskError, QueueError, UsageError
from hpcdask.logs import say
from hpcdask.queues.base import Queue
from hpcdask.queues.job_state import OVER, WAITING, JobState, QueueStatus
from hpcdask.queues.registry import queue_class, systems
from hpcdask.spec.names import parse_tag

from .detached import SCHEDULER, scheduler_job
from .folder import ClusterFolder, list_clusters
from .state import ClusterReport, JobReport, lasting

#: Seconds for a command of a queueing system that no cluster of this user is known to use.
GUESS_TIMEOUT_S = 6.0


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
        if self.folder is None:
            return None
        if scheduler_job(self.folder) is not None:  # which the queue does not show
            return False
        return self.folder.lives()

    def _report(self) -> ClusterReport:
        """Return the cluster's own word; one that is gone tells nothing."""
        return self.folder.report() if self.folder and self.lives is not False else ClusterReport()

    def problem(self) -> str:
        """Return why workers do not come, as the cluster or the queue tells."""
        waiting = [*self.jobs.values(), *filter(None, [self.scheduler])]
        by_queue = lasting(waiting, queue_class(self.queue))
        return self._report().problem or "; ".join(by_queue.values())

    @property
    def elsewhere(self) -> str | None:
        """Return the name of the other machine whose processes the jobs are, or None."""
        if self.folder is None or not queue_class(self.queue).is_local:
            return None
        host = self.folder.owner.host
        return None if host == os.uname().nodename else host

    def reports(self) -> Iterator[JobReport]:
        """Yield each job as its cluster sees it, or as the queue does.

        A cluster that is gone tells nothing, and one whose word the queue contradicts is behind.
        What waits in a notebook's own process, or is unknown, the queue does not show.
        """
        known = {job.id: job for job in self._report().jobs}
        submitted = self.folder.submitted() if self.folder else {}
        for job_id, seen in self.jobs.items():
            report = known.pop(job_id, None)
            if report is None or (report.state in WAITING) != (seen.state in WAITING):
                since, group = submitted.get(job_id), self.groups.get(job_id, "")
                yield JobReport.of_queue(seen, since, group)
            else:
                yield report
        for report in known.values():
            if self.lives and report.state in WAITING | {JobState.UNKNOWN}:
                yield report


async def survey(base: str | None) -> tuple[list[ClusterRecord], dict[str, QueueError]]:
    """Find all clusters of this user that are not over or have jobs.

    Every queueing system whose commands are here is asked, since folders may have been removed. The
    second answer is the errors of systems that a cluster in `base` uses that is not over. A line
    tells of others, unless one answers: on many sites, another system's commands are wrappers.
    """
    folders = {folder.name: folder for folder in list_clusters(base)}
    clusters: dict[str, ClusterRecord] = {}
    problems: dict[str, QueueError] = {}
    for name, folder in folders.items():
        if folder.ended is None and folder.queue in systems():
            clusters[name] = ClusterRecord(name, folder.queue, folder)
        elif folder.ended is None:
            problems[folder.queue] = QueueError(
                f"{name} is in a queue {folder.queue!r}, which no package here knows"
            )
    used = {cluster.queue for cluster in clusters.values()}
    # a system that is used comes first: another one's commands may be wrappers around its own
    names = sorted(systems(), key=lambda name: name not in used)
    queues = {name: queue_class(name)() for name in names}
    for name in queues.keys() - used:
        queues[name].timeout_s = GUESS_TIMEOUT_S
    answers = dict(zip(names, await asyncio.gather(*map(_ask, queues.values())), strict=True))
    silent = all(queues[name].is_local or isinstance(answers[name], HpcdaskError) for name in names)
    for system, answer in answers.items():
        if isinstance(answer, HpcdaskError):
            if system in used:
                problems[system] = QueueError(answer)
            elif silent and not isinstance(answer, UsageError):  # its commands are here
                say(f"warning: {answer}")
            continue
        for tag, job in answer:
            name, group = parse_tag(tag)
            if name.startswith(SCHEDULER) and (of := folders.get(name.removeprefix(SCHEDULER))):
                # the scheduler of a detached cluster, which is its notebook, as it were
                clusters.setdefault(of.name, ClusterRecord(of.name, system, of)).scheduler = job
                continue
            cluster = clusters.setdefault(name, ClusterRecord(name, system, folders.get(name)))
            if cluster.queue == system:
                cluster.jobs[job.id] = job
                cluster.groups[job.id] = group
    return list(clusters.values()), problems


async def _ask(queue: Queue) -> list[tuple[str, QueueStatus]] | HpcdaskError:
    """Return the jobs of hpcdask that are not over, with their tags."""
    try:
        queue.check("The other systems are shown")
        tags = await queue.tagged()
        jobs = await queue.query(tags) if tags else {}
    except HpcdaskError as error:
        return error
    except Exception as error:  # an answer that makes no sense must not hide the other systems'
        text = f"{queue.title} answered what hpcdask does not understand"
        return QueueError(f"{text} ({type(error).__name__}: {error}). The other systems are shown")
    found = [job for job in jobs.values() if job.state not in OVER]
    return [(tags[job.id], job) for job in found if job.id in tags]
