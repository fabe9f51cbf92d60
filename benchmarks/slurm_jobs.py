"""Time from `scale` of a SLURM cluster to the last worker, of one job each.

    python benchmarks/slurm_jobs.py hpcdask|dask-jobqueue JOBS

The clock starts when the cluster object is there. In the environment, `JOB_KEYWORDS` are keywords
for both, as JSON, `JOB_DEVICE` is what workers compute on, and `JOB_FOLDER` is for logs.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from typing import Any


def make_cluster(kind: str) -> Any:
    """Make a cluster without jobs."""
    device = os.environ.get("JOB_DEVICE", "cuda")
    keywords = json.loads(os.environ.get("JOB_KEYWORDS", "{}"))
    folder = tempfile.mkdtemp(dir=os.environ.get("JOB_FOLDER"))
    if kind == "hpcdask":
        from hpcdask import SLURMCUDACluster

        keywords |= {"gpus_per_job": 1, "device": device, "shared_temp_directory": folder}
        return SLURMCUDACluster(**keywords)
    from dask_jobqueue import SLURMCluster

    keywords |= {"worker_command": "dask_cuda.cli"} if device == "cuda" else {}
    keywords |= {"job_extra_directives": ["--gres=gpu:1"], "processes": 1, "log_directory": folder}
    return SLURMCluster(**keywords)


if __name__ == "__main__":
    jobs = int(sys.argv[2])
    with make_cluster(sys.argv[1]) as cluster, cluster.get_client() as client:
        start = time.perf_counter()
        cluster.scale(jobs)
        client.wait_for_workers(jobs, timeout=120)
        print(json.dumps({"seconds": time.perf_counter() - start, "correct": True}), flush=True)
