"""Keywords of the cluster classes, with types and texts, and the values that they take.

Signatures, docstrings and names in the configuration come from the dicts here. None stands for a
value that nobody gave.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
from collections.abc import Collection, Iterable, Mapping
from datetime import timedelta
from typing import Annotated, Any, Literal, TypedDict, get_args, get_type_hints

from distributed import Scheduler, Security

from hpcdask.errors import UsageError
from hpcdask.spec.keywords import Keyword, Protocol, WorkerKeywords
from hpcdask.spec.parsing import LEAST_MEMORY_LIMIT, parse_memory, parse_seconds
from hpcdask.spec.specs import WorkerSpec, keywords_of

Time = str | float | timedelta
WorkerCommand = Literal["distributed.cli.dask_worker", "hpcdask.worker"]


class OwnKeywords(TypedDict, total=False):
    """Keywords of hpcdask, which all classes take."""

    groups: Annotated[
        Mapping[str, Mapping[str, Any]] | None,
        "Workers of several kinds: the keywords of each group's jobs, by its name. Those that a "
        "group does not give are the cluster's. Default: one kind.",
    ]
    gpus_per_job: Annotated[
        int | None,
        "GPUs that each job requests, on all its nodes together; the job starts one worker per "
        'GPU. Default: 1; 0 with ``device="cpu"``, and then ``processes`` workers per job. '
        "Directives of your own that request GPUs count.",
    ]
    gpu_type: Annotated[str | None, 'Type of GPU in the site\'s words, such as ``"h200"``.']
    nodes_per_job: Annotated[int | None, "Nodes of each job, which share its GPUs. Default: 1."]
    protocol: Annotated[
        Literal[Protocol, "tls", "tls://", "tcp://", "ucx://"] | None,
        'Between workers; all else is tcp. Default: ``"auto"``, ucx where there are fast links.',
    ]
    poll_interval: Annotated[Time | None, "Time between two queries of the queue. Default: 5 s."]
    start_timeout: Annotated[
        Time | None, "Time that a running job's workers get to connect. Default: 300 s."
    ]
    deaths_max: Annotated[
        int | None,
        "Jobs that may die within an hour before no more are submitted; preempted ones do not "
        "count. Default: three times the wanted ones, 10 at least.",
    ]
    security: Annotated[
        Security | bool | None,
        "Credentials. Default: new ones for this cluster (TLS); False: none.",
    ]
    shared_temp_directory: Annotated[
        str | None,
        "Folder on a file system that the nodes share, for scripts, logs and keys (0700), such as "
        "``/scratch/$USER``. Default: the variable ``HPCDASK_HOME``, or ``~/.hpcdask``.",
    ]
    config_name: Annotated[
        str | None, "Section of the configuration that overrules the system's own."
    ]
    name: Annotated[str | None, "Name of the cluster. Default: a random one."]
    detached: Annotated[
        bool, "Scheduler and control of jobs outlive this process; see `hpcdask.attach`."
    ]
    scheduler_job: Annotated[
        dict[str, Any] | None,
        "Of a detached cluster: keywords of its scheduler's job. Default: one core and 4 GiB, and "
        "queue, account and walltime of the workers' jobs. None for a process of this host.",
    ]
    scheduler_timeout: Annotated[
        Time | None,
        "Time that the scheduler's job gets to start before an error says so; it goes on to wait. "
        "Default: 600 s.",
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
    silence_logs: Annotated[
        int | str | bool,
        "Level of distributed's messages in this process while the cluster lives. Default: "
        '``"error"``; False for all.',
    ]
    asynchronous: Annotated[bool, "Use it with ``async with``."]
    loop: Annotated[Any, "Event loop. Default: a new one in a thread."]
    scheduler_cls: Annotated[type[Scheduler], "Class of the scheduler. Default: distributed's."]


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
    job_directives_skip: Annotated[
        list[str] | None, "Texts; directives with one of them are left out, that for GPUs too."
    ]
    job_name: Annotated[str | None, "Name of the jobs in the queue."]
    processes: Annotated[int | None, "Workers of each job without GPUs. Default: by its cores."]
    worker_extra_args: Annotated[
        list[str] | None, "The workers' options in dask's or dask-cuda's words."
    ]
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
    job_extra_directives: Annotated[list[str] | None, "More directives, without their prefix."]


class _Account(TypedDict, total=False):
    account: Annotated[str | None, "What jobs are charged to."]


class _Project(TypedDict, total=False):
    project: Annotated[
        str | None, "What jobs are charged to; the old name of ``account`` where there is one."
    ]


class _ResourceSpec(TypedDict, total=False):
    resource_spec: Annotated[str | None, "What each job asks for, in the system's words."]


class SLURMKeywords(QueueKeywords, _Account, _Project, total=False):
    """Keywords of `SLURMCUDACluster`."""

    gpu_request: Annotated[
        Literal["gres", "gpus-per-node", "gpus"] | None,
        "How the site takes the request of GPUs. Default: gres.",
    ]
    job_cpu: Annotated[int | None, "Cores that a job asks for. Default: ``cores``."]
    job_mem: Annotated[
        str | None, "Memory that a job asks for, in SLURM's form. Default: ``memory``."
    ]


class LSFKeywords(QueueKeywords, _Project, total=False):
    """Keywords of `LSFCUDACluster`."""

    ncpus: Annotated[int | None, "Cores that a job asks for. Default: ``cores``."]
    mem: Annotated[int | None, "Memory that a job asks for, in bytes. Default: ``memory``."]
    lsf_units: Annotated[
        str | None, "Unit of memory in LSF's limits, such as MB. Default: as configured."
    ]
    use_stdin: Annotated[bool | None, "Of dask-jobqueue; it has no effect here."]


class SGEKeywords(QueueKeywords, _Project, _ResourceSpec, total=False):
    """Keywords of `SGECUDACluster` and `LocalCUDAJobCluster`."""


class PBSKeywords(SGEKeywords, _Account, total=False):
    """Keywords of `PBSCUDACluster` and `MoabCUDACluster`."""


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
#: Keywords that have a meaning in the process that makes the cluster only, or name one cluster.
NOT_CONFIGURED = {"n_workers", "groups", "name", "config_name", "detached", "scheduler_job"}
NOT_CONFIGURED |= {"security", "asynchronous", "loop", "scheduler_cls", "silence_logs"}
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
    for name, hint in get_type_hints(keywords, include_extras=True).items():
        if hasattr(hint, "__metadata__"):
            texts[name] = hint.__metadata__[0]
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
    known: dict[str, Any] = {}
    for one in (SLURMKeywords, LSFKeywords, PBSKeywords, OARKeywords):
        known |= get_type_hints(one, include_extras=True)
    taken = {*OWN, *SPEC_FIELDS, *job_keywords(job_cls), *more}
    hints = {keyword: known.get(keyword, Any) for keyword in [*known, *more] if keyword in taken}
    hints |= dict.fromkeys(sorted(taken - hints.keys()), Any)
    made: type = TypedDict(name, hints, total=False)  # type: ignore[misc]
    return made


def check_names(given: Iterable[str], known: Collection[str]) -> None:
    """Raise UsageError unless all of these keywords are known; it names the nearest."""
    if unknown := sorted(set(given) - set(known)):
        near = difflib.get_close_matches(unknown[0], known, 1) or [""]
        meant = MEANT.get(unknown[0], near[0])
        hint = f"did you mean {meant}?" if meant else f"There are {', '.join(sorted(known))}"
        raise UsageError(f"unknown keyword {', '.join(unknown)}: {hint}")


def check_values(settings: Mapping[str, Any], keywords: type) -> None:
    """Raise UsageError for values whose kind is wrong.

    A text for a list would be taken for a list of its characters.
    """
    for name, hint in types_of(keywords).items():
        value = settings.get(name)
        if value and isinstance(value, str) and hint in (list[str] | None, dict[str, Any] | None):
            raise UsageError(f"{name}={value!r} is a text: give a list, [{value!r}]")
    command = settings.get("worker_command") in (None, *get_args(WorkerCommand))
    if not command or settings.get("nanny") is False:
        raise UsageError(
            "worker_command, nanny: jobs start hpcdask's own worker, which takes the place of "
            "dask_cuda.cli, and every worker has a nanny, which restarts it. Leave them out"
        )
    if (memory := settings.get("memory")) is not None:
        amount = parse_memory(memory, "memory")
        if not amount:
            raise UsageError(f"memory={memory!r}: a job needs an amount of memory, such as 64GiB")
        if amount < LEAST_MEMORY_LIMIT and str(memory).replace(".", "").isdecimal():
            raise UsageError(f'memory={memory} means {amount:,} bytes: write memory="{memory}GiB"')


def number(value: Any, name: str, of: str, least: int = 0) -> int:
    """Return a count; 2.0 is a number too.

    Raises UsageError if it is a text, has a fraction or is less than `least`.
    """
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        if not isinstance(value, str | bool) and int(value) == value >= least:
            return int(value)
    some = ", ".join(str(least + more) for more in range(3))
    raise UsageError(f"{name}={value!r} is not a number of {of}: {some}, …")


def seconds(value: Time | None, name: str) -> float | None:
    """Return a time as distributed and the configuration give it, in seconds."""
    return parse_seconds(value.total_seconds() if isinstance(value, timedelta) else value, name)
