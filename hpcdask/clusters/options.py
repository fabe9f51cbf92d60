"""Options of a cluster, from the keywords of its class: read and checked once.

The keywords are dask-jobqueue's, those of `WorkerSpec`, and a few of hpcdask. What is not given
comes from dask-jobqueue's configuration (``jobqueue.slurm.*`` and so on), as with its own classes.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import dask.config

from hpcdask.errors import UsageError
from hpcdask.queues.base import Queue, Request
from hpcdask.queues.helpers import walltime_text
from hpcdask.queues.script import check_lines
from hpcdask.security.ports import check_size
from hpcdask.spec.parsing import LEAST_MEMORY_LIMIT
from hpcdask.spec.specs import WorkerSpec

from .configuration import configured
from .keywords import (
    SHARED,
    SHELL,
    SPEC_FIELDS,
    check_memory,
    check_names,
    job_keywords,
    number,
    refuse_other_workers,
    refuse_texts,
    worker_extra_args,
)

#: Placeholder of the scheduler's address in a preview.
NO_ADDRESS = "<scheduler's address>"


@dataclass
class JobOptions:
    """Description of one job.

    `job` is dask-jobqueue's Job, for header and options only. `gpus` and `workers` are those on all
    its nodes together; `gpus_in_header` tells whether the user's own directives ask for the GPUs.
    `python` is shell words of the interpreter.
    """

    job: Any
    spec: WorkerSpec
    gpus: int
    gpu_type: str | None
    nodes: int
    gpus_in_header: bool
    workers: int
    python: str
    walltime: timedelta | None

    @property
    def name(self) -> str:
        """The job's name."""
        return str(self.job.job_name or "dask-worker")

    @property
    def walltime_s(self) -> float | None:
        """The walltime in seconds; None where it is unlimited too."""
        if self.walltime is None or self.walltime == timedelta.max:
            return None
        return self.walltime.total_seconds()

    def request(self, tag: str, logs: str) -> Request:
        """Return the lines that the queue adds to the header."""
        return Request(
            name=self.name,
            tag=tag,
            folder=logs,
            gpus=0 if self.gpus_in_header else self.gpus,
            gpu_type=self.gpu_type,
            nodes=self.nodes,
            cores=int(self.job.worker_cores),
            memory=int(self.job.worker_memory),
        )

    def script(self, queue: Queue, cluster: str, folder: str, address: str, *, tls: bool) -> str:
        """The script of every job of a cluster, as it is submitted."""
        logs = os.path.join(folder, "logs")
        mask = os.umask(0o077)
        os.umask(mask)
        preamble = [
            "umask 077",
            f"export HPCDASK_JOB_ID={queue.job_id} HPCDASK_RESTARTS={queue.restarts}",
            f'exec >>{shlex.quote(logs)}/"$HPCDASK_JOB_ID.log" 2>&1',
            f"umask {mask:04o}",
        ]
        options = ["-P", "-m", "hpcdask.worker", "--scheduler", address]
        if tls:
            options += ["--keys", os.path.join(folder, "keys")]
        options += ["--cluster", cluster, "--workers", str(self.workers // self.nodes)]
        command = f"exec {self.python} {shlex.join([*options, *self.spec.to_argv()])}"
        return queue.script(self.job, self.request(f"hpcdask:{cluster}", logs), preamble, command)


def read_job_options(
    job_cls: type,
    queue: Queue,
    config_name: str,
    *,
    gpus_per_job: int | None,
    gpu_type: str | None,
    nodes_per_job: int,
    protocol: str | None,
    given: Mapping[str, Any],
    own: Collection[str] = (),
) -> JobOptions:
    """Read the keywords that describe a job and its workers.

    `own` are the names of the cluster's other keywords. Raises UsageError if a keyword is unknown
    or its value is not understood.
    """
    known = job_keywords(job_cls)
    check_names(given, {*own, *({name for name, *_ in queue.keywords} - known)}, known)
    refuse_other_workers(given)
    refuse_texts(queue, given, config_name)
    nodes = number(nodes_per_job, "nodes_per_job", "nodes", least=1)
    for_job = {name: value for name, value in given.items() if name in known}
    spec = _worker_spec(given, for_job, protocol, config_name)
    gpus, in_header = _gpus(gpus_per_job, nodes, spec, queue, for_job, config_name)
    if gpus % nodes:
        raise UsageError(f"gpus_per_job={gpus} cannot be shared evenly by nodes_per_job={nodes}")
    for name in sorted(known - SHELL):
        check_lines(configured(name, for_job, config_name), name)
    for what, value in (("gpu_type", gpu_type), ("name", configured("name", {}, config_name))):
        check_lines(value, what)
    job = _make_job(job_cls, for_job, config_name, processes=gpus or None)
    workers = gpus or int(job.worker_processes) * nodes
    per_node = workers // nodes
    ucx = spec.protocol == "ucx"
    check_size(spec.port_range, per_node, ucx=ucx, where="per node", option="port_range")
    return JobOptions(
        job,
        _share_of_job(spec, job, per_node, on_gpu=bool(gpus) and spec.device != "cpu"),
        gpus,
        gpu_type,
        nodes,
        in_header,
        workers,
        _python(for_job, config_name),
        _walltime(queue, for_job, config_name),
    )


def _worker_spec(
    given: Mapping[str, Any], for_job: dict[str, Any], protocol: str | None, config_name: str
) -> WorkerSpec:
    """Return the workers' specification; take `worker_extra_args` out of the job's keywords."""
    settings = worker_extra_args(for_job, config_name)
    settings |= {name: value for name, value in given.items() if name in SPEC_FIELDS}
    for name in SHARED - set(settings):
        settings[name] = configured(name, {}, config_name)
    if protocol is not None:
        settings["protocol"] = re.sub(r"^(tls|tcp)(://)?$", "tcp", protocol.removesuffix("://"))
    return WorkerSpec.from_keywords(
        {name: value for name, value in settings.items() if value is not None}
    )


def _share_of_job(spec: WorkerSpec, job: Any, per_node: int, *, on_gpu: bool) -> WorkerSpec:
    """The spec with each worker's share of the job's memory and cores, where it says neither.

    On a GPU the worker's own default counts, which is one thread.
    """
    memory = int(job.worker_memory) // per_node if spec.memory_limit is None else spec.memory_limit
    if 0 < memory < LEAST_MEMORY_LIMIT:
        raise UsageError(
            f"a job's memory of {int(job.worker_memory):,} bytes is {memory:,} for each of its "
            f"{per_node} workers on a node, less than an idle worker has: ask for more memory, or "
            f"fewer processes"
        )
    threads = None if on_gpu else max(1, int(job.worker_cores) // per_node)
    return dataclasses.replace(spec, memory_limit=memory, nthreads=spec.nthreads or threads)


def _gpus(
    asked: int | None,
    nodes: int,
    spec: WorkerSpec,
    queue: Queue,
    for_job: Mapping[str, Any],
    config_name: str,
) -> tuple[int, bool]:
    """GPUs per job, and whether the user's own directives ask for them already."""
    written, count = _gpu_directive(queue, nodes, for_job, config_name)
    if asked is not None:
        asked = number(asked, "gpus_per_job", "GPUs")
        if asked == 0 and spec.device == "cuda":
            raise UsageError("gpus_per_job=0 with device='cuda': workers on GPUs need at least one")
        if written is not None:
            raise UsageError(
                f"gpus_per_job={asked} and the directive {written!r} both request GPUs: leave one "
                f"of them out"
            )
        return asked, False
    if spec.device == "cpu":
        return 0, False
    if written is None:
        return 1, False
    return count, True


def _gpu_directive(
    queue: Queue, nodes: int, for_job: Mapping[str, Any], config_name: str
) -> tuple[str | None, int]:
    """The user's own directive or resource that requests GPUs, and how many."""
    directives = configured("job_extra_directives", for_job, config_name)
    directives = directives or configured("job_extra", for_job, config_name, [])
    lines = (
        [f"{key}={value}" for key, value in directives.items()]
        if isinstance(directives, Mapping)
        else [str(line) for line in directives]
    )
    resource = f"-l {configured('resource_spec', for_job, config_name, '')}"
    for line in [*lines, resource]:
        if (count := queue.requested_gpus(line, nodes)) is not None:
            return line, count
    return None, 0


def _make_job(
    job_cls: type, for_job: Mapping[str, Any], config_name: str, processes: int | None
) -> Any:
    """dask-jobqueue's Job, without logs and worker's command, which are not its own here."""
    keywords = {
        name: value
        for name, value in for_job.items()
        if value is not None and name not in ("log_directory", "interface", "worker_command")
    }
    if processes:
        keywords["processes"] = processes
    for name in ("cores", "processes"):
        if name in keywords:
            keywords[name] = number(keywords[name], name, name, least=1)
    check_memory(configured("memory", for_job, config_name))
    quiet: dict[str, Any] = {
        f"jobqueue.{config_name}.log-directory": None,
        f"jobqueue.{config_name}.worker-extra-args": [],
        f"jobqueue.{config_name}.extra": None,
    }
    try:
        with dask.config.set(quiet):
            return job_cls(NO_ADDRESS, "hpcdask", config_name=config_name, **keywords)
    except (ValueError, TypeError) as error:
        if "how much cores and memory" in str(error):
            raise UsageError(
                "cores and memory of a job are missing: give them, for example cores=8, "
                f'memory="64GiB", or set jobqueue.{config_name}.cores and .memory'
            ) from None
        raise UsageError(" ".join(str(error).split())) from error


def _python(for_job: Mapping[str, Any], config_name: str) -> str:
    """Return shell words as in dask-jobqueue: sites start Python by a container's command."""
    return str(configured("python", for_job, config_name) or shlex.quote(sys.executable))


def _walltime(queue: Queue, for_job: Mapping[str, Any], config_name: str) -> timedelta | None:
    text = configured("walltime", for_job, config_name)
    return None if text is None else queue.parse_walltime(walltime_text(text))
