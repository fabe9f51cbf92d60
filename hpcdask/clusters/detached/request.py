"""Request of a detached cluster: checked here, and left in its folder for its process."""

from __future__ import annotations

import importlib
import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import dask.config

from hpcdask.clusters.keywords import seconds
from hpcdask.clusters.options import ClusterOptions, JobOptions, read_job_options, read_section
from hpcdask.errors import UsageError
from hpcdask.jobs.detached import REQUEST, VERSION, control_log, scheduler_tag
from hpcdask.jobs.folder import ClusterFolder
from hpcdask.process import umask
from hpcdask.queues.registry import queue_class
from hpcdask.security import private

from .protocol import plain

if TYPE_CHECKING:
    from hpcdask.clusters.cluster import JobCluster

#: The module that is the cluster's process.
PROGRAM = "hpcdask.clusters.detached.control"
#: Variable with the unix time at which the scheduler's job began.
BEGAN = "HPCDASK_CONTROL_BEGAN"
#: Seconds without clients, attached notebooks and Dask tasks after which a cluster ends.
IDLE_TIMEOUT_S = 3600.0
#: Defaults of the scheduler's job.
USUAL = {"cores": 1, "memory": "4GiB", "job_name": "dask-scheduler"}
#: Keywords of the workers' jobs that count for the scheduler's job, too.
SHARED = ("account", "project", "queue", "walltime", "python", "job_script_prologue")
#: Keywords that have a meaning in this process only.
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
    version: int = VERSION

    def save(self, folder: ClusterFolder) -> None:
        """Write the request into a 0600 file of the cluster's folder."""
        private.write_private(str(folder.path / REQUEST), json.dumps(asdict(self)))

    @classmethod
    def load(cls, folder: ClusterFolder) -> ControlRequest:
        """Read what `save` wrote. Raises UsageError if another release of hpcdask did."""
        try:
            request = cls(**json.loads(private.read(str(folder.path / REQUEST))))
        except (ValueError, TypeError) as error:
            raise UsageError(f"{folder.path / REQUEST} cannot be read: {error}") from None
        if request.version != VERSION:
            raise UsageError(
                f"{folder.path / REQUEST} is of another release of hpcdask than the Python of the "
                f"scheduler's job has (python=…): install the same"
            )
        if "scheduler_cls" in request.keywords:
            module, _, name = request.keywords["scheduler_cls"].partition(":")
            request.keywords["scheduler_cls"] = getattr(importlib.import_module(module), name)
        return request


@dataclass(frozen=True)
class Making:
    """A detached cluster that is to be made: all is checked, and nothing was started yet.

    `options` are those of the cluster that its process will make. `scheduler` describes the
    scheduler's job; None for a process of this host.
    """

    options: ClusterOptions
    request: ControlRequest
    scheduler: JobOptions | None

    def script(self, folder: ClusterFolder) -> str:
        """Return the script that starts the cluster's process, and ends its jobs if that dies."""
        log = shlex.quote(str(control_log(folder)))
        job = self.scheduler or next(iter(self.options.groups.values()))
        command = f"{job.python} -P -m {PROGRAM} {shlex.quote(str(folder.path))}"
        preamble = [
            f"umask 077; exec >>{log} 2>&1; umask {umask():04o}",
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
        tag = scheduler_tag(folder)
        request = job.request(tag, str(folder.path), alone=True, warned=True)
        return self.options.queue.script(job.job, request, preamble, lines)


def read_request(cls: type[JobCluster], given: Mapping[str, Any]) -> Making:
    """Check the keywords of a detached cluster of this class.

    Raises UsageError if one is unknown or not understood.
    """
    keywords = {name: value for name, value in given.items() if name not in ONLY_HERE}
    local = queue_class(cls.queue_name).is_local
    scheduler_job = keywords.pop("scheduler_job", None if local else {})
    idle = seconds(keywords.pop("idle_timeout", IDLE_TIMEOUT_S), "idle_timeout")
    if not (name := keywords.pop("name", None)):
        raise UsageError('detached=True: a name is missing, by which you attach: name="…"')
    if keywords.get("security") not in (None, False):
        raise UsageError("detached=True makes its own keys: leave security out")
    if scheduler_job is not None and local:
        raise UsageError("scheduler_job: this machine's jobs hang on it. Leave it out")
    on_node = scheduler_job is not None
    section = read_section(queue_class(cls.queue_name).jobqueue, keywords.get("config_name"))
    if on_node and keywords.get("scheduler_options") is None:  # interfaces are a login node's
        options = dict(section.get("scheduler-options") or {})
        options.pop("interface", None)
        keywords["scheduler_options"] = options
    cluster = ClusterOptions.read(cls, {**keywords, "name": name}, on_node=on_node)
    if on_node or any(group.n_workers for group in cluster.groups.values()):
        cluster.queue.check()
    scheduler = _scheduler_job(cls, scheduler_job, keywords, section) if on_node else None
    request = ControlRequest(
        name,
        cls.queue_name,
        {word: plain(value, f"{word}={value!r}") for word, value in keywords.items()},
        idle,
        scheduler.policy.walltime_s if scheduler else None,
        plain(dask.config.config, "Dask's configuration, which it needs,"),
    )
    return Making(cluster, request, scheduler)


def _scheduler_job(
    cls: type[JobCluster],
    asked: Mapping[str, Any],
    keywords: Mapping[str, Any],
    section: Mapping[str, Any],
) -> JobOptions:
    """Read the scheduler's job, in the words of the workers' jobs, from which it has the rest."""
    queue = queue_class(cls.queue_name)()
    shared = {name: keywords[name] for name in SHARED if name in keywords}
    given = {**USUAL, **shared, **asked, "device": "cpu", "gpus_per_job": 0}
    directives = given.get("job_extra_directives")
    if directives is None:
        directives = section.get("job-extra-directives") or []
    if isinstance(directives, list | tuple):  # GPUs and memory are those of workers
        given["job_extra_directives"] = [
            one
            for one in directives
            if queue.requested_gpus(str(one)) is None and not queue.requests_memory([str(one)])
        ]
    try:
        return read_job_options(queue, given, keywords.get("config_name"))
    except UsageError as error:
        raise UsageError(f"scheduler_job: {error}") from None
