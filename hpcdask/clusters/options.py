"""What a cluster is made of, from the keywords of its class: read and checked once.

The keywords are dask-jobqueue's, those of `WorkerSpec`, and a few of hpcdask. What is not given
comes from dask-jobqueue's configuration (``jobqueue.slurm.*`` and so on), as with its own classes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import inspect
import os
import re
import shlex
import signal
import sys
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import dask.config

from hpcdask.errors import UsageError
from hpcdask.queues.base import Queue, Request
from hpcdask.queues.gpu_directives import is_per_node, requested_gpus
from hpcdask.queues.helpers import walltime_text
from hpcdask.queues.script import check_lines
from hpcdask.security.credentials import check_configuration
from hpcdask.spec.parsing import LEAST_MEMORY_LIMIT, parse_memory, parse_seconds
from hpcdask.spec.specs import WorkerSpec

#: Placeholder of the scheduler's address in a preview.
NO_ADDRESS = "<scheduler's address>"
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
MISSING = object()
_sections = threading.RLock()
#: dask-jobqueue's names of what `WorkerSpec` has too, or has under another name.
SHARED = {"interface", "local_directory", "death_timeout"}
#: Lines of shell, which may hold any character.
SHELL = {"job_script_prologue", "env_extra"}
#: Keywords of dask-jobqueue whose values are lists, in its old names too.
LISTS = (
    *("job_extra_directives", "job_extra", "job_directives_skip", "header_skip"),
    *("job_script_prologue", "env_extra", "worker_extra_args", "extra"),
    *("submit_command_extra", "cancel_command_extra"),
)


def import_jobqueue(module: str) -> Any:
    """Import a module of dask-jobqueue.

    The import would replace the handler of SIGINT, and writes a file of configuration.

    Raises
    ------
    UsageError
        Others may write Dask's configuration.
    """
    import importlib

    real, mask = signal.signal, os.umask(0o077)
    signal.signal = lambda *args: None
    try:
        found = importlib.import_module(f"dask_jobqueue.{module}")
    finally:
        signal.signal = real
        os.umask(mask)
    check_configuration()
    return found


@dataclass
class JobOptions:
    """What one job is.

    Attributes
    ----------
    job
        dask-jobqueue's Job: header and options only.
    spec
        What its workers are.
    gpus, gpu_type, nodes
        What the job asks for; `gpus` on all its nodes together.
    gpus_in_header
        Whether the user's own directives ask for the GPUs.
    workers
        Workers of the job, on all its nodes together.
    python
        Shell words of the interpreter.
    walltime
        Or None where there is none.
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

    def request(self, tag: str, logs: str) -> Request:
        """What the queue adds to the header."""
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


def job_keywords(job_cls: type) -> set[str]:
    """The keywords that a Job class of dask-jobqueue takes, its bases' included."""
    names: set[str] = set()
    for base in job_cls.__mro__:
        if base.__name__ == "ProcessInterface":
            break
        names |= set(inspect.signature(base.__init__).parameters)  # type: ignore[misc]
    return names - {"self", "args", "kwargs", "base_class_kwargs", "scheduler", "name", "security"}


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

    `own` are the names of the cluster's other keywords.

    Raises
    ------
    UsageError
        A keyword is unknown or its value is not understood.
    """
    known = job_keywords(job_cls)
    if unknown := set(given) - known - SPEC_FIELDS:
        raise UsageError(_unknown(sorted(unknown), own, known))
    _refuse_other_workers(given, config_name)
    _refuse_texts(given, config_name)
    nodes_per_job = number(nodes_per_job, "nodes_per_job", "nodes", least=1)
    for_job = {name: value for name, value in given.items() if name in known}
    settings = {name: value for name, value in given.items() if name in SPEC_FIELDS}
    settings = {**_worker_extra_args(for_job, config_name), **settings}
    for name in SHARED - set(settings):
        settings[name] = dask.config.get(f"jobqueue.{config_name}.{name.replace('_', '-')}", None)
    if protocol is not None:
        settings["protocol"] = re.sub(r"^(tls|tcp)(://)?$", "tcp", protocol.removesuffix("://"))
    spec = WorkerSpec.from_keywords(
        {name: value for name, value in settings.items() if value is not None}
    )

    gpus, in_header = _gpus(gpus_per_job, nodes_per_job, spec, queue, for_job, config_name)
    if gpus % nodes_per_job:
        raise UsageError(
            f"gpus_per_job={gpus} cannot be shared evenly by nodes_per_job={nodes_per_job}"
        )
    for name in sorted(known - SHELL):
        check_lines(_configured(name, for_job, config_name), name)
    for what, value in (("gpu_type", gpu_type), ("name", _configured("name", {}, config_name))):
        check_lines(value, what)
    job = _make_job(job_cls, for_job, config_name, processes=gpus or None)
    workers = gpus or int(job.worker_processes) * nodes_per_job
    per_node = workers // nodes_per_job
    memory = int(job.worker_memory) // per_node if spec.memory_limit is None else spec.memory_limit
    if 0 < memory < LEAST_MEMORY_LIMIT:
        raise UsageError(
            f"a job's memory of {int(job.worker_memory):,} bytes is {memory:,} for each of its "
            f"{per_node} workers on a node, less than an idle worker has: ask for more memory, or "
            f"fewer processes"
        )
    filled = dataclasses.replace(
        spec,
        memory_limit=memory,
        nthreads=spec.nthreads or _threads(spec, gpus, int(job.worker_cores) // per_node),
    )
    walltime = _walltime(queue, for_job, config_name)
    return JobOptions(
        job,
        filled,
        gpus,
        gpu_type,
        nodes_per_job,
        in_header,
        workers,
        _python(for_job, config_name),
        walltime,
    )


def _unknown(names: Sequence[str], own: Collection[str], known: Collection[str]) -> str:
    near = difflib.get_close_matches(names[0], [*own, *known, *SPEC_FIELDS], 1)
    hints = [MEANT[names[0]]] if names[0] in MEANT else near
    return (
        f"unknown keyword {', '.join(names)}: {f'did you mean {hints[0]}? ' if hints else ''}There "
        f"are those of hpcdask's clusters ({', '.join(sorted(own))}), of the workers "
        f"({', '.join(sorted(SPEC_FIELDS))}) and of dask-jobqueue ({', '.join(sorted(known))})"
    )


@contextlib.contextmanager
def section(config_name: str, usual: str) -> Iterator[None]:
    """What a section of the configuration leaves out is that of the usual one.

    Raises
    ------
    UsageError
        There is no such section.
    """
    if not isinstance(dask.config.get(f"jobqueue.{config_name}", None), Mapping):
        sections = ", ".join(sorted(dask.config.get("jobqueue")))
        raise UsageError(
            f"config_name={config_name!r}: Dask's configuration has no section "
            f"jobqueue.{config_name}. It has: {sections}. A new one needs only what differs from "
            f"jobqueue.{usual}"
        )
    with _sections:  # the configuration is that of all threads
        missing = {
            f"jobqueue.{config_name}.{key}": value
            for key, value in (dask.config.get(f"jobqueue.{usual}", None) or {}).items()
            if dask.config.get(f"jobqueue.{config_name}.{key}", MISSING) is MISSING
        }
        with dask.config.set(missing):
            yield


def _threads(spec: WorkerSpec, gpus: int, cores: int) -> int | None:
    """On a GPU one thread, which is the worker's own default; else the cores, shared."""
    on_gpu = gpus and spec.device != "cpu"
    return None if on_gpu else max(1, cores)


def _refuse_other_workers(given: Mapping[str, Any], config_name: str) -> None:
    if given.get("worker_command") not in (None, "distributed.cli.dask_worker", "hpcdask.worker"):
        raise UsageError(
            f"worker_command={given['worker_command']!r}: jobs start hpcdask's own worker, which "
            f"takes the place of dask_cuda.cli. Leave it out"
        )
    if given.get("nanny") is False:
        raise UsageError("nanny=False: every worker has a nanny, which restarts it. Leave it out")


def _configured(name: str, given: Mapping[str, Any], config_name: str, default: Any = None) -> Any:
    value = given.get(name)
    if value is None:
        value = dask.config.get(f"jobqueue.{config_name}.{name.replace('_', '-')}", None)
    return default if value is None else value


def _worker_extra_args(for_job: dict[str, Any], config_name: str) -> dict[str, Any]:
    """``worker_extra_args`` as fields of `WorkerSpec`; the names are dask's and dask-cuda's."""
    import click

    args = _configured("worker_extra_args", for_job, config_name)
    args = args or _configured("extra", for_job, config_name, [])
    for_job.pop("extra", None)
    for_job["worker_extra_args"] = []
    words = [word for arg in args for word in shlex.split(str(arg))]
    try:
        spec = WorkerSpec.from_argv(words)
    except click.UsageError as error:
        raise UsageError(f"worker_extra_args: {error.format_message()}") from None
    if spec.name is not None:
        raise UsageError("worker_extra_args: --name: workers are named after their jobs. Leave it")
    return {
        field.name: getattr(spec, field.name)
        for field in dataclasses.fields(spec)
        if getattr(spec, field.name) != field.default
    }


def _gpus(
    asked: int | None,
    nodes: int,
    spec: WorkerSpec,
    queue: Queue,
    for_job: Mapping[str, Any],
    config_name: str,
) -> tuple[int, bool]:
    """GPUs per job, and whether the user's own directives ask for them already."""
    written, count = _gpu_directive(queue, for_job, config_name)
    if asked is not None:
        if type(asked) is not int or asked < 0:
            raise UsageError(f"gpus_per_job={asked!r} is not a number of GPUs: 0, 1, 2, …")
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
    return count * (nodes if is_per_node(written) else 1), True


def _gpu_directive(
    queue: Queue, for_job: Mapping[str, Any], config_name: str
) -> tuple[str | None, int]:
    """The user's own directive or resource that requests GPUs, and how many."""
    directives = _configured("job_extra_directives", for_job, config_name)
    directives = directives or _configured("job_extra", for_job, config_name, [])
    lines = (
        [f"{key}={value}" for key, value in directives.items()]
        if isinstance(directives, Mapping)
        else [str(line) for line in directives]
    )
    resource = f"-l {_configured('resource_spec', for_job, config_name, '')}"
    for line in [*lines, resource]:
        if (count := requested_gpus(queue, line)) is not None:
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
        if name in keywords and (not isinstance(keywords[name], int) or keywords[name] < 1):
            raise UsageError(f"{name}={keywords[name]!r} is not a number from 1 on")
    _check_memory(_configured("memory", for_job, config_name))
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


def _check_memory(value: Any) -> None:
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


def _refuse_texts(for_job: Mapping[str, Any], config_name: str) -> None:
    """Refuse a text for a list, which would be taken for a list of its characters."""
    for name in LISTS:
        value = _configured(name, for_job, config_name)
        if value and isinstance(value, str):
            raise UsageError(f"{name}={value!r} is a text: give a list, [{value!r}]")


def number(value: Any, name: str, of: str, least: int = 0) -> int:
    """What counts something; 2.0 is a number too.

    Raises
    ------
    UsageError
        It is a text, has a fraction or is less than `least`.
    """
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        if not isinstance(value, str) and int(value) == value >= least:
            return int(value)
    some = ", ".join(str(least + more) for more in range(3))
    raise UsageError(f"{name}={value!r} is not a number of {of}: {some}, …")


def _python(for_job: Mapping[str, Any], config_name: str) -> str:
    """As in dask-jobqueue shell words, since sites start Python through a container's command."""
    return str(_configured("python", for_job, config_name) or shlex.quote(sys.executable))


def _walltime(queue: Queue, for_job: Mapping[str, Any], config_name: str) -> timedelta | None:
    text = _configured("walltime", for_job, config_name)
    return None if text is None else queue.parse_walltime(walltime_text(text))


def log_directory(given: Mapping[str, Any], config_name: str) -> str | None:
    """Where the user wants the jobs' logs, or None for the cluster's folder."""
    path = _configured("log_directory", given, config_name)
    return None if path is None else os.path.abspath(os.path.expanduser(path))


def check_interface(interface: str | None, what: str) -> None:
    """Refuse an interface that this machine does not have."""
    if interface is None:
        return
    from distributed.utils import get_ip_interface

    try:
        get_ip_interface(interface)
    except ValueError:
        import psutil

        raise UsageError(
            f"{what}: this machine has no interface {interface} with an IPv4 address. It has: "
            f"{', '.join(sorted(psutil.net_if_addrs()))}. Where only the nodes have {interface}, "
            f'name this machine\'s: scheduler_options={{"interface": "…"}}'
        ) from None


def seconds(value: str | float | timedelta | None, name: str) -> float | None:
    """A time as distributed and the configuration give it."""
    return parse_seconds(value.total_seconds() if isinstance(value, timedelta) else value, name)
