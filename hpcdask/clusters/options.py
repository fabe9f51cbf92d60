"""Options of a cluster, from the keywords of its class: read and checked once, before it exists.

What is not given comes from dask-jobqueue's configuration, such as ``jobqueue.slurm``, which may
have the keywords of hpcdask too.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
import shlex
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from inspect import signature
from socket import AF_INET
from typing import TYPE_CHECKING, Any, Self

import dask.config
import psutil
from distributed import Scheduler, Security

from hpcdask.bootstrap.resources import launcher_cores
from hpcdask.errors import UsageError
from hpcdask.gpu.devices import visible_gpus
from hpcdask.jobs.folder import base_path
from hpcdask.logs import say
from hpcdask.process import umask
from hpcdask.queues.base import Queue, Request
from hpcdask.queues.helpers import check_lines, walltime_text
from hpcdask.queues.local import LocalQueue
from hpcdask.queues.registry import queue_class
from hpcdask.security.credentials import check_configuration
from hpcdask.security.ports import check_size
from hpcdask.spec.argv import make_command, options, read
from hpcdask.spec.parsing import parse_memory, parse_seconds
from hpcdask.spec.specs import WorkerSpec

from .job import Policy
from .keywords import (
    OWN,
    SPEC_FIELDS,
    GroupKeywords,
    HereKeywords,
    SLURMKeywords,
    check_names,
    job_keywords,
    parse_values,
    types_of,
)

if TYPE_CHECKING:
    from .cluster import JobCluster

#: Placeholder of the scheduler's address in a preview.
NO_ADDRESS = "<scheduler's address>"
#: Address of a scheduler of jobs on this machine.
LOOPBACK = "127.0.0.1"
#: Stands for the memory that dask-jobqueue wants to know; its line is left out of the script.
NO_MEMORY = "1GiB"


@dataclass(frozen=True)
class JobOptions:
    """Description of one job.

    `job` is dask-jobqueue's Job, for header and options only; `asked` is what it lacks. `gpus` and
    `workers` are those on all its nodes together. `python` is shell words of the interpreter, as in
    dask-jobqueue: sites start Python by a container's command. A cluster, or its group, starts with
    `n_workers` workers.
    """

    job: Any
    asked: Request
    spec: WorkerSpec
    gpus: int
    workers: int
    python: str
    n_workers: int
    policy: Policy

    @property
    def on_gpu(self) -> bool:
        """Return whether its workers compute on GPUs."""
        return bool(self.gpus) and self.spec.device != "cpu"

    def script(self, queue: Queue, cluster: str, folder: str, address: str, *, tls: bool) -> str:
        """Return the script of every job of a cluster or of its group, as it is submitted."""
        logs = os.path.join(folder, "logs")
        preamble = [
            "umask 077",
            f"export HPCDASK_JOB_ID={queue.job_id} HPCDASK_RESTARTS={queue.restarts}",
            f'exec >>{shlex.quote(logs)}/"$HPCDASK_JOB_ID.log" 2>&1',
            f"umask {umask():04o}",
        ]
        options = ["-P", "-m", "hpcdask.worker", "--scheduler", address]
        if tls:
            options += ["--keys", os.path.join(folder, "keys")]
        options += ["--cluster", cluster, "--workers", str(self.workers // self.asked.nodes)]
        command = f"{self.python} {shlex.join([*options, *self.spec.to_argv()])}"
        command = queue.on_each_node(command)
        request = dataclasses.replace(self.asked, tag=f"hpcdask:{cluster}", folder=logs)
        return queue.script(self.job, request, preamble, command)


@dataclass(frozen=True)
class ClusterOptions:
    """Options of a cluster; `groups` has one without a name where the cluster has no groups.

    `base` is the folder of clusters' folders and `logs` that of the jobs' logs, if the user named
    them. `scheduler` is the scheduler's keywords.
    """

    queue: Queue
    groups: dict[str, JobOptions]
    name: str | None
    poll_interval_s: float
    base: str | None
    logs: str | None
    scheduler: dict[str, Any]
    scheduler_cls: type[Scheduler]
    security: Security | bool | None
    silence_logs: int | str | bool

    @classmethod
    def read(
        cls, owner: type[JobCluster], keywords: Mapping[str, Any], *, on_node: bool = False
    ) -> Self:
        """Read the keywords of a cluster of class `owner`; nothing is started.

        Raises UsageError if a keyword is unknown or its value is not understood. If the scheduler
        will run `on_node`, its interface cannot be looked for here.
        """
        given = {name: value for name, value in keywords.items() if value is not None}
        check_names(given, types_of(owner.keywords))
        if (groups := given.pop("groups", None)) is not None:
            _check_groups(groups, owner)
            if all(one.get("device") == "cpu" for one in groups.values()):
                given["device"] = "cpu"
        system, config_name = queue_class(owner.queue_name), given.pop("config_name", None)
        reader = _Reader(system, owner.keywords, config_name)
        settings = parse_values({**reader.site, **given}, owner.keywords)
        if system.is_local:
            queue, found = _local_queue(settings)
            given |= found
        else:
            own = system.keywords
            queue = system(**{name: settings[name] for name in own if name in settings})
        jobs = reader.read_groups(groups or {"": {}}, given)
        logs = settings.get("log_directory")
        return cls(
            queue=queue,
            groups=jobs,
            name=given.get("name"),
            poll_interval_s=settings.get("poll_interval", 5.0),
            base=settings.get("shared_temp_directory"),
            logs=None if logs is None else str(base_path(logs)),
            scheduler=_read_scheduler(settings, local=queue.is_local, on_node=on_node),
            scheduler_cls=given.get("scheduler_cls", Scheduler),
            security=given.get("security"),
            silence_logs=given.get("silence_logs", "error"),
        )


def read_job_options(
    queue: Queue, given: Mapping[str, Any], config_name: str | None = None
) -> JobOptions:
    """Read the keywords of a job that is none of a cluster's, such as a scheduler's."""
    reader = _Reader(type(queue), SLURMKeywords, config_name)
    reader.site = {name: value for name, value in reader.site.items() if name not in OWN}
    return reader.read({name: value for name, value in given.items() if value is not None})


class _Reader:
    """Reader of the keywords of a system's jobs; `site` is those of the configuration."""

    def __init__(self, queue: type[Queue], keywords: type, config_name: str | None) -> None:
        self.queue, self.keywords = queue, keywords
        self.job_cls = import_job_class(queue.jobqueue)
        self.config_name = config_name or queue.jobqueue[0]
        self.section = read_section(queue.jobqueue, config_name)
        self.of_jobs = job_keywords(self.job_cls)
        by_keyword = {name.replace("-", "_"): value for name, value in self.section.items()}
        self.site = {
            name: value
            for name, value in by_keyword.items()
            if name not in HereKeywords.__annotations__ and value not in (None, [], "")
        }

    def read_groups(
        self, groups: Mapping[str, Mapping[str, Any]], given: Mapping[str, Any]
    ) -> dict[str, JobOptions]:
        """Read each group; the cluster's keywords hold where a group does not say otherwise."""
        known = types_of(self.keywords)
        of_group = {"n_workers", *GroupKeywords.__annotations__} | SPEC_FIELDS | self.of_jobs
        of_group -= {"log_directory", "name", "port_range"}
        of_group -= {"walltime"} if self.queue.is_local else set()
        devices = {{**given, **own}.get("device") == "cpu" for own in groups.values()}
        found = {}
        for name, own in groups.items():
            merged = {**given, **{key: value for key, value in own.items() if value is not None}}
            if len(devices) > 1 and merged.get("device") == "cpu" and "protocol" not in own:
                merged["protocol"] = "tcp"  # what is asked for the GPUs
            try:
                check_names(own, known)
                if words := set(own) - of_group:
                    what = f"{', '.join(sorted(words))} is for all groups"
                    raise UsageError(f"{what}: give it to the cluster")
                found[name] = self.read(merged)
            except UsageError as error:
                raise UsageError(f"group {name}: {error}" if name else str(error)) from None
        return found

    def read(self, given: Mapping[str, Any]) -> JobOptions:
        """Read the keywords of a job and its workers."""
        settings = parse_values({**self.site, **given}, self.keywords)
        nodes = settings.get("nodes_per_job", 1)
        spec = self._worker_spec(settings, given)
        gpus, in_header = self._gpus(settings, nodes, spec)
        if gpus % nodes:
            raise UsageError(
                f"gpus_per_job={gpus} cannot be shared evenly by nodes_per_job={nodes}"
            )
        shell = {"job_script_prologue", "env_extra"}  # which may hold any character
        for name in (*sorted(self.of_jobs - shell), "gpu_type"):
            check_lines(settings.get(name), name)
        check_lines(self.section.get("name"), "name")
        # only the job knows its memory if a directive asks for it, and `memory` does not
        in_directive = any(map(self.queue.told_memory.search, _directives(settings)))
        learns_memory = "memory" not in settings and in_directive
        if learns_memory:
            settings["memory"] = NO_MEMORY
        job = self._make_job(settings, gpus)
        workers = gpus or int(job.worker_processes) * nodes
        per_node = workers // nodes
        ucx = spec.protocol == "ucx"
        check_size(spec.port_range, per_node, ucx=ucx, where="per node", option="port_range")
        share, nthreads = spec.memory_limit, spec.nthreads
        if share is None and not learns_memory:
            per_worker = int(job.worker_memory) // per_node
            what = f"the job's memory for each of its {per_node} workers on a node"
            share = parse_memory(per_worker, what)
        if nthreads is None and not (gpus and spec.device != "cpu"):  # on a GPU the default is one
            nthreads = max(1, int(job.worker_cores) // per_node)
        walltime = timedelta.max  # no limit
        if (limit := settings.get("walltime")) is not None:
            walltime = self.queue.parse_walltime(walltime_text(limit))
        start_timeout_s = settings.get("start_timeout", Policy.start_timeout_s)
        deaths_max, n_workers = settings.get("deaths_max"), settings.get("n_workers", 0)
        policy = Policy(start_timeout_s, deaths_max=deaths_max, walltime_s=walltime.total_seconds())
        gpu_type, to_ask = settings.get("gpu_type"), 0 if in_header else gpus
        name, python = str(job.job_name or "dask-worker"), settings.get("python")
        asked = Request(name, gpus=to_ask, gpu_type=gpu_type, nodes=nodes)
        python = str(python or shlex.quote(sys.executable))
        spec = dataclasses.replace(spec, memory_limit=share, nthreads=nthreads)
        return JobOptions(job, asked, spec, gpus, workers, python, n_workers, policy)

    def _worker_spec(self, settings: Mapping[str, Any], given: Mapping[str, Any]) -> WorkerSpec:
        """Read the workers' specification; `worker_extra_args` overrule the configuration."""
        args = settings.get("worker_extra_args") or settings.get("extra") or []
        words = [word for arg in args for word in shlex.split(str(arg))]
        try:
            extra = read(make_command("worker_extra_args", "", options(WorkerSpec)), words)
        except UsageError as error:
            raise UsageError(f"worker_extra_args: {error}") from None
        if "name" in extra:
            raise UsageError("worker_extra_args: --name: workers are named after their jobs")
        extra = {name: value for name, value in extra.items() if value != ()}
        found = {**self.site, **extra, **given}
        found = {name: found[name] for name in SPEC_FIELDS - {"name"} if name in found}
        if "protocol" in found:
            protocol = str(found["protocol"]).removesuffix("://")
            found["protocol"] = "tcp" if protocol == "tls" else protocol
        return WorkerSpec.from_keywords(found).configured()

    def _gpus(self, settings: Mapping[str, Any], nodes: int, spec: WorkerSpec) -> tuple[int, bool]:
        """Return the GPUs per job, and whether the user's own directives ask for them already."""
        lines = [*_directives(settings), f"-l {settings.get('resource_spec', '')}"]
        counts = [(line, self.queue.requested_gpus(line, nodes)) for line in lines]
        written = [(line, count) for line, count in counts if count is not None]
        asked: int | None = settings.get("gpus_per_job")
        if asked is None:
            if spec.device == "cpu":
                return 0, False
            return written[0][1] if written else 1, bool(written)
        if asked == 0 and spec.device == "cuda":
            raise UsageError("gpus_per_job=0 with device='cuda': workers on GPUs need at least one")
        if written:
            raise UsageError(
                f"gpus_per_job={asked} and the directive {written[0][0]!r} both request GPUs: "
                f"leave one of them out"
            )
        return asked, False

    def _make_job(self, settings: Mapping[str, Any], gpus: int) -> Any:
        """Make dask-jobqueue's Job, without logs and worker's command, which are hpcdask's own."""
        unused = {"log_directory", "interface", "worker_command", "worker_extra_args", "extra"}
        keywords = {name: settings[name] for name in self.of_jobs - unused if name in settings}
        if gpus:
            keywords["processes"] = gpus
        quiet: dict[str, Any] = {"log-directory": None, "worker-extra-args": [], "extra": None}
        section = {f"jobqueue.{self.config_name}": {**self.section, **quiet}}
        try:
            with dask.config.set(section):
                return self.job_cls(NO_ADDRESS, "hpcdask", config_name=self.config_name, **keywords)
        except (ValueError, TypeError) as error:
            if "how much cores and memory" in str(error):
                raise UsageError(
                    "cores and memory of a job are missing: give them, for example cores=8, "
                    f'memory="64GiB", or set jobqueue.{self.config_name}.cores and .memory'
                ) from None
            raise UsageError(" ".join(str(error).split())) from error


def _directives(settings: Mapping[str, Any]) -> list[str]:
    """Return the user's own directives; HTCondor's are a mapping."""
    given = settings.get("job_extra_directives") or settings.get("job_extra", [])
    if isinstance(given, Mapping):
        return [f"{key}={value}" for key, value in given.items()]
    return [str(line) for line in given]


def _check_groups(groups: Any, owner: type[JobCluster]) -> None:
    """Raise UsageError if these are no groups, or one has no proper name."""
    of_dicts = isinstance(groups, Mapping) and all(isinstance(o, Mapping) for o in groups.values())
    if not of_dicts or not groups:
        raise UsageError(
            f"groups={groups!r} is not a dict of groups, each a dict of keywords, such as "
            f'{{"gpu": dict(gpus_per_job=1), "cpu": dict(device="cpu")}}'
        )
    taken = {*signature(owner.scale).parameters, *signature(owner.adapt).parameters}
    for name in groups:
        if name in taken or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]{0,31}", str(name)):
            raise UsageError(
                f"groups: {name!r} is not a name for a group: a letter, then letters, digits and "
                f"_, 32 at most, and no keyword of scale or adapt"
            )


def _local_queue(settings: Mapping[str, Any]) -> tuple[Queue, dict[str, Any]]:
    """Return the queue of this machine's processes, and a job's share of the machine."""
    found: dict[str, Any] = {}
    device = settings.get("device", "auto")
    gpus = [] if device == "cpu" else [gpu.uuid for gpu in visible_gpus()]
    if device == "auto" and not gpus:
        say("no GPU on this machine: workers use the CPU")
        found["device"] = "cpu"
    share = max(1, len(gpus))
    if "cores" not in settings:
        found["cores"] = max(1, len(launcher_cores()) // share)
    if "memory" not in settings:
        found["memory"] = psutil.virtual_memory().total // share
    walltime_s = parse_seconds(settings.get("walltime"), "walltime")
    return LocalQueue(gpus=gpus or None, walltime_s=walltime_s), found


def _read_scheduler(settings: Mapping[str, Any], *, local: bool, on_node: bool) -> dict[str, Any]:
    """Return the scheduler's keywords, with its address; raise UsageError if that is not here."""
    chosen = dict(settings.get("scheduler_options", {}))
    if "host" in chosen:
        return chosen
    interface = chosen.setdefault("interface", settings.get("interface"))
    if local and interface is None:
        chosen["host"] = LOOPBACK
    cards = psutil.net_if_addrs().items()
    usable = [name for name, found in cards if any(one.family == AF_INET for one in found)]
    if interface is not None and not on_node and interface not in usable:
        raise UsageError(
            f"interface: this machine has no interface {interface} with an IPv4 address. It has: "
            f"{', '.join(usable)}. If only the nodes have {interface}, name this machine's: "
            f'scheduler_options={{"interface": "…"}}'
        )
    return chosen


# dask-jobqueue and its part of Dask's configuration


def import_jobqueue(module: str) -> Any:
    """Import a module of dask-jobqueue. Raises UsageError if others may write Dask's configuration.

    The import would replace the handler of SIGINT, and writes a file of configuration.
    """
    real, mask = signal.signal, os.umask(0o077)
    signal.signal = lambda *args: None
    try:
        found = importlib.import_module(f"dask_jobqueue.{module}")
        if not dask.config.get(f"jobqueue.{module}.name", None):
            # imported first inside a block of dask.config.set, whose end took the defaults away
            importlib.import_module("dask_jobqueue.config").reconfigure()
    finally:
        signal.signal = real
        os.umask(mask)
    check_configuration()
    return found


def import_job_class(jobqueue: tuple[str, str]) -> Any:
    """Import a Job class; see `Queue.jobqueue`."""
    module, name = jobqueue
    path, _, name = name.rpartition(".")
    found = import_jobqueue("core" if path else module)
    return getattr(importlib.import_module(path) if path else found, name)


def read_section(jobqueue: tuple[str, str], config_name: str | None = None) -> dict[str, Any]:
    """Return a system's section of the configuration, or the one of this name.

    What it lacks comes from the system's own section, and from that of the Job class. Raises
    UsageError if there is no such section.
    """
    usual = import_job_class(jobqueue).default_config_name()
    sections: Mapping[str, Any] = dask.config.get("jobqueue")
    if config_name is not None and not isinstance(sections.get(config_name), Mapping):
        raise UsageError(
            f"config_name={config_name!r}: Dask's configuration has no section "
            f"jobqueue.{config_name}. It has: {', '.join(sorted(sections))}. A new one needs only "
            f"what differs from jobqueue.{jobqueue[0]}"
        )
    names = dict.fromkeys((usual, jobqueue[0], config_name or usual))
    found = [sections.get(name) or {} for name in names]
    return {name.replace("_", "-"): value for one in found for name, value in one.items()}
