"""The keywords of the cluster classes: which there are, and which values each of them takes."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import inspect
import shlex
import warnings
from collections.abc import Collection, Mapping
from datetime import timedelta
from typing import Any, Literal

from hpcdask.errors import UsageError
from hpcdask.queues.base import Queue
from hpcdask.spec.parsing import parse_memory, parse_seconds
from hpcdask.spec.signatures import Keyword, optional
from hpcdask.spec.specs import WorkerSpec, keywords_of

from .configuration import configured

SPEC_FIELDS = {field.name for field in dataclasses.fields(WorkerSpec)}
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
}
#: dask-jobqueue's names of what `WorkerSpec` has too, or has under another name.
SHARED = {"interface", "local_directory", "death_timeout"}
#: Lines of shell, which may hold any character.
SHELL = {"job_script_prologue", "env_extra"}
#: What stands for a scheduler's job of which nothing is said.
USUAL_JOB: dict[str, Any] = {}
#: Keywords of dask-jobqueue's classes, their types and texts; those that one system alone has stand
#: with its queue.
OF_JOBS: tuple[tuple[str, Any, str], ...] = (
    ("cores", int, "CPU cores of each job."),
    ("memory", str | int | float, 'Host memory of each job, such as ``"64GiB"``.'),
    (
        "walltime",
        str,
        (
            "In the system's own form. Workers hand over what they hold before it is reached, and "
            "the job is replaced."
        ),
    ),
    ("queue", str, "The queue (SLURM's partition)."),
    ("account", str, "What jobs are charged to."),
    ("project", str, "What jobs are charged to; the old name of ``account`` where there is one."),
    ("resource_spec", str, "What each job asks for, in the system's words."),
    (
        "job_script_prologue",
        list[str],
        'Lines of shell before the workers start, such as ``["module load cuda"]``.',
    ),
    ("job_extra_directives", list[str], "More directives, without what each begins with."),
    ("job_directives_skip", list[str], "Directives that contain one of these texts are left out."),
    ("job_name", str, "Name of the jobs in the queue."),
    ("processes", int, "Workers of each job that has no GPUs. Default: by the number of cores."),
    ("worker_extra_args", list[str], "The workers' options in dask's or dask-cuda's words."),
    ("log_directory", str, "Folder for the jobs' logs. Default: in the cluster's own."),
    ("python", str, "Shell words that start Python in a job. Default: this Python."),
    ("shebang", str, "First line of the jobs' script."),
    ("job_extra", list[str], "Old name of ``job_extra_directives``."),
    ("header_skip", list[str], "Old name of ``job_directives_skip``."),
    ("env_extra", list[str], "Old name of ``job_script_prologue``."),
    ("extra", list[str], "Old name of ``worker_extra_args``."),
    ("nanny", Literal[True], "Every worker has one."),
    (
        "worker_command",
        Literal["distributed.cli.dask_worker", "hpcdask.worker"],
        "Jobs start hpcdask's own worker, whatever it is.",
    ),
)


def keywords_of_cluster(queue: type[Queue], job_cls: type) -> list[Keyword]:
    """Return the keywords that only this system's class takes."""
    known = {name: Keyword(name, *rest) for name, *rest in (*OF_JOBS, *queue.keywords)}
    there = {name for name, *_ in queue.keywords} | job_keywords(job_cls) - SPEC_FIELDS
    of_jobs = [one for name, one in known.items() if name in there]
    of_jobs += [Keyword(name, Any, "As in dask-jobqueue.") for name in sorted(there - set(known))]
    return [optional(one) for one in (*of_jobs, *keywords_of(WorkerSpec))]


def job_keywords(job_cls: type) -> set[str]:
    """The keywords that a Job class of dask-jobqueue takes, its bases' included."""
    names: set[str] = set()
    for base in job_cls.__mro__:
        if base.__name__ == "ProcessInterface":
            break
        names |= set(inspect.signature(base.__init__).parameters)  # type: ignore[misc]
    return names - {"self", "args", "kwargs", "base_class_kwargs", "scheduler", "name", "security"}


def check_names(given: Collection[str], own: Collection[str], known: Collection[str]) -> None:
    """Refuse what is neither the job's (`known`) nor the workers'; `own` are the cluster's."""
    unknown = sorted(set(given) - set(known) - SPEC_FIELDS)
    if not unknown:
        return
    near = difflib.get_close_matches(unknown[0], [*own, *known, *SPEC_FIELDS], 1)
    hints = [MEANT[unknown[0]]] if unknown[0] in MEANT else near
    raise UsageError(
        f"unknown keyword {', '.join(unknown)}: {f'did you mean {hints[0]}? ' if hints else ''}"
        f"There are those of hpcdask's clusters ({', '.join(sorted(own))}), of the workers "
        f"({', '.join(sorted(SPEC_FIELDS))}) and of dask-jobqueue ({', '.join(sorted(known))})"
    )


def refuse_other_workers(given: Mapping[str, Any]) -> None:
    """Refuse another program in place of the worker, or no nanny."""
    if given.get("worker_command") not in (None, "distributed.cli.dask_worker", "hpcdask.worker"):
        raise UsageError(
            f"worker_command={given['worker_command']!r}: jobs start hpcdask's own worker, which "
            f"takes the place of dask_cuda.cli. Leave it out"
        )
    if given.get("nanny") is False:
        raise UsageError("nanny=False: every worker has a nanny, which restarts it. Leave it out")


def refuse_detached(
    detached: bool, scheduler_job: Any, scheduler_timeout: Any, idle_timeout: Any
) -> None:
    """Refuse what belongs to a detached cluster, which is made before one comes here."""
    if detached:
        raise UsageError(
            "detached=True: a class with an __init__ of its own cannot be detached, since the "
            "cluster's process does not know it. Use the class of hpcdask"
        )
    if scheduler_job is not USUAL_JOB or scheduler_timeout is not None or idle_timeout is not None:
        raise UsageError(
            "scheduler_job, scheduler_timeout and idle_timeout are for clusters with detached=True"
        )


def refuse_texts(queue: Queue, for_job: Mapping[str, Any], config_name: str) -> None:
    """Refuse a text for a list, which would be taken for a list of its characters."""
    for name, takes, _ in (*OF_JOBS, *queue.keywords):
        value = configured(name, for_job, config_name)
        if value and isinstance(value, str) and takes in (list[str], dict[str, Any]):
            raise UsageError(f"{name}={value!r} is a text: give a list, [{value!r}]")


def worker_extra_args(for_job: dict[str, Any], config_name: str) -> dict[str, Any]:
    """``worker_extra_args`` as fields of `WorkerSpec`; the names are dask's and dask-cuda's."""
    args = configured("worker_extra_args", for_job, config_name)
    if (old := configured("extra", for_job, config_name)) is not None:
        text = "extra has been renamed to worker_extra_args, which counts if both are given"
        warnings.warn(text, FutureWarning, stacklevel=2)
    args = args or old or []
    for_job.pop("extra", None)
    for_job["worker_extra_args"] = []
    words = [word for arg in args for word in shlex.split(str(arg))]
    try:
        spec = WorkerSpec.from_argv(words)
    except UsageError as error:
        raise UsageError(f"worker_extra_args: {error}") from None
    if spec.name is not None:
        raise UsageError("worker_extra_args: --name: workers are named after their jobs. Leave it")
    return {
        field.name: getattr(spec, field.name)
        for field in dataclasses.fields(spec)
        if getattr(spec, field.name) != field.default
    }


def check_memory(value: Any) -> None:
    """Refuse what a worker may have, and a job may not: no limit, or one that others choose."""
    if value is None:
        return
    try:
        amount = parse_memory(value, "memory")
    except UsageError:
        amount = None
    if not amount:
        raise UsageError(
            f"memory: {value!r} is not an amount of memory for a job. "
            f"Accepted: 64GiB, 64GB, 512MiB, 8e9, a number of bytes"
        )


def number(value: Any, name: str, of: str, least: int = 0) -> int:
    """Return a count; 2.0 is a number too.

    Raises UsageError if it is a text, has a fraction or is less than `least`.
    """
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        if not isinstance(value, str | bool) and int(value) == value >= least:
            return int(value)
    some = ", ".join(str(least + more) for more in range(3))
    raise UsageError(f"{name}={value!r} is not a number of {of}: {some}, …")


def seconds(value: str | float | timedelta | None, name: str) -> float | None:
    """A time as distributed and the configuration give it."""
    return parse_seconds(value.total_seconds() if isinstance(value, timedelta) else value, name)


def check_interface(interface: str | None, what: str) -> None:
    """Refuse an interface that this machine does not have."""
    if interface is None:
        return
    from distributed.utils import get_ip_interface

    try:
        get_ip_interface(interface)
    except ValueError:
        from hpcdask.comm.fabric import interfaces

        has = ", ".join(one.name for one in interfaces(every=True))
        raise UsageError(
            f"{what}: this machine has no interface {interface} with an IPv4 address. It has: "
            f"{has}. If only the nodes have {interface}, name this machine's: "
            f'scheduler_options={{"interface": "…"}}'
        ) from None
