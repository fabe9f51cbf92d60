"""The public cluster classes, one per queueing system, made from the registry and its queues."""

from __future__ import annotations

import sys
from typing import Any

from hpcdask.queues.base import Queue
from hpcdask.queues.registry import SYSTEMS, queue_class

from .cluster import JobCluster

_PARAMETERS = """

    Every keyword of dask-jobqueue's class keeps its name and meaning, and its configuration
    (``jobqueue.{config}``) is read, so that changing the import is enough. The fields of
    `hpcdask.spec.specs.WorkerSpec` are keywords as well.

    Parameters
    ----------
    n_workers : int
        Workers to start with.
    gpus_per_job : int
        GPUs that each job requests, on all its nodes together; the job starts one worker per GPU.
        Default: 1; 0 with ``device="cpu"``, and then ``processes`` workers per job. Directives of
        your own that request GPUs count.
    gpu_type : str
        Type of GPU in the site's words, such as ``"h200"``.
    nodes_per_job : int
        Nodes of each job, among which its GPUs are shared evenly. Default: 1.
    device : {{"auto", "cuda", "cpu"}}
        What the workers compute on.
    cores, memory : int, str
        Of each job: CPU cores, and host memory such as ``"64GiB"``.
    walltime : str
        In the system's own form. Workers hand over what they hold before it is reached, and the
        job is replaced.
    queue, account : str
        The queue (SLURM's partition), and what jobs are charged to. Some systems have ``project``
        in place of the account, HTCondor has neither.
    nthreads : int
        Threads of each worker. Default: 1 on a GPU; on the CPU the cores of its share of the job.
    job_script_prologue : list of str
        Lines of shell before the workers start, such as ``["module load cuda"]``.
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
        Folder on a file system that the nodes share, for scripts, logs and keys (0700).
        Default: ``~/.hpcdask``.
    config_name : str
        Section of the configuration to read instead; what it leaves out is that of
        ``jobqueue.{config}``.
    name : str
        Name of the cluster. Default: a random one.
    scheduler_options : dict
        Passed to the scheduler, such as ``{{"interface": "eth0", "dashboard_address": ":8788"}}``.
        The dashboard listens on 127.0.0.1 if nothing is said of it.
    silence_logs : str, int or bool
        Level below which distributed's messages in this process are left out while the cluster
        lives. Default: ``"error"``; False for none.
    asynchronous : bool
        Use it with ``async with``.
    **job_keywords
        All others of dask-jobqueue's class and of `WorkerSpec`.

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
            print("hpcdask: no GPU on this machine: workers use the CPU", file=sys.stderr)
            job_keywords["device"] = "cpu"
        share = max(1, len(gpus))
        job_keywords.setdefault("cores", max(1, len(launcher_cores()) // share))
        job_keywords.setdefault("memory", psutil.virtual_memory().total // share)
        walltime = parse_seconds(job_keywords.get("walltime"), "walltime")
        return LocalQueue(gpus=gpus or None, walltime_s=walltime)


def _contents(system: str) -> dict[str, Any]:
    """What the class of a system has that others have not."""
    queue = queue_class(system)
    usual = f"Dask workers on GPUs that {queue.title} grants; see `SLURMCUDACluster`."
    module, _ = queue.jobqueue
    return {
        "__doc__": (queue.summary or usual) + _PARAMETERS.format(config=module),
        "__module__": __name__,
        "queue_name": system,
        "jobqueue": queue.jobqueue,
    }


def __getattr__(name: str) -> Any:
    """Make the class of a system when it is asked for: the registry alone says which there are."""
    system = next((key for key, found in SYSTEMS.items() if found.cluster == name), None)
    if system is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    base = LocalJobCluster if queue_class(system).is_local else JobCluster
    return globals().setdefault(name, type(name, (base,), _contents(system)))
