"""Records of detached clusters in their folders, and the search for one by its name.

::

    BASE/CLUSTER/
        control.json   a `ControlRecord`: where the scheduler is, how it is, why it ended
        control.sh     the script of the scheduler's job or process; its log is control.log
        control.id     id of the scheduler's job; missing if it is a process
        asked.pickle   what was asked of it, until it has ended
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcdask.errors import HpcdaskError, QueueError, UsageError
from hpcdask.queues.job_state import OVER, WAITING
from hpcdask.queues.registry import queue_class
from hpcdask.security import private

from .folder import ClusterFolder, list_clusters
from .owner import append

RECORD, JOB_ID, ASKED = "control.json", "control.id", "asked.pickle"
#: Where it is in its life: nothing has started yet, it can be reached, it ends, it is over.
SUBMITTED, RUNNING, ENDING, ENDED = "submitted", "running", "ending", "ended"
#: What holds a cluster that is not detached, and one that is.
HOLDERS = NOTEBOOK, CONTROL = "notebook", "control process"
#: How the tags of schedulers' jobs begin after ``hpcdask:``. No cluster's name has two dashes.
SCHEDULER = "scheduler-"


@dataclass(frozen=True)
class ControlRecord:
    """A detached cluster as its control process tells it.

    `name` is the user's. `why` says why it ends or has ended. `ends` is when the walltime of its
    scheduler is reached, as a unix time; None if it has none. `tls` tells whether keys are needed.
    """

    name: str
    state: str = SUBMITTED
    address: str = ""
    idle_timeout_s: float | None = None
    ends: float | None = None
    gpus: bool = False
    tls: bool = True
    why: str = ""

    def write(self, folder: ClusterFolder) -> None:
        """Tell it to all processes of this user."""
        text = json.dumps(dataclasses.asdict(self), indent=2)
        private.write_private(str(folder.path / RECORD), text)

    @classmethod
    def read(cls, folder: ClusterFolder) -> ControlRecord | None:
        """Return the last record; None if this is no detached cluster."""
        try:
            return cls(**json.loads(private.read(str(folder.path / RECORD))))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            raise UsageError(f"{folder.path / RECORD} cannot be read: {error}") from None


def holder(folder: ClusterFolder) -> str:
    """Return the name of the process that holds a cluster."""
    return CONTROL if (folder.path / RECORD).exists() else NOTEBOOK


def control_log(folder: ClusterFolder) -> Path:
    """The log of the scheduler's job or process; `logs` may be a folder of the user's."""
    return folder.path / "control.log"


def scheduler_tag(folder: ClusterFolder) -> str:
    """Return the tag of the scheduler's job; the cluster's own tag ends workers' jobs."""
    return f"hpcdask:{SCHEDULER}{folder.name}"


def record_job(folder: ClusterFolder, job_id: str) -> None:
    """Note the scheduler's job."""
    append(folder.path / JOB_ID, f"{job_id}\n")


def scheduler_job(folder: ClusterFolder) -> str | None:
    """The id of the scheduler's job; None if it is a process, or was not submitted."""
    with contextlib.suppress(OSError):
        return (folder.path / JOB_ID).read_text().strip() or None
    return None


def find(name: str, base: str | os.PathLike[str] | None = None) -> ClusterFolder:
    """The folder of the detached cluster of this name, or of this id.

    One that is over is found where no other has the name. Raises UsageError if there is none, or
    several are not over.
    """
    known = [(folder, ControlRecord.read(folder)) for folder in list_clusters(base)]
    detached = [(folder, record) for folder, record in known if record is not None]
    found = [folder for folder, record in detached if name in (record.name, folder.name)]
    live = [folder for folder in found if folder.ended is None]
    if len(live) > 1:
        raise UsageError(
            f"{len(live)} detached clusters are called {name}: say which by its id: "
            f"{', '.join(folder.name for folder in live)}"
        )
    if live or found:
        return (live or found)[-1]
    names = sorted({record.name for folder, record in detached if folder.ended is None})
    raise UsageError(
        f"you have no detached cluster {name}. There {_are(names)}. hpcdask list shows all; one "
        f"that was made with shared_temp_directory on another machine is found by --folder"
    )


def named(name: str, clusters: Sequence[ClusterFolder]) -> ClusterFolder | None:
    """The cluster of this id, the newest detached one of this name, or the only id with this start.

    `clusters` of any kind, the oldest first.
    """
    records = [ControlRecord.read(one) for one in clusters]
    found = [one for one in clusters if one.name == name] or [
        one for one, record in zip(clusters, records, strict=True) if record and record.name == name
    ]
    if found:
        return found[-1]
    found = [one for one in clusters if one.name.startswith(name)]
    return found[0] if len(found) == 1 else None


def _are(names: list[str]) -> str:
    return f"are: {', '.join(names)}" if names else "is none"


def refuse_taken(name: str, base: str | os.PathLike[str] | None) -> None:
    """Raise UsageError if a detached cluster of this name is not over."""
    for folder in list_clusters(base):
        record = ControlRecord.read(folder)
        if record is not None and record.name == name and folder.ended is None:
            raise UsageError(
                f"you have a detached cluster {name} already, which is {record.state}: "
                f'hpcdask.attach("{name}"), or end it with hpcdask down {name}, or choose another '
                f"name"
            )


async def why_gone(folder: ClusterFolder) -> str | None:
    """Why a detached cluster has ended or ends; None while it lives, as far as one sees from here.

    Raises QueueError if the queue does not answer.
    """
    record = ControlRecord.read(folder)
    if record is None or record.state in (ENDING, ENDED):
        return record.why if record else "its record is gone"
    if (job_id := scheduler_job(folder)) is None:
        owner = folder.owner
        if owner.lives() is not False:
            return None
        return f"its process {owner.pid} on {owner.host} is gone, such as by kill -9 or a reboot"
    queue = queue_class(folder.queue)()
    seen = (await queue.query([job_id])).get(job_id)
    if seen is not None and seen.state not in OVER:
        if record.state == SUBMITTED or seen.state not in WAITING:
            return None
        return f"its scheduler's job {job_id} was ended by the queue, and waits to run again"
    if seen is None:
        with contextlib.suppress(QueueError):
            seen = (await queue.departed([job_id])).get(job_id)
    again = ControlRecord.read(folder)  # it may have ended in good order meanwhile, or told why
    if again is not None and (again.why or again.state in (ENDING, ENDED)):
        return again.why
    if seen is None:
        return f"its scheduler's job {job_id} is not in the queue any more"
    code = "" if seen.exit_code is None else f", exit code {seen.exit_code}"
    reason = f" ({seen.reason})" if seen.reason else ""
    return f"its scheduler's job {job_id} has ended: {seen.state}{reason}{code}"


def mark_ended(folder: ClusterFolder, why: str) -> None:
    """Note that a detached cluster and all its jobs are over; `why`, unless that is known."""
    record = ControlRecord.read(folder) or ControlRecord(folder.name)
    (folder.path / ASKED).unlink(missing_ok=True)
    folder.remove_keys()  # first, since it makes room on a full disk
    dataclasses.replace(record, state=ENDED, why=record.why or why).write(folder)
    folder.mark_ended()


async def settle(folder: ClusterFolder) -> str | None:
    """End what a detached cluster left whose scheduler died; why it is gone, None while it lives.

    Raises HpcdaskError if the queue does not answer, or jobs do not end.
    """
    from .cancel import end_cluster

    why = await why_gone(folder)
    if why is None or folder.ended is not None:
        return why
    record = ControlRecord.read(folder)
    if record is not None and record.state == ENDING and await _ends_by_itself(folder):
        return why
    folder.remove_keys()
    queue = queue_class(folder.queue)()
    if (job_id := scheduler_job(folder)) is not None:
        await queue.cancel([job_id])  # it may wait to run again
    left = await end_cluster(folder, queue, lambda text: None)
    if left:
        raise HpcdaskError(f"{folder.name}: these jobs do not end: {' '.join(left)}")
    mark_ended(folder, why)
    return why


async def _ends_by_itself(folder: ClusterFolder) -> bool:
    """Return whether the process that says it ends its jobs is there to do so."""
    if (job_id := scheduler_job(folder)) is None:
        return folder.owner.lives() is not False
    seen = (await queue_class(folder.queue)().query([job_id])).get(job_id)
    return seen is not None and seen.state not in OVER
