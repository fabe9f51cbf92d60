"""The cluster classes on real GPUs: one of its own for each job, and what workers exchange."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import dask.array as da
import numpy as np
import pytest

import hpcdask
from gpu_launching import slurm_answers
from hpcdask.bench.cluster import wait_until_warm
from hpcdask.clusters.cluster import JobCluster
from hpcdask.gpu.devices import Gpu
from hpcdask.jobs.state import OVER, JobState
from launching import wait_for

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.fixture(params=["local", "slurm"])
def make(
    request: pytest.FixtureRequest, gpus: list[Gpu], tmp_path: Path
) -> Callable[..., JobCluster]:
    """Makes clusters of processes, and of jobs of a SLURM that has the GPUs of this machine."""
    asked = {
        "cores": 1,
        "memory": "4GiB",
        "walltime": "00:10:00",
        "poll_interval": 1,
        "shared_temp_directory": str(tmp_path / "clusters"),
    }
    if request.param == "local":
        return lambda **keywords: hpcdask.LocalCUDAJobCluster(**asked, **keywords)
    if not slurm_answers():
        pytest.skip("no SLURM that answers")
    return lambda **keywords: hpcdask.SLURMCUDACluster(**asked, **keywords)


def live(cluster: JobCluster) -> list[JobState]:
    return [job.state for job in cluster.jobs() if job.state not in OVER]


def test_every_job_has_a_gpu_of_its_own(make: Callable[..., JobCluster], gpus: list[Gpu]) -> None:
    def look() -> tuple[str, int, float]:
        import cupy

        visible = os.environ["CUDA_VISIBLE_DEVICES"]
        return visible, cupy.cuda.runtime.getDeviceCount(), float(cupy.arange(10.0).sum())

    with make() as cluster, cluster.get_client() as client:
        cluster.scale(len(gpus))
        client.wait_for_workers(len(gpus), timeout=120)
        seen = sorted(client.run(look).values())
        assert seen == sorted((gpu.uuid, 1, 45.0) for gpu in gpus)
        cluster.scale(len(gpus) + 1)
        wait_for(lambda: "Resources" in cluster.jobs()[-1].reason, 30, "a job to wait for a GPU")
        assert len(client.nthreads()) == len(gpus)
        cluster.scale(0)
        wait_for(lambda: not live(cluster), 60, "all jobs to end")


@pytest.mark.parametrize("protocol", ["tcp", "ucx"])
def test_jobs_exchange_blocks(
    make: Callable[..., JobCluster], gpus: list[Gpu], protocol: str
) -> None:
    def block(block_id: tuple[int, int]) -> np.ndarray:
        import cupy

        i, j = block_id
        return cupy.full((1000, 1000), 10.0 * i + j)

    with make(protocol=protocol) as cluster, cluster.get_client() as client:
        cluster.scale(len(gpus))
        client.wait_for_workers(len(gpus), timeout=120)
        wait_until_warm(client)
        chunks = ((1000,) * 4, (1000,) * 4)
        x = da.map_blocks(block, chunks=chunks, dtype=float, meta=np.empty((0, 0)))
        y = (x + x.T).map_blocks(lambda part: part.get(), meta=np.empty((0, 0))).compute()
        used = client.run(lambda dask_worker: set(dask_worker.peer_transports.values()))
        expected = {"ucx"} if protocol == "ucx" and len(gpus) > 1 else set()
        assert set().union(*used.values()) == expected
        if expected:
            assert "CUDA IPC is active" in cluster._repr_html_()
        tens = [[11.0 * (i + j) for j in range(4)] for i in range(4)]
        assert (y == np.kron(tens, np.ones((1000, 1000)))).all()
        cluster.adapt(minimum=0, maximum=len(gpus))
        wait_for(lambda: not live(cluster), 60, "all jobs to end")
        assert not any(job.state == JobState.FAILED for job in cluster.jobs())
