"""The script of a batch job, and its way into the queue."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
from dataclasses import dataclass
from pathlib import Path

import dask.config

from hpcdask.clusters import configuration
from hpcdask.errors import QueueError, Refused, UsageError
from hpcdask.jobs.folder import BATCH, base_path
from hpcdask.jobs.owner import check_owned
from hpcdask.queues.base import Queue, Request
from hpcdask.queues.registry import batch_systems, queue_class
from hpcdask.security.private import make_folders, write_private

from . import header
from .request import BatchRequest


def find_system() -> str | None:
    """Return the queueing system whose commands are on this machine, or None."""
    for name in batch_systems():
        with contextlib.suppress(UsageError):
            queue_class(name)().check()
            return name
    return None


@dataclass
class Batch:
    """A batch job that is ready to be submitted.

    `label` names its files, as no other job's. `text` is the script, and `logs` the folder of its
    log.
    """

    queue: Queue
    label: str
    logs: str
    text: str

    @property
    def tag(self) -> str:
        """Tag by which `hpcdask jobs` knows the job."""
        return f"hpcdask:{BATCH}{self.label}"

    def log(self, job_id: str) -> Path:
        """Return the path of the job's log."""
        return Path(self.logs) / f"hpcdask-{job_id}.log"

    def keep(self) -> Path:
        """Write the script where it stays: some systems read it only when the job starts.

        Raises UsageError if it cannot be written there, or others could change it.
        """
        configured = f"jobqueue.{self.queue.jobqueue[0]}.shared-temp-directory"
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
        """Submit the job, and return its id.

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
    queue = queue_class(system)()
    settings = await header.read(queue, asked)
    logs = configuration.log_directory({}, queue.jobqueue[0]) or asked.folder
    batch = Batch(queue, asked.label(), logs, "")
    request = Request(
        name=asked.name,
        tag=batch.tag,
        folder=logs,
        gpus=0 if settings.gpus_in_header else settings.gpus,
        cores=asked.cores,
        memory=asked.memory or 0,
        alone=True,
    )
    launch = _launch_lines(queue, asked, settings.python)
    batch.text = queue.script(settings.job, request, _preamble(batch, asked), "\n".join(launch))
    return batch


def _preamble(batch: Batch, asked: BatchRequest) -> list[str]:
    mask = os.umask(0o077)
    os.umask(mask)
    lines = [f"cd {shlex.quote(asked.folder)} || exit"]
    if not batch.queue.names_log:
        log = f"{shlex.quote(batch.logs)}/hpcdask-{batch.queue.job_id}.log"
        lines += ["umask 077", f"exec >>{log} 2>&1"]
    return [*lines, f"umask {mask:04o}", "export PYTHONUNBUFFERED=1"]


def _launch_lines(queue: Queue, asked: BatchRequest, python: str) -> list[str]:
    """Return shell lines that start the runner, one rank per GPU; `python` is in shell words."""
    launcher = asked.launcher or queue.launchers[0]
    if launcher not in queue.launchers:
        usable = " or ".join(queue.launchers)
        raise UsageError(f"--launcher {launcher} is not {queue.title}'s: use {usable}")
    if asked.container:
        python = f"{asked.container} python"
    program = f"{python} -P -m hpcdask.run {shlex.join(asked.words)}"
    if launcher == "srun":
        # sbatch's --cpus-per-task does not reach srun by itself in SLURM 22.05 to 23.02
        cpus = asked.cpus_per_gpu
        exports = [f"export SRUN_CPUS_PER_TASK={cpus}"] if cpus else []
        return [*exports, f"exec srun -K {program}"]
    total = f"-n {asked.nodes * asked.ranks}"
    if asked.nodes == 1 or queue.counts_ranks:
        return [f"exec mpirun {total} {program}"]
    return [
        *filter(None, [queue.mpirun_setup]),
        "# each MPI has its own option for the ranks per node",
        'case "$(mpirun --version 2>&1)" in',
        f'*"Open MPI"* | *OpenRTE* | *PRRTE*) per_node="--map-by ppr:{asked.ranks}:node" ;;',
        f'*) per_node="-ppn {asked.ranks}" ;;',
        "esac",
        " ".join(
            ["exec mpirun", total, *filter(None, [queue.mpirun_option]), "$per_node", program]
        ),
    ]
