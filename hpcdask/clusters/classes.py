"""The public cluster classes, one per queueing system."""

from __future__ import annotations

import sys
from typing import Any

from hpcdask.queues.base import Queue

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


def _documented(summary: str, config: str) -> str:
    return summary + _PARAMETERS.format(config=config)


class SLURMCUDACluster(JobCluster):
    __doc__ = _documented(
        """Dask workers on GPUs that SLURM grants, one job per GPU, following the work up and down.

    >>> cluster = SLURMCUDACluster(cores=8, memory="64GiB", walltime="02:00:00", queue="gpu")
    >>> cluster.adapt(minimum=0, maximum=32)
    >>> client = cluster.get_client()

    SLURM alone: ``gpu_request`` is how the site takes the request of GPUs, ``"gres"`` (default),
    ``"gpus-per-node"`` or ``"gpus"``.""",
        "slurm",
    )
    jobqueue = ("slurm", "SLURMJob")
    queue_name = "slurm"

    def _make_queue(self, job_keywords: dict[str, Any]) -> Queue:
        from hpcdask.queues.slurm import SlurmQueue

        request = job_keywords.pop("gpu_request", None)
        return SlurmQueue() if request is None else SlurmQueue(gpu_request=request)


class PBSCUDACluster(JobCluster):
    __doc__ = _documented("Dask workers on GPUs that PBS grants; see `SLURMCUDACluster`.", "pbs")
    jobqueue = ("pbs", "PBSJob")
    queue_name = "pbs"


class MoabCUDACluster(JobCluster):
    __doc__ = _documented("Dask workers on GPUs that Moab grants; see `SLURMCUDACluster`.", "moab")
    jobqueue = ("moab", "MoabJob")
    queue_name = "moab"


class LSFCUDACluster(JobCluster):
    __doc__ = _documented("Dask workers on GPUs that LSF grants; see `SLURMCUDACluster`.", "lsf")
    jobqueue = ("lsf", "LSFJob")
    queue_name = "lsf"


class SGECUDACluster(JobCluster):
    __doc__ = _documented(
        "Dask workers on GPUs that Grid Engine grants; see `SLURMCUDACluster`.", "sge"
    )
    jobqueue = ("sge", "SGEJob")
    queue_name = "sge"


class OARCUDACluster(JobCluster):
    __doc__ = _documented("Dask workers on GPUs that OAR grants; see `SLURMCUDACluster`.", "oar")
    jobqueue = ("oar", "OARJob")
    queue_name = "oar"


class HTCondorCUDACluster(JobCluster):
    __doc__ = _documented(
        "Dask workers on GPUs that HTCondor grants; see `SLURMCUDACluster`.", "htcondor"
    )
    jobqueue = ("htcondor", "HTCondorJob")
    queue_name = "htcondor"


class LocalCUDAJobCluster(JobCluster):
    __doc__ = _documented(
        """The same with processes of this machine as jobs: for laptops, tests, a single GPU box.

    Cores and memory of a job default to this machine's, shared by its GPUs. Each job gets GPUs of
    its own; jobs that find none free are pending.""",
        "local",
    )
    jobqueue = ("local", "LocalJob")
    queue_name = "local"

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
