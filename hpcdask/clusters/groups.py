"""The kinds of jobs that a cluster has, from its keywords: all checked before anything starts."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from distributed import Scheduler

from hpcdask.errors import UsageError
from hpcdask.queues.base import Queue

from .job import Policy
from .keywords import job_keywords, number, seconds
from .options import JobOptions, read_job_options
from .state import ClusterState

#: Keywords of the cluster class itself that its groups may have; the others are for all groups.
OF_GROUPS = (
    *("n_workers", "gpus_per_job", "gpu_type", "nodes_per_job"),
    *("start_timeout", "protocol", "interface"),
)
#: What `scale` and `adapt` take beside the names of groups.
TAKEN = frozenset(
    [
        *("n", "jobs", "memory", "cores", "Adaptive", "self"),
        *("minimum", "minimum_jobs", "minimum_memory", "minimum_cores"),
        *("maximum", "maximum_jobs", "maximum_memory", "maximum_cores"),
        *("interval", "target_duration", "wait_count", "worker_key", "memory_ratio"),
    ]
)
#: Seconds that the workers of a job that runs get to connect.
START_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class GroupSpec:
    """Description of a group's jobs, and the number of workers it starts with.

    The name is empty where the cluster has no groups.
    """

    name: str
    options: JobOptions
    n_workers: int
    policy: Policy

    @property
    def size(self) -> int:
        """Workers of each job."""
        return self.options.workers

    @property
    def on_gpu(self) -> bool:
        """Return whether its workers compute on GPUs."""
        return bool(self.options.gpus) and self.options.spec.device != "cpu"

    @property
    def resources(self) -> dict[str, float]:
        """Return the resources of each worker."""
        return self.options.spec.all_resources(on_gpu=self.on_gpu)

    @property
    def worker_memory(self) -> int:
        """Host memory of each worker, in bytes."""
        return max(1, self.options.spec.memory_limit or int(self.options.job.worker_memory))

    @property
    def worker_threads(self) -> int:
        """Threads of each worker."""
        return self.options.spec.nthreads or 1

    def new_state(
        self, scheduler: Scheduler, cluster: str, say: Callable[[str], None]
    ) -> ClusterState:
        """Return the state of the group's jobs at the start of a cluster with this id."""
        return ClusterState(
            scheduler,
            cluster,
            group=self.name,
            size=self.size,
            resources=self.resources,
            policy=self.policy,
            say=say,
        )


def common_device(groups: Any) -> dict[str, Any]:
    """The keyword of the cluster that follows from its groups, if all compute on the CPU.

    Raises UsageError if these are no groups, or one has no proper name.
    """
    form = '{"gpu": dict(gpus_per_job=1), "cpu": dict(device="cpu")}'
    if not isinstance(groups, Mapping) or not groups:
        raise UsageError(f"groups={groups!r} is not a dict of groups: {form}")
    for name, given in groups.items():
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]{0,31}", name):
            raise UsageError(
                f"groups: {name!r} is not a name for a group: letters, digits and _, a letter "
                f"first, 32 at most"
            )
        if name in TAKEN:
            raise UsageError(f"groups: {name} is a keyword of scale or adapt: take another name")
        if not isinstance(given, Mapping):
            raise UsageError(f"group {name}: {given!r} is not a dict of keywords: {form}")
    on_cpu = all(given.get("device") == "cpu" for given in groups.values())
    return {"device": "cpu"} if on_cpu else {}


def read_groups(
    groups: Mapping[str, Mapping[str, Any]] | None,
    keywords: Mapping[str, Any],
    job_cls: type,
    queue: Queue,
    config_name: str,
    *,
    own: Collection[str],
) -> dict[str, GroupSpec]:
    """Read the keywords of each group; without groups, those of the cluster are one without name.

    The cluster's `keywords` hold for all groups that do not say otherwise, and `own` are the names
    of those that it has itself. Raises UsageError if a name or a keyword is not understood.
    """
    if groups is None:
        return {"": _read("", keywords, job_cls, queue, config_name, own)}
    of_queue = {word for word, *_ in queue.keywords} - job_keywords(job_cls)
    for_all = {*own, *of_queue, *queue.of_all_jobs, "log_directory", "port_range"} - {*OF_GROUPS}
    for name, given in groups.items():
        if words := for_all & set(given):
            what = f"group {name}: {', '.join(sorted(words))}"
            raise UsageError(f"{what} is for all groups: give it to the cluster")
    devices = {{**keywords, **given}.get("device") == "cpu" for given in groups.values()}
    found = {}
    for name, given in groups.items():
        merged = {**keywords, **given}
        if len(devices) > 1 and merged.get("device") == "cpu" and "protocol" not in given:
            merged["protocol"] = "tcp"  # what is asked for the GPUs
        try:
            found[name] = _read(name, merged, job_cls, queue, config_name, own)
        except UsageError as error:
            raise UsageError(f"group {name}: {error}") from None
    return found


def _read(
    name: str,
    keywords: Mapping[str, Any],
    job_cls: type,
    queue: Queue,
    config_name: str,
    own: Collection[str],
) -> GroupSpec:
    given = dict(keywords)
    n_workers, gpus_per_job, gpu_type, nodes, timeout, protocol = (
        given.pop(word) for word in OF_GROUPS[:-1]
    )
    options = read_job_options(
        job_cls,
        queue,
        config_name,
        gpus_per_job=gpus_per_job,
        gpu_type=gpu_type,
        nodes_per_job=nodes,
        protocol=protocol,
        given=given,
        own=own,
    )
    timeout_s = seconds(timeout, "start_timeout") or START_TIMEOUT_S
    policy = Policy(start_timeout_s=timeout_s, walltime_s=options.walltime_s)
    return GroupSpec(name, options, number(n_workers or 0, "n_workers", "workers"), policy)
