"""The cluster classes on real GPUs: one of its own for each job, and what workers exchange."""

from __future__ import annotations

import os
from pathlib import Path

import dask.array as da
import numpy as np
import pytest

from gpu_launching import job_cluster, slurm_answers
from hpcdask.bench.cluster import wait_until_warm
from hpcdask.gpu.devices import Gpu
from hpcdask.queues.job_state import OVER, JobState
from launching import wait_for

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def look() -> tuple[str, int, float]:
    import cupy

    visible = os.environ["CUDA_VISIBLE_DEVICES"]
    return visible, cupy.cuda.runtime.getDeviceCount(), float(cupy.arange(10.0).sum())


def block(block_id: tuple[int, int]) -> np.ndarray:
    import cupy

    i, j = block_id
    return cupy.full((1000, 1000), 10.0 * i + j)


@pytest.mark.parametrize("system", ["local", "slurm"])
def test_every_job_has_a_gpu_of_its_own_and_exchanges_blocks(
    gpus: list[Gpu], tmp_path: Path, system: str
) -> None:
    if system == "slurm" and not slurm_answers():
        pytest.skip("no SLURM that answers")
    with job_cluster(tmp_path, len(gpus), system == "slurm", protocol="ucx") as (
        cluster,
        client,
    ):
        seen = sorted(client.run(look).values())
        assert seen == sorted((gpu.uuid, 1, 45.0) for gpu in gpus)

        wait_until_warm(client)
        chunks = ((1000,) * 4, (1000,) * 4)
        x = da.map_blocks(block, chunks=chunks, dtype=float, meta=np.empty((0, 0)))
        y = (x + x.T).map_blocks(lambda part: part.get(), meta=np.empty((0, 0))).compute()
        tens = [[11.0 * (i + j) for j in range(4)] for i in range(4)]
        assert (y == np.kron(tens, np.ones((1000, 1000)))).all()
        used = client.run(lambda dask_worker: set(dask_worker.peer_transports.values()))
        assert set().union(*used.values()) == ({"ucx"} if len(gpus) > 1 else set())
        if len(gpus) > 1:
            assert "CUDA IPC is active" in cluster._repr_html_()

        cluster.scale(len(gpus) + 1)
        wait_for(lambda: "Resources" in cluster.jobs()[-1].reason, 30, "a job to wait for a GPU")
        assert len(client.nthreads()) == len(gpus)
        cluster.adapt(minimum=0, maximum=len(gpus))
        wait_for(lambda: all(job.state in OVER for job in cluster.jobs()), 60, "all jobs to end")
        assert not any(job.state == JobState.FAILED for job in cluster.jobs())
