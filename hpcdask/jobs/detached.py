"""Records of detached clusters in their folders, and the search for a cluster by its name.

::

    BASE/CLUSTER/
        control.json   a `ControlRecord`: where the scheduler is, how it is, why it ended
        control.sh     the script of the scheduler's job or process; its log is control.log
        control.id     id of the scheduler's job; missing if it is a process
        request.json   the request for the cluster, until it has ended
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcdask.errors import QueueError, UsageError
from hpcdask.logs import say
from hpcdask.queues.job_state import OVER, WAITING, QueueStatus
from hpcdask.queues.registry import queue_class
from hpcdask.spec.records import Record

from .cancel import end_jobs
from .folder import ClusterFolder, list_clusters

RECORD, JOB_ID, REQUEST = "control.json", "control.id", "request.json"
#: Version of what detached clusters write and answer; another one is another release's.
VERSION = 3
#: Where it is in its life: nothing has started yet, it can be reached, it ends, it is over.
SUBMITTED, RUNNING, ENDING, ENDED = "submitted", "running", "ending", "ended"
#: What holds a cluster that is not detached, and one that is.
HOLDERS = NOTEBOOK, CONTROL = "notebook", "control process"
#: How the tags of schedulers' jobs begin after ``hpcdask:``. No cluster's name has two dashes.
SCHEDULER = "scheduler-"


@dataclass(frozen=True)
class ControlRecord(Record):
    """State of a detached cluster, which its control process writes.

    `name` is the user's. `walltime_s` is that of the scheduler's job; None for no limit. `why` says
    why it ends or has ended.
    """

    name: str
    state: str = SUBMITTED
    address: str = ""
    idle_timeout_s: float | None = None
    walltime_s: float | None = None
    gpus: bool = False
    why: str = ""
    version: int = VERSION

    def write(self, folder: ClusterFolder) -> None:
        """Publish the record to all processes of this user."""
        folder.write(RECORD, json.dumps(self.to_json()))

    @classmethod
    def read(cls, folder: ClusterFolder) -> ControlRecord | None:
        """Return the last record; None if this is no detached cluster.

        Raises UsageError if it cannot be read, or another release of hpcdask wrote it.
        """
        path = folder.path / RECORD
        if not path.exists():
            return None
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
            known = json.loads(path.read_text())
            if known.get("version") == VERSION:
                return cls.from_json(known)
        raise UsageError(
            f"{path} cannot be read, or is of another release of hpcdask: use the one that made "
            f"the cluster, or end it with hpcdask down {folder.name}"
        )


def holder(folder: ClusterFolder) -> str:
    """Return the name of the process that holds a cluster."""
    return CONTROL if (folder.path / RECORD).exists() else NOTEBOOK


def control_log(folder: ClusterFolder) -> Path:
    """Return the log of the scheduler's job or process; `logs` may be a folder of the user's."""
    return folder.path / "control.log"


def see_log(folder: ClusterFolder) -> str:
    """Return where to read more at the end of an error, if the scheduler's job has written."""
    path = control_log(folder)
    return f". Log: {path}" if path.exists() else ""


def scheduler_tag(folder: ClusterFolder) -> str:
    """Return the tag of the scheduler's job; the cluster's own tag ends workers' jobs."""
    return f"hpcdask:{SCHEDULER}{folder.name}"


def scheduler_job(folder: ClusterFolder) -> str | None:
    """Return the id of the scheduler's job; None if it is a process, or was not submitted."""
    with contextlib.suppress(OSError):
        return (folder.path / JOB_ID).read_text()
    return None


# Names


def records(clusters: Iterable[ClusterFolder]) -> dict[ClusterFolder, ControlRecord]:
    """Return the records of the detached clusters among these.

    A line names a cluster that is not over and whose record cannot be read, which is left out.
    """
    found = {}
    for folder in clusters:
        try:
            if (record := ControlRecord.read(folder)) is not None:
                found[folder] = record
        except UsageError as error:
            if folder.ended is None:
                say(f"warning: {folder.name} is left out: {error}")
    return found


def resolve(
    name: str, clusters: Sequence[ClusterFolder], known: dict[ClusterFolder, ControlRecord]
) -> list[ClusterFolder]:
    """Return the clusters that a user's word names, of these, which are the oldest first.

    An id names one cluster. The name of detached ones names those that are not over, else the last
    one. The start of an id names a cluster if only one has it.
    """
    if by_id := [one for one in clusters if one.name == name]:
        return by_id
    if by_name := [one for one in clusters if one in known and known[one].name == name]:
        return [one for one in by_name if one.ended is None] or by_name[-1:]
    by_start = [one for one in clusters if one.name.startswith(name)]
    return by_start if len(by_start) == 1 else []


def named(name: str, clusters: Sequence[ClusterFolder]) -> ClusterFolder | None:
    """Return the cluster that a user's word names; the newest, should there be several."""
    return next(reversed(resolve(name, clusters, records(clusters))), None)


def find(name: str, base: str | os.PathLike[str] | None = None) -> ClusterFolder:
    """Return the folder of the detached cluster that a user's word names.

    Raises UsageError if there is none, or several are not over.
    """
    known = records(list_clusters(base))
    found = resolve(name, list(known), known)
    if len(found) == 1:
        return found[0]
    if found:
        ids = ", ".join(folder.name for folder in found)
        raise UsageError(f"several detached clusters are called {name}: say which by id: {ids}")
    names = sorted({record.name for folder, record in known.items() if folder.ended is None})
    there = f"are: {', '.join(names)}" if names else "is none"
    raise UsageError(
        f"you have no detached cluster {name}. There {there}. hpcdask list shows all; one "
        f"that was made with shared_temp_directory on another machine is found by --folder"
    )


def refuse_taken(name: str, base: str | os.PathLike[str] | None) -> None:
    """Raise UsageError if a detached cluster of this name is not over."""
    for folder, record in records(list_clusters(base)).items():
        if record.name == name and folder.ended is None:
            raise UsageError(
                f"you have a detached cluster {name} already, which is {record.state}: attach to "
                f"it, or end it with hpcdask down {name}, or choose another name"
            )


# Life and death


@dataclass(frozen=True)
class Sight:
    """A detached cluster as it is seen from here; `why` it ends or has ended, else empty.

    `there` tells whether the scheduler's process or job is there; None: that cannot be seen. `job`
    is the scheduler's job while the queue has it.
    """

    record: ControlRecord | None
    there: bool | None = None
    job: QueueStatus | None = None
    why: str = ""


async def look(folder: ClusterFolder) -> Sight:
    """Return how a detached cluster is, as far as one sees. Raises QueueError without an answer."""
    job, gone = None, ""
    if (job_id := scheduler_job(folder)) is None:
        there = folder.owner.lives()
        if there is False:
            process = f"its process {folder.owner.pid} on {folder.owner.host}"
            gone = f"{process} is gone, such as by kill -9 or a reboot"
    else:
        queue = queue_class(folder.queue)()
        job = (await queue.query([job_id])).get(job_id)
        there = job is not None and job.state not in OVER
        if not there:
            end = job
            with contextlib.suppress(QueueError):
                end = job or (await queue.departed([job_id])).get(job_id)
            how = f"has ended: {end.words}" if end else "is not in the queue any more"
            gone = f"its scheduler's job {job_id} {how}"
    # read last: a cluster that is gone by now has told why
    if (record := ControlRecord.read(folder)) is None:
        return Sight(None, there, job, "its record is gone")
    if job is not None and job.state in WAITING and record.state != SUBMITTED:
        gone = f"its scheduler's job {job_id} was ended by the queue, and waits to run again"
    return Sight(record, there, job, record.why or gone)


async def settle(folder: ClusterFolder) -> Sight:
    """End what a detached cluster left whose scheduler died, and return what was seen before.

    Raises HpcdaskError if the queue does not answer, or jobs do not end.
    """
    seen = await look(folder)
    ends_itself = seen.record and seen.record.state == ENDING and seen.there is not False
    if seen.why and folder.ended is None and not ends_itself:
        await cancel_scheduler(folder)  # it may wait to run again
        await finish(folder, seen.why, lambda text: None)
    return seen


async def cancel_scheduler(folder: ClusterFolder) -> None:
    """Cancel the scheduler's job, which is known by its tag: queues use their numbers again."""
    if scheduler_job(folder) is not None:
        queue = queue_class(folder.queue)()
        tag, tags = scheduler_tag(folder), await queue.tagged()
        if found := [job_id for job_id in tags if tags[job_id] == tag]:
            await queue.cancel(found)


async def finish(folder: ClusterFolder, why: str, say: Callable[[str], None]) -> None:
    """End the jobs of a cluster whose process is gone, and mark the cluster as over.

    Raises QueueError if the queue does not answer, or jobs do not end.
    """
    folder.remove_keys()  # jobs that start only now end at once
    await end_jobs(queue_class(folder.queue)(), folder.name, say, folder=folder)
    mark_ended(folder, why)


def mark_ended(folder: ClusterFolder, why: str) -> None:
    """Note that a cluster and all its jobs are over; `why`, unless that is known.

    The request of a detached cluster goes first, since that makes room on a full disk.
    """
    (folder.path / REQUEST).unlink(missing_ok=True)
    with contextlib.suppress(UsageError):  # of another release
        if (record := ControlRecord.read(folder)) is not None:
            dataclasses.replace(record, state=ENDED, why=record.why or why).write(folder)
    folder.mark_ended()
