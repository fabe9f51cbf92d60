"""The public cluster classes, one per queueing system, made from the registry and its queues."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from hpcdask.logs import say
from hpcdask.queues.base import Queue
from hpcdask.queues.registry import queue_class, systems
from hpcdask.spec.signatures import Keyword, describe, spell_out

from .cluster import JobCluster
from .configuration import import_job_class
from .keywords import keywords_of_cluster

_PARAMETERS = """

    Every keyword of dask-jobqueue's class keeps its name and meaning, and its configuration
    (``jobqueue.{config}``) is read, so that changing the import is enough. The fields of
    `hpcdask.spec.specs.WorkerSpec` are keywords as well. None is for a value that nobody gave.

    Parameters
    ----------
    n_workers : int
        Workers to start with.
    groups : dict of dict
        Workers of several kinds: the keywords of each group's jobs, by its name. Those that a group
        does not give are the cluster's. Default: one kind.
    gpus_per_job : int
        GPUs that each job requests, on all its nodes together; the job starts one worker per GPU.
        Default: 1; 0 with ``device="cpu"``, and then ``processes`` workers per job. Directives of
        your own that request GPUs count.
    gpu_type : str
        Type of GPU in the site's words, such as ``"h200"``.
    nodes_per_job : int
        Nodes of each job, among which its GPUs are shared evenly. Default: 1.
    protocol : {{"auto", "tcp", "ucx"}}
        Between workers; all else is tcp. Default: ``"auto"``, ucx where there are fast links.
    interface : str
        Network interface that scheduler and workers listen on, such as ``"ib0"``.
    poll_interval : str or float
        Time between two queries of the queue. Default: 5 s.
    start_timeout : str or float
        Time that a running job's workers get to connect. Default: 300 s.
    security : distributed.Security or bool
        Credentials. Default: new ones for this cluster (TLS); False for none.
    shared_temp_directory : str
        Folder on a file system that the nodes share, for scripts, logs and keys (0700); may have
        variables, such as ``/scratch/$USER``.
        Default: the variable ``HPCDASK_HOME``, or ``~/.hpcdask``.
    config_name : str
        Section of the configuration to read instead; what it leaves out is that of
        ``jobqueue.{config}``.
    name : str
        Name of the cluster. Default: a random one.
    detached : bool
        The scheduler and the control of jobs run in a process of their own, which outlives this
        one. Default: False. See `hpcdask.attach`.
    scheduler_job : dict
        Of a detached cluster: keywords of its scheduler's job. Default: one core and 4 GiB, and
        queue, account and walltime of the workers' jobs. None for a process of this host.
    scheduler_timeout : str or float
        Time that the scheduler's job gets to start before an error says so; it goes on to wait.
        Default: 600 s.
    idle_timeout : str or float
        Time without clients, attached notebooks and Dask tasks after which a detached cluster ends.
        Default: 3600 s.
    scheduler_options : dict
        Passed to the scheduler, such as ``{{"interface": "eth0", "dashboard_address": ":8788"}}``.
        The dashboard listens on 127.0.0.1 if nothing is said of it.
    silence_logs : str, int or bool
        Level below which distributed's messages in this process are left out while the cluster
        lives. Default: ``"error"``; False for none.
    asynchronous : bool
        Use it with ``async with``.
    loop : tornado.ioloop.IOLoop
        Event loop. Default: a new one in a thread.
    scheduler_cls : type
        Class of the scheduler, in place of distributed's own.
    **job_keywords
        Those of the jobs and of the workers.

    Raises
    ------
    UsageError
        A keyword is unknown or its value is not understood; nothing was started.
    Refused, QueueError
        From `scale`: the queue does not take the jobs, or does not answer.
    JobsFailed
        From `wait_for_workers` and Dask tasks: jobs keep ending before their workers connect.
"""


class LocalJobCluster(JobCluster):
    """Base of the cluster whose jobs are processes of this machine."""

    def _make_queue(self, job_keywords: dict[str, Any]) -> Queue:
        import psutil

        from hpcdask.bootstrap.resources import launcher_cores
        from hpcdask.gpu.devices import visible_gpus
        from hpcdask.queues.local import LocalQueue
        from hpcdask.spec.parsing import parse_seconds

        device = job_keywords.get("device", "auto")
        gpus = [] if device == "cpu" else [gpu.uuid for gpu in visible_gpus()]
        if device == "auto" and not gpus:
            say("no GPU on this machine: workers use the CPU")
            job_keywords["device"] = "cpu"
        share = max(1, len(gpus))
        job_keywords.setdefault("cores", max(1, len(launcher_cores()) // share))
        job_keywords.setdefault("memory", psutil.virtual_memory().total // share)
        walltime = parse_seconds(job_keywords.get("walltime"), "walltime")
        return LocalQueue(gpus=gpus or None, walltime_s=walltime)


class _WhenAsked:
    """Class attribute that is read when somebody looks: importing dask-jobqueue takes time."""

    def __init__(self, read: Callable[[type[JobCluster]], Any]) -> None:
        self._read = read

    def __get__(self, instance: object, owner: type[JobCluster]) -> Any:
        return self._read(owner)


def _keywords(cls: type[JobCluster]) -> list[Keyword]:
    """Those of a class that not all of them have."""
    own = inspect.signature(JobCluster).parameters
    found = keywords_of_cluster(queue_class(cls.queue_name), import_job_class(cls.jobqueue))
    return [one for one in found if one.name not in own]


def _signature(cls: type[JobCluster]) -> inspect.Signature | None:
    """The keywords by name; None for a user's class, whose `__init__` has a signature."""
    if cls.__init__ is not JobCluster.__init__:
        return None
    return spell_out(JobCluster, _keywords(cls))


def _doc(cls: type[JobCluster]) -> str:
    queue = queue_class(cls.queue_name)
    usual = f"Dask workers on GPUs that {queue.title} grants; see `SLURMCUDACluster`."
    text = (queue.summary or usual) + _PARAMETERS.format(config=cls.jobqueue[0])
    return describe(text, _keywords(cls))


def _contents(system: str) -> dict[str, Any]:
    """Return the attributes that only this system's class has."""
    return {
        "__doc__": _WhenAsked(_doc),
        "__signature__": _WhenAsked(_signature),
        "__module__": __name__,
        "queue_name": system,
        "jobqueue": queue_class(system).jobqueue,
    }


def __getattr__(name: str) -> Any:
    """Make the class of a system when it is asked for: the registry alone says which there are."""
    system = next((key for key, found in systems().items() if found.cluster == name), None)
    if system is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    base = LocalJobCluster if queue_class(system).is_local else JobCluster
    return globals().setdefault(name, type(name, (base,), _contents(system)))
