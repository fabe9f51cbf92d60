"""Batch job: its request, its script, and its way into the queue."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shlex
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import dask.config

from hpcdask.clusters.keywords import job_keywords
from hpcdask.clusters.options import (
    NO_MEMORY,
    JobOptions,
    import_job_class,
    read_job_options,
    read_section,
)
from hpcdask.errors import QueueError, UsageError
from hpcdask.jobs.folder import BATCH, base_path, make_owned, new_name
from hpcdask.process import umask
from hpcdask.queues.base import Allocation, Queue
from hpcdask.queues.helpers import one_line
from hpcdask.queues.registry import batch_systems, queue_class
from hpcdask.runner.options import RunRequest, parse
from hpcdask.security.ports import PER_SCHEDULER, check_size
from hpcdask.security.private import write_private
from hpcdask.spec.parsing import configured_port_range


def working_folder() -> str:
    """Return the current folder, by the name that the user knows, which nodes may know too."""
    known = os.environ.get("PWD", "")
    if os.path.isabs(known) and os.path.isdir(known) and os.path.samefile(known, "."):
        return known
    return os.getcwd()


@dataclass(frozen=True, kw_only=True)
class BatchRequest(Allocation):
    """A batch job called `name`, which runs and writes its log in `folder`.

    `words` are those after ``python -m hpcdask.run``. `prologue` is shell lines before the launch,
    `container` is shell words before ``python``. If `own_gpus`, the directives request GPUs.
    """

    name: str
    words: tuple[str, ...]
    prologue: tuple[str, ...] = ()
    launcher: str | None = None
    container: str | None = None
    own_gpus: bool = False
    folder: str = field(default_factory=working_folder)


def read_request(
    system: Queue,
    *,
    program: tuple[str, ...],
    is_module: bool,
    job_name: str | None,
    run: str | None,
    mem: str | None,
    device: str | None,
    gpus_per_node: int | None,
    directives: tuple[str, ...],
    **job: Any,
) -> BatchRequest:
    """Read the options of the command line. Raises UsageError for a job that could not run."""
    words = [*read_words(run or "", "--run"), *(["-m"] if is_module else []), *program]
    launch = parse(words)
    if device and gpus_per_node:
        raise UsageError("--device cpu and --gpus-per-node: choose one of them")
    if gpus_per_node is None:
        gpus_per_node = 0 if "cpu" in (device, launch.spec.device) else 1
    # a directive may have been pasted with its prefix
    bare = tuple(line.strip().removeprefix(system.prefix).strip() for line in directives)
    own_gpus = any(system.requested_gpus(line) is not None for line in bare)
    # the nodes may not have the configuration of this machine
    if launch.spec.port_range is None and (ports := configured_port_range()):
        words = ["--port-range", ports, *words]
    # in a job, the runner expects GPUs
    if not (gpus_per_node or own_gpus) and launch.spec.device == "auto":
        words = ["--device", "cpu", *words]
    target = launch.program.target if launch.program else "dask-cluster"
    asked = BatchRequest(
        name=job_name or (target if is_module else os.path.basename(target.rstrip("/"))),
        words=tuple(words),
        memory=read_memory(mem),
        gpus_per_node=gpus_per_node,
        directives=bare,
        own_gpus=own_gpus,
        **job,
    )
    check(asked, launch)
    return asked


def read_memory(text: str | None) -> int | None:
    """Return the bytes of ``--mem``, which has sbatch's units: MB without one, and 1 G = 1024 M."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(?:\s*([KMGT])(?:i?B)?)?", text.strip(), re.I)
    if match is None:
        raise UsageError(
            f"--mem: {text!r} is not an amount of memory. Accepted, as by sbatch: 64G, 64GiB, "
            f"64000 (MB), 0 for all of the node's (SLURM)"
        )
    return int(float(match[1]) * 1024 ** (1 + "KMGT".index((match[2] or "M").upper())))


def read_words(text: str, option: str) -> list[str]:
    """Split the value of an option into shell words. Raises UsageError for unbalanced quotes."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{option}: {text!r}: {str(error).lower()}. Check its quotes") from None


def check(asked: BatchRequest, launch: RunRequest) -> None:
    """Raise UsageError for a program or a cluster that cannot run in the job."""
    read_words(asked.container or "", "--container")
    wanted = len(launch.spec.kinds())
    if wanted not in (0, asked.ranks):
        raise UsageError(
            f"--groups {' '.join(launch.spec.groups)} is for {wanted} ranks per node, and hpcdask "
            f"submit starts {asked.ranks}, one per GPU. Add --groups to the last line of the "
            f"script that --dry-run prints, and start {wanted} ranks per node there, with SLURM by "
            f"--ntasks-per-node={wanted}"
        )
    ports, ucx = launch.spec.configured().port_range, launch.spec.protocol == "ucx"
    check_size(ports, asked.ranks, ucx=ucx, more=PER_SCHEDULER, where="on the first node")
    if launch.program is None and not launch.spec.scheduler_file:
        raise UsageError(
            "which program? Name a script or -m MODULE. For a cluster that stays up: "
            '--run "--scheduler-file cluster.json"'
        )
    if launch.program and not launch.program.is_module and not asked.container:
        launch.program.check()  # one in a container's image cannot be seen from here


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

    `hpcdask list --jobs` and `down` know it by `name`, which no other job has. `text` is the
    script, and `logs` the folder of the log.
    """

    queue: Queue
    name: str
    logs: str
    text: str = ""

    def log(self, job_id: str) -> Path:
        """Return the path of the job's log."""
        return Path(self.logs) / f"hpcdask-{job_id}.log"

    def keep(self) -> Path:
        """Write the script where it stays: some systems read it only when the job starts.

        Raises UsageError if it cannot be written there, or others could change it.
        """
        configured = f"jobqueue.{self.queue.jobqueue[0]}.shared-temp-directory"
        base = base_path(dask.config.get(configured, None))
        path = base / "submitted" / f"{self.name}.sh"
        try:
            make_owned(base)
            make_owned(path.parent)
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
            return job_id
        except QueueError:  # the command may have been slow only in saying so
            with contextlib.suppress(QueueError):
                for job, tag in (await self.queue.tagged()).items():
                    if tag == f"hpcdask:{self.name}":
                        return job
            raise


async def prepare(queue: Queue, asked: BatchRequest) -> Batch:
    """Write the script of a batch job; nothing is submitted.

    Raises UsageError if the system cannot express it.
    """
    options = await _job_options(queue, asked)
    configured = dask.config.get(f"jobqueue.{queue.jobqueue[0]}.log-directory", None)
    logs = asked.folder if configured is None else str(base_path(configured))
    batch = Batch(queue, f"{BATCH}{new_name(asked.name)}", logs)
    tag = f"hpcdask:{batch.name}"
    request = replace(options.asked, tag=tag, folder=logs, alone=True)
    preamble, launch = _preamble(batch, asked), _launch_lines(queue, asked, options.python)
    for line in (*preamble, *asked.prologue, *launch):
        one_line(line, "the line")
    batch.text = queue.script(options.job, request, preamble, "\n".join(launch))
    return batch


async def _job_options(queue: Queue, asked: BatchRequest) -> JobOptions:
    """Return the whole allocation as one job of dask-jobqueue, whose class writes the header."""
    site = read_section(queue.jobqueue)
    # GPUs in the configuration are those of a worker's job
    configured = map(str, site.get("job-extra-directives") or ())
    directives = [line for line in configured if queue.requested_gpus(line) is None]
    directives += asked.directives
    known = job_keywords(import_job_class(queue.jobqueue))
    keywords: dict[str, Any] = {
        "cores": asked.cores,
        "memory": asked.memory or NO_MEMORY,
        "job_name": asked.name,
        "job_extra_directives": directives,
        "job_script_prologue": [*(site.get("job-script-prologue") or ()), *asked.prologue] or None,
        "queue": asked.queue,
        "walltime": asked.walltime,
        "account" if "account" in known else "project": asked.account,
        "device": "auto",
        "gpus_per_job": None if asked.own_gpus else asked.gpus_per_node,
        **await queue.allocation(asked, directives, site),
    }
    skipped = [*keywords.get("job_directives_skip", ()), *(site.get("job-directives-skip") or ())]
    keywords["job_directives_skip"] = skipped
    return read_job_options(queue, {k: v for k, v in keywords.items() if v != ""})


def _preamble(batch: Batch, asked: BatchRequest) -> list[str]:
    lines = [f"cd {shlex.quote(asked.folder)} || exit"]
    if not batch.queue.names_log:
        log = f"{shlex.quote(batch.logs)}/hpcdask-{batch.queue.job_id}.log"
        lines += ["umask 077", f"exec >>{log} 2>&1"]
    lines += [f"umask {umask():04o}", "export PYTHONUNBUFFERED=1"]
    if "srun" in batch.queue.launchers:
        # --export=NONE and its like are for sbatch; srun and mpirun would lose the prologue's too
        lines.append("unset SLURM_EXPORT_ENV")
    return lines


def _launch_lines(queue: Queue, asked: BatchRequest, python: str) -> list[str]:
    """Return shell lines that start the runner, one rank per GPU; `python` is in shell words."""
    launcher = asked.launcher or queue.launchers[0]
    if launcher not in queue.launchers:
        usable = " or ".join(queue.launchers)
        raise UsageError(f"--launcher {launcher} is not {queue.title}'s: use {usable}")
    python = f"{asked.container} python" if asked.container else python
    program = f"{python} -P -m hpcdask.run {shlex.join(asked.words)}"
    if launcher == "srun":
        # sbatch's --cpus-per-task does not reach srun by itself in SLURM 22.05 to 23.02
        exports = [f"export SRUN_CPUS_PER_TASK={asked.cpus_per_gpu}"] if asked.cpus_per_gpu else []
        return [*exports, f"exec srun -K {program}"]
    mpirun = f"exec mpirun -n {asked.nodes * asked.ranks}"
    if asked.nodes == 1 or queue.counts_ranks:
        return [f"{mpirun} {program}"]
    return [
        *filter(None, [queue.mpirun_setup]),
        "# each MPI has its own option for the ranks per node",
        'case "$(mpirun --version 2>&1)" in',
        f'*"Open MPI"* | *OpenRTE* | *PRRTE*) per_node="--map-by ppr:{asked.ranks}:node" ;;',
        f'*) per_node="-ppn {asked.ranks}" ;;',
        "esac",
        " ".join(filter(None, [mpirun, queue.mpirun_option, "$per_node", program])),
    ]
