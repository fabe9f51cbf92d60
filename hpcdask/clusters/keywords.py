"""Keywords of the cluster classes, with types and texts, and the values that they take.

Signatures, docstrings and names in the configuration come from the dicts here. None stands for a
value that nobody gave.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Any, Literal, TypedDict, get_args, get_type_hints

from distributed import Scheduler, Security

from hpcdask.errors import UsageError
from hpcdask.spec.keywords import Keyword, Protocol, WorkerKeywords
from hpcdask.spec.parsing import Time, parse_memory, parse_seconds, whole_number
from hpcdask.spec.specs import WorkerSpec, keywords_of

WorkerCommand = Literal["distributed.cli.dask_worker", "hpcdask.worker"]


class GroupKeywords(TypedDict, total=False):
    """Keywords of hpcdask that groups may have."""

    gpus_per_job: Annotated[
        int | None,
        "GPUs of each job, on all its nodes together, each with a worker. Default: 1, or as your "
        'directives say; 0 with ``device="cpu"``, and then ``processes`` workers per job.',
    ]
    gpu_type: Annotated[str | None, 'Type of GPU in the site\'s words, such as ``"h200"``.']
    nodes_per_job: Annotated[int | None, "Nodes of each job, which share its GPUs. Default: 1."]
    protocol: Annotated[
        Literal[Protocol, "tls", "tls://", "tcp://", "ucx://"] | None,
        'Between workers; all else is tcp. Default: ``"auto"``, ucx where there are fast links.',
    ]
    start_timeout: Annotated[Time | None, "Time that workers get to connect. Default: 300 s."]
    deaths_max: Annotated[
        int | None,
        "Jobs that may die within an hour before no more are submitted; preempted ones do not "
        "count. Default: three times the wanted ones, 10 at least.",
    ]


class HereKeywords(TypedDict, total=False):
    """Keywords that a configuration has not: they name one cluster, or are for this process."""

    groups: Annotated[
        Mapping[str, Mapping[str, Any]] | None,
        "Workers of several kinds: the keywords of each group's jobs, by its name. Those that a "
        "group does not give are the cluster's. Default: one kind.",
    ]
    name: Annotated[str | None, "Name of the cluster. Default: a random one."]
    config_name: Annotated[str | None, "Section of the configuration, over the system's own."]
    detached: Annotated[bool, "The cluster outlives this process; see `hpcdask.attach`."]
    scheduler_job: Annotated[
        dict[str, Any] | None,
        "Of a detached cluster: keywords of its scheduler's job. Default: one core and 4 GiB, and "
        "queue, account and walltime of the workers' jobs. None for a process of this host.",
    ]
    security: Annotated[Security | bool | None, "Default: new keys for this cluster; False: none."]
    silence_logs: Annotated[
        int | str | bool,
        'Level of distributed\'s messages in this process. Default: ``"error"``; False for all.',
    ]
    asynchronous: Annotated[bool, "Use it with ``async with``."]
    loop: Annotated[Any, "Event loop. Default: a new one in a thread."]
    scheduler_cls: Annotated[type[Scheduler], "Class of the scheduler. Default: distributed's."]


class OwnKeywords(GroupKeywords, HereKeywords, total=False):
    """Keywords of hpcdask, which all classes take."""

    poll_interval: Annotated[Time | None, "Time between two queries of the queue. Default: 5 s."]
    shared_temp_directory: Annotated[
        str | None,
        "Folder on a file system that the nodes share, for scripts, logs and keys (0700), such as "
        "``/scratch/$USER``. Default: the variable ``HPCDASK_HOME``, or ``~/.hpcdask``.",
    ]
    scheduler_timeout: Annotated[
        Time | None, "Time for the scheduler's job to start before an error tells. Default: 600 s."
    ]
    idle_timeout: Annotated[
        Time | None,
        "Time without clients, attached notebooks and Dask tasks after which a detached cluster "
        "ends. Default: 3600 s.",
    ]
    scheduler_options: Annotated[
        dict[str, Any] | None,
        'Passed to the scheduler, such as ``{"interface": "eth0", "dashboard_address": '
        '":8788"}``. The dashboard listens on 127.0.0.1 if nothing is said of it.',
    ]


class ClusterKeywords(OwnKeywords, WorkerKeywords, total=False):
    """Keywords that all classes take: hpcdask's, the workers', and dask-jobqueue's of every job."""

    cores: Annotated[int | None, "CPU cores of each job."]
    memory: Annotated[
        str | int | float | None,
        'Host memory of each job, such as ``"64GiB"``. With SLURM a directive such as '
        "``--mem-per-gpu=40G`` takes its place.",
    ]
    job_script_prologue: Annotated[
        list[str] | None, 'Shell lines before the workers start, such as ``["module load cuda"]``.'
    ]
    job_directives_skip: Annotated[list[str] | None, "Directives with one of these are left out."]
    job_name: Annotated[str | None, "Name of the jobs in the queue."]
    processes: Annotated[int | None, "Workers of each job without GPUs. Default: by its cores."]
    worker_extra_args: Annotated[list[str] | None, "Options in dask's or dask-cuda's words."]
    log_directory: Annotated[str | None, "Folder of the logs. Default: in the cluster's own."]
    python: Annotated[str | None, "Shell words that start Python in a job. Default: this Python."]
    shebang: Annotated[str | None, "First line of the jobs' script."]
    job_extra: Annotated[list[str] | None, "Old name of ``job_extra_directives``."]
    header_skip: Annotated[list[str] | None, "Old name of ``job_directives_skip``."]
    env_extra: Annotated[list[str] | None, "Old name of ``job_script_prologue``."]
    extra: Annotated[list[str] | None, "Old name of ``worker_extra_args``."]
    nanny: Annotated[Literal[True] | None, "Every worker has one."]
    worker_command: Annotated[WorkerCommand | None, "Jobs start hpcdask's own worker anyway."]


class QueueKeywords(ClusterKeywords, total=False):
    """Keywords of all systems but HTCondor."""

    walltime: Annotated[
        str | None,
        "In the system's own form. Before it is reached, workers hand over what they hold, and the "
        "job is replaced.",
    ]
    queue: Annotated[str | None, "The queue (SLURM's partition)."]
    project: Annotated[str | None, "What jobs are charged to, where not by ``account``."]
    job_extra_directives: Annotated[list[str] | None, "More directives, without their prefix."]


class SLURMKeywords(QueueKeywords, total=False):
    """Keywords of `SLURMCUDACluster`."""

    account: Annotated[str | None, "What jobs are charged to."]
    gpu_request: Annotated[
        Literal["gres", "gpus-per-node", "gpus"] | None,
        "How the site takes the request of GPUs. Default: gres.",
    ]
    job_cpu: Annotated[int | None, "Cores that a job asks for. Default: ``cores``."]
    job_mem: Annotated[str | None, "Memory of a job, in SLURM's form. Default: ``memory``."]


class LSFKeywords(QueueKeywords, total=False):
    """Keywords of `LSFCUDACluster`."""

    ncpus: Annotated[int | None, "Cores that a job asks for. Default: ``cores``."]
    mem: Annotated[int | None, "Memory that a job asks for, in bytes. Default: ``memory``."]
    lsf_units: Annotated[str | None, "Unit of memory in LSF's limits. Default: as configured."]
    use_stdin: Annotated[bool | None, "Of dask-jobqueue; it has no effect here."]


class SGEKeywords(QueueKeywords, total=False):
    """Keywords of `SGECUDACluster` and `LocalCUDAJobCluster`."""

    resource_spec: Annotated[str | None, "What each job asks for, in the system's words."]


class PBSKeywords(SGEKeywords, total=False):
    """Keywords of `PBSCUDACluster` and `MoabCUDACluster`."""

    account: Annotated[str | None, "What jobs are charged to."]


class OARKeywords(SGEKeywords, total=False):
    """Keywords of `OARCUDACluster`."""

    memory_per_core_property_name: Annotated[
        str | None, "OAR's property with the memory of a core, such as memcore; or not_applicable."
    ]


class HTCondorKeywords(ClusterKeywords, total=False):
    """Keywords of `HTCondorCUDACluster`."""

    job_extra_directives: Annotated[dict[str, Any] | None, "More lines of the submit description."]
    disk: Annotated[str | int | None, 'Disk of each job, such as ``"1GB"``.']
    submit_command_extra: Annotated[list[str] | None, "Of dask-jobqueue; it has no effect here."]
    cancel_command_extra: Annotated[list[str] | None, "Of dask-jobqueue; it has no effect here."]


OWN = frozenset(["n_workers", *OwnKeywords.__annotations__])
SPEC_FIELDS = frozenset(WorkerSpec.__dataclass_fields__)
#: What others call a keyword.
MEANT = {
    **dict.fromkeys(("gpus", "ngpus", "n_gpus", "num_gpus", "gpus_per_node"), "gpus_per_job"),
    **dict.fromkeys(("gpu", "gpu_model"), "gpu_type"),
    **dict.fromkeys(("nodes", "n_nodes"), "nodes_per_job"),
    **dict.fromkeys(("time", "time_limit", "runtime"), "walltime"),
    **dict.fromkeys(("threads", "n_threads", "threads_per_worker"), "nthreads"),
    **dict.fromkeys(("mem", "ram"), "memory"),
    **dict.fromkeys(("cpus", "ncpus", "n_cores", "cpus_per_task"), "cores"),
    "partition": "queue",
    "workers": "n_workers",
    **{name: f'scheduler_options={{"{name}": …}}' for name in ("dashboard_address", "host")},
}


@functools.cache
def types_of(keywords: type) -> dict[str, Any]:
    """Return the types of a class's keywords, by name."""
    return {"n_workers": int, **get_type_hints(keywords)}


def keywords_of_class(keywords: type) -> list[Keyword]:
    """Return the keywords of a class; those of workers have their texts in `WorkerSpec`."""
    texts = {one.name: one.text for one in keywords_of(WorkerSpec)}
    texts["n_workers"] = "Workers to start with."
    hints = get_type_hints(keywords, include_extras=True).items()
    texts |= {name: hint.__metadata__[0] for name, hint in hints if hasattr(hint, "__metadata__")}
    return [
        Keyword(name, kind, texts.get(name, "As in dask-jobqueue."))
        for name, kind in types_of(keywords).items()
    ]


def job_keywords(job_cls: type) -> set[str]:
    """Return the keywords that a Job class of dask-jobqueue takes, its bases' included."""
    names: set[str] = set()
    for base in job_cls.__mro__:
        if base.__name__ == "ProcessInterface":
            break
        names |= set(inspect.signature(base.__init__).parameters)  # type: ignore[misc]
    return names - {"self", "args", "kwargs", "base_class_kwargs", "scheduler", "name", "security"}


def make_keywords(name: str, job_cls: type, more: Iterable[str]) -> type:
    """Return the dict of a class for a system of another package, whose Job class says the rest."""
    known = get_type_hints(PBSKeywords, include_extras=True)
    taken = {*OWN, *SPEC_FIELDS, *job_keywords(job_cls), *more} - {"n_workers"}
    made: type = TypedDict(name, {key: known.get(key, Any) for key in sorted(taken)}, total=False)  # type: ignore[misc]
    return made


def check_names(given: Iterable[str], known: Collection[str]) -> None:
    """Raise UsageError unless all of these keywords are known; it names the nearest."""
    if unknown := sorted(set(given) - set(known)):
        near = difflib.get_close_matches(unknown[0], known, 1) or [""]
        meant = MEANT.get(unknown[0], near[0])
        hint = f"did you mean {meant}?" if meant else f"There are {', '.join(sorted(known))}"
        raise UsageError(f"unknown keyword {', '.join(unknown)}: {hint}")


def parse_values(given: Mapping[str, Any], keywords: type) -> dict[str, Any]:
    """Return keywords with numbers and times read. Raises UsageError for values of a wrong kind."""
    values = {name: value for name, value in given.items() if value is not None}
    hints = types_of(keywords)
    for name, value in values.items():
        hint = hints.get(name)
        if hint in (int, int | None):
            least = 0 if name in ("gpus_per_job", "n_workers") else 1
            values[name] = whole_number(value, name, least)
        elif hint == Time | None:
            values[name] = parse_seconds(value, name)
        elif isinstance(value, str) and hint in (list[str] | None, dict[str, Any] | None):
            raise UsageError(f"{name}={value!r} is a text: give a list, [{value!r}]")
    command = values.get("worker_command") in (None, *get_args(WorkerCommand))
    if not command or values.get("nanny") is False:
        raise UsageError(
            "worker_command, nanny: jobs start hpcdask's own worker, which takes the place of "
            "dask_cuda.cli, and every worker has a nanny, which restarts it. Leave them out"
        )
    parse_memory(values.get("memory"), "memory")
    return values
