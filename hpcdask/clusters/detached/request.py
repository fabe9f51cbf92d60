"""Request of a detached cluster: checked here, and left in its folder for its process."""

from __future__ import annotations

import os
import pickle
import shlex
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import dask.config
from distributed.core import Status

from hpcdask.clusters.configuration import configured, import_job_class, section
from hpcdask.clusters.keywords import job_keywords, seconds
from hpcdask.clusters.options import JobOptions, read_job_options
from hpcdask.errors import UsageError
from hpcdask.jobs.detached import ASKED, control_log, scheduler_tag
from hpcdask.jobs.folder import ClusterFolder
from hpcdask.queues.base import Request
from hpcdask.queues.registry import queue_class
from hpcdask.security.private import NotPrivate

if TYPE_CHECKING:
    from hpcdask.clusters.cluster import JobCluster

#: The module that is the cluster's process.
PROGRAM = "hpcdask.clusters.detached.control"
#: Variable with the unix time at which the scheduler's job began.
BEGAN = "HPCDASK_CONTROL_BEGAN"
#: Seconds without clients, attached notebooks and Dask tasks after which a cluster ends.
IDLE_TIMEOUT_S = 3600.0
#: What a scheduler's job asks for where nothing is said.
USUAL = {"cores": 1, "memory": "4GiB", "job_name": "dask-scheduler"}
#: Keywords of the workers' jobs that count for the scheduler's job, too.
SHARED = ("account", "project", "queue", "walltime", "python", "job_script_prologue")
#: What has a meaning in this process only.
ONLY_HERE = ("loop", "asynchronous", "silence_logs")


@dataclass(frozen=True)
class ControlRequest:
    """Request that the process of a detached cluster reads; `config` is Dask's configuration.

    `walltime_s` is that of the scheduler's job; None for no limit.
    """

    name: str
    system: str
    keywords: dict[str, Any]
    idle_timeout_s: float | None = IDLE_TIMEOUT_S
    walltime_s: float | None = None
    config: dict[str, Any] = field(default_factory=dict)

    def save(self, folder: ClusterFolder) -> None:
        """Leave it in a 0600 file of the cluster's folder.

        Raises UsageError if a keyword cannot be sent to another process.
        """
        for name, value in self.keywords.items():
            try:
                pickle.dumps(value)
            except Exception as error:
                raise UsageError(
                    f"{name}={value!r} cannot be sent to the process of a detached cluster: {error}"
                ) from None
        try:
            data = pickle.dumps(self)
        except Exception as error:
            raise UsageError(
                f"a detached cluster needs Dask's configuration in its own process, and it cannot "
                f"be sent there: {error}. Leave what is no plain value out of it"
            ) from None
        path = folder.path / ASKED
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)

    @classmethod
    def load(cls, folder: ClusterFolder) -> ControlRequest:
        """Read it, if nobody else can have written it."""
        with open(folder.path / ASKED, "rb") as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
                raise NotPrivate(1, "belongs to, or is open to, somebody else", str(file.name))
            asked: ControlRequest = pickle.load(file)
            return asked


@dataclass
class Making:
    """A detached cluster that is to be made: all is checked, and nothing was started yet.

    `preview` is the cluster that its process will make. `scheduler` describes the scheduler's job;
    None for a process of this host.
    """

    preview: JobCluster
    request: ControlRequest
    scheduler: JobOptions | None
    base: str | None

    def script(self, folder: ClusterFolder) -> str:
        """Return the script that starts the cluster's process, and ends its jobs if that dies."""
        log = shlex.quote(str(control_log(folder)))
        python = (
            self.scheduler.python
            if self.scheduler
            else next(iter(self.preview.groups.values())).options.python
        )
        command = f"{python} -P -m {PROGRAM} {shlex.quote(str(folder.path))}"
        mask = os.umask(0o077)
        os.umask(mask)
        preamble = [
            f"umask 077; exec >>{log} 2>&1; umask {mask:04o}",
            f"export {BEGAN}=$(date +%s)",
            "trap : TERM INT HUP USR2  # the process below gets it, too, and ends all in order",
            "trap '' USR1  # by Grid Engine before it stops a job",
        ]
        lines = (
            f"{command} & child=$!\nwait $child; code=$?\n"
            "while kill -0 $child 2>/dev/null; do kill -TERM $child; wait $child; code=$?; done\n"
            f"[ $code = 0 ] || exec {command} --after $code"
        )
        if self.scheduler is None:
            return "\n".join(["#!/usr/bin/env bash", *preamble, lines, ""])
        job = self.scheduler
        request = Request(
            name=job.name,
            tag=scheduler_tag(folder),
            folder=str(folder.path),
            gpus=0,
            cores=int(job.job.worker_cores),
            memory=int(job.job.worker_memory),
            alone=True,
            warned=True,
        )
        return self.preview.queue.script(job.job, request, preamble, lines)


def read_request(cls: type[JobCluster], keywords: dict[str, Any]) -> Making:
    """Check the keywords of a detached cluster of this class.

    Raises UsageError if one is unknown or not understood.
    """
    local = queue_class(cls.queue_name).is_local
    scheduler_job = keywords.pop("scheduler_job", None if local else {})
    idle = seconds(keywords.pop("idle_timeout", IDLE_TIMEOUT_S), "idle_timeout")
    keywords = {name: value for name, value in keywords.items() if name not in ONLY_HERE}
    if not (name := keywords.pop("name", None)):
        raise UsageError('detached=True: a name is missing, by which you attach: name="…"')
    if keywords.get("security") is not None and keywords["security"] is not False:
        raise UsageError("detached=True makes its own keys: leave security out")
    if scheduler_job is not None and local:
        raise UsageError("scheduler_job: this machine's jobs hang on it. Leave it out")
    if scheduler_job is not None and keywords.get("scheduler_options") is None:
        keywords["scheduler_options"] = _options_on_node(cls, keywords)
    parts = {"_start_now": lambda self: None, "_goes_to_node": scheduler_job is not None}
    never_starts: type[JobCluster] = type(cls.__name__, (cls,), parts)
    preview = never_starts(**keywords, name=name)
    preview._exits.close()
    preview._instances.discard(preview)
    preview.status = Status.closed  # it is never started
    if scheduler_job is not None:
        preview.queue.check()
    scheduler = None if scheduler_job is None else _scheduler_job(cls, scheduler_job, keywords)
    request = ControlRequest(
        name,
        cls.queue_name,
        keywords,
        idle,
        scheduler.walltime_s if scheduler else None,
        dict(dask.config.config),
    )
    return Making(preview, request, scheduler, preview._base)


def _options_on_node(cls: type[JobCluster], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The configured options of a scheduler, without the login node's interface."""
    usual = import_job_class(cls.jobqueue).default_config_name()
    config_name = keywords.get("config_name") or usual
    with section(config_name, usual):
        options = dask.config.get(f"jobqueue.{config_name}.scheduler-options", None) or {}
    return {name: value for name, value in options.items() if name != "interface"}


def _scheduler_job(
    cls: type[JobCluster], asked: Mapping[str, Any], keywords: Mapping[str, Any]
) -> JobOptions:
    """The scheduler's job, in the same words as the workers' jobs, from which it has the rest."""
    job_cls = import_job_class(cls.jobqueue)
    queue = queue_class(cls.queue_name)()
    usual = job_cls.default_config_name()
    config_name = keywords.get("config_name") or usual
    shared = {name: keywords[name] for name in SHARED if name in keywords}
    given = {**USUAL, **shared, **asked, "device": "cpu"}
    with section(config_name, usual):
        directives = configured("job_extra_directives", given, config_name, [])
        if isinstance(directives, list | tuple) and "job_extra_directives" in job_keywords(job_cls):
            mine = [one for one in directives if queue.requested_gpus(str(one)) is None]
            given["job_extra_directives"] = mine
        try:
            return read_job_options(
                job_cls,
                queue,
                config_name,
                gpus_per_job=0,
                gpu_type=None,
                nodes_per_job=1,
                protocol=None,
                given=given,
            )
        except UsageError as error:
            raise UsageError(f"scheduler_job: {error}") from None
