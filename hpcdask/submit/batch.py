"""The script of a batch job, and its way into the queue."""

from __future__ import annotations

import asyncio
import os
import shlex
from dataclasses import dataclass
from pathlib import Path

import dask.config

from hpcdask.clusters import configuration
from hpcdask.errors import QueueError, Refused, UsageError
from hpcdask.jobs.folder import BATCH, base_path
from hpcdask.jobs.owner import check_owned
from hpcdask.queues import helpers, slurm
from hpcdask.queues.base import Queue, Request
from hpcdask.queues.pbs import PbsQueue
from hpcdask.queues.registry import queue_class
from hpcdask.security.private import make_folders, write_private

from . import header
from .launch_lines import COUNTED, launch_lines
from .request import BatchRequest

#: In the order in which they are looked for: SLURM, Grid Engine and Moab may have a qsub too.
SYSTEMS = ("slurm", "lsf", "sge", "moab", "pbs", "oar", "htcondor")


class SingleSlurmQueue(slurm.SlurmQueue):
    """SLURM, asked for one job rather than for an array of one."""

    async def limit(self) -> int:
        """One: no array."""
        return 1


def door(system: str) -> Queue:
    """The door to a queueing system for single jobs."""
    return SingleSlurmQueue() if system == "slurm" else queue_class(system)()


def find_system() -> str | None:
    """The queueing system whose commands are on this machine, or None."""
    return next((system for system in SYSTEMS if _has(door(system))), None)


def _has(queue: Queue) -> bool:
    """Whether this machine has a system's commands."""
    try:
        queue.check()
    except UsageError:
        return False
    return True


@dataclass
class Batch:
    """A batch job that is ready to be submitted.

    `system` is a name in `hpcdask.queues.registry`. `label` names its files, as no other job's.
    `text` is the script, and `logs` the folder of its log.
    """

    system: str
    queue: Queue
    label: str
    logs: str
    text: str

    @property
    def tag(self) -> str:
        """By which `hpcdask jobs` knows the job."""
        return f"hpcdask:{BATCH}{self.label}"

    def log(self, job_id: str) -> Path:
        """Where the job writes."""
        return Path(self.logs) / f"hpcdask-{job_id}.log"

    def keep(self) -> Path:
        """Write the script where it stays: some systems read it only when the job starts.

        Raises UsageError if it cannot be written there, or others could change it.
        """
        configured = f"jobqueue.{self.system}.shared-temp-directory"
        base = base_path(dask.config.get(configured, None))
        path = base / "submitted" / f"{self.label}.sh"
        try:
            for folder in (base, path.parent):
                make_folders(str(folder))
                check_owned(folder)
            Path(self.logs).mkdir(parents=True, exist_ok=True)
            write_private(str(path), self.text)
            path.chmod(0o700)
        except OSError as error:
            raise UsageError(
                f"the script cannot be kept at {path}: {error.strerror}. Set {configured} in "
                f"Dask's configuration to a folder that the nodes share"
            ) from None
        return path

    async def submit(self) -> str:
        """Submit it, and return the job's id.

        Raises Refused, with the queue's own text, if the queue does not want it. Raises QueueError
        if the queue does not answer and the job is not there.
        """
        script = await asyncio.to_thread(self.keep)
        try:
            (job_id,) = await self.queue.submit(str(script), 1)
        except Refused:
            raise
        except QueueError:
            # the command may have been slow only in saying so
            try:
                tags = await self.queue.tagged()
            except QueueError:
                tags = {}
            found = [job for job, tag in tags.items() if tag == self.tag]
            if len(found) != 1:
                raise
            job_id = found[0]
        return job_id


async def prepare(system: str, asked: BatchRequest) -> Batch:
    """Write the script of a batch job; nothing is submitted.

    Raises UsageError if the system, a name in `hpcdask.queues.registry`, cannot express it.
    """
    queue = door(system)
    torque = system == "moab"
    if isinstance(queue, PbsQueue) and system == "pbs" and _has(queue) and find_system() != "sge":
        torque = await queue.flavour() != "pbs"
    settings = header.read(system, queue, asked, torque=torque)
    batch = Batch(
        system,
        queue,
        asked.label(),
        configuration.log_directory({}, system) or asked.folder,
        "",
    )
    request = Request(
        name=asked.name,
        tag=batch.tag,
        folder=batch.logs,
        gpus=0 if settings.gpus_in_header else settings.gpus,
        cores=asked.cores,
        memory=asked.memory or 0,
    )
    launch = launch_lines(system, asked, settings.python, counted=system in COUNTED and not torque)
    text = queue.script(settings.job, request, _preamble(batch, asked), "\n".join(launch))
    batch.text = _adjusted(batch, request, text)
    return batch


def _preamble(batch: Batch, asked: BatchRequest) -> list[str]:
    mask = os.umask(0o077)
    os.umask(mask)
    lines = [f"cd {shlex.quote(asked.folder)} || exit"]
    if batch.system != "slurm":  # which writes to a file that can be named, while the job runs
        log = f"{shlex.quote(batch.logs)}/hpcdask-{batch.queue.job_id}.log"
        lines += ["umask 077", f"exec >>{log} 2>&1"]
    return [*lines, f"umask {mask:04o}", "export PYTHONUNBUFFERED=1"]


def _adjusted(batch: Batch, request: Request, text: str) -> str:
    """The script of a cluster's job as one of its own."""
    # A job that is started again is not replaced here: it runs again
    guard = helpers.first_life(request, batch.queue.job_id)
    lines = [line for line in text.removesuffix("\n").split("\n") if line != guard]
    if batch.system == "slurm":
        lines = [
            line.replace(slurm.ARRAY_LOG, "hpcdask-%j.log")
            if line.startswith(slurm.OUTPUT)
            else line
            for line in lines
        ]
    return "\n".join(lines) + "\n"
