"""Workers on the GPU and on the CPU in one cluster, and the data between them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest

import hpcdask
from hpcdask.clusters.cluster import JobCluster
from hpcdask.gpu.devices import Gpu
from hpcdask.queues.job_state import OVER
from launching import wait_for

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

ON_GPU, ON_CPU = {"GPU": 1}, {"CPU": 1}


def live(cluster: JobCluster) -> Counter[str]:
    return Counter(job.group for job in cluster.jobs() if job.state not in OVER)


@pytest.fixture(scope="module")
def cluster(gpus: list[Gpu], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One worker on a GPU, two on the CPU."""
    with hpcdask.LocalCUDAJobCluster(
        groups={"gpu": {"rmm_pool_size": "256MiB"}, "cpu": {"device": "cpu", "nthreads": 1}},
        cores=1,
        processes=1,
        memory="4GiB",
        poll_interval=1,
        shared_temp_directory=str(tmp_path_factory.mktemp("clusters")),
    ) as cluster:
        cluster.scale(gpu=1, cpu=2)
        cluster.wait_for_workers(3, timeout=180)
        yield cluster


def test_data_go_both_ways(cluster: JobCluster) -> None:
    def double(x: Any) -> Any:
        import cupy

        return 2 * cupy.asarray(x)

    def look(x: Any) -> tuple[str, bool, float]:
        import numpy as np

        return type(x).__module__.partition(".")[0], isinstance(x, np.ndarray), float(x.sum())

    def to_host(x: Any) -> Any:
        return x.get()

    with cluster.get_client() as client:
        workers = client.sync(client.scheduler.identity, n_workers=-1)["workers"]
        kinds = Counter(tuple(sorted(one["resources"].items())) for one in workers.values())
        assert kinds == {(("GPU", 1),): 1, (("CPU", 1),): 2}
        exchange = client.run(lambda dask_worker: dask_worker.exchange)
        on_cpu = [address for address, one in workers.items() if "CPU" in one["resources"]]
        assert {exchange[address] for address in on_cpu} == {"tcp"}

        for shape in [(1000, 700), (), (0, 3)]:
            values = np.random.default_rng(1).random(shape)
            made = client.submit(lambda v: v.copy(), values, resources=ON_CPU, pure=False)
            doubled = client.submit(double, made, resources=ON_GPU, pure=False)
            kind, is_numpy, total = client.submit(
                look, doubled, resources=ON_GPU, pure=False
            ).result()
            assert (kind, is_numpy) == ("cupy", False)
            assert total == pytest.approx(2 * values.sum())
            gathered = client.submit(to_host, doubled, resources=ON_GPU, pure=False).result()
            np.testing.assert_array_equal(gathered, 2 * values)
            kind, is_numpy, total = client.submit(
                look, doubled, resources=ON_CPU, pure=False
            ).result()
            assert (kind, is_numpy) == ("hpcdask", True)  # see hpcdask.comm.host_arrays
            assert total == pytest.approx(2 * values.sum())
            more = client.submit(lambda x: x + 1, doubled, resources=ON_CPU, pure=False)
            np.testing.assert_array_equal(np.asarray(more.result()), 2 * values + 1)
            again = client.submit(double, more, resources=ON_GPU, pure=False)
            back = client.submit(to_host, again, resources=ON_GPU, pure=False).result()
            np.testing.assert_array_equal(back, 2 * (2 * values + 1))


def test_what_a_gpu_worker_hands_over_is_a_device_array_again(cluster: JobCluster) -> None:
    def make() -> Any:
        import os

        import cupy

        return cupy.asarray(np.frombuffer(os.urandom(8000)).view("u1").copy())

    def look(x: Any) -> tuple[str, Any]:
        return type(x).__module__.partition(".")[0], x.get()

    with cluster.get_client() as client:
        held = client.submit(make, resources=ON_GPU, pure=False)
        kind, before = client.submit(look, held, resources=ON_GPU, pure=False).result()
        assert kind == "cupy"
        cluster.scale(gpu=0)
        wait_for(lambda: live(cluster) == {"cpu": 2}, 90, "the GPU's worker to leave")
        assert held.status == "finished"
        cluster.scale(gpu=1)
        cluster.wait_for_workers(3, timeout=180)
        kind, after = client.submit(look, held, resources=ON_GPU, pure=False).result()
        assert kind == "cupy"
        np.testing.assert_array_equal(after, before)  # moved, not made again


def test_an_array_whose_blocks_are_made_on_the_cpu(cluster: JobCluster) -> None:
    def to_device(block: Any) -> Any:
        import cupy

        return cupy.asarray(block)

    def mean_of_block(block: Any) -> Any:
        return block.mean(axis=0, keepdims=True).get()

    with cluster.get_client() as client:
        with dask.annotate(resources=ON_CPU):
            x = da.random.default_rng(3).random((2000, 500), chunks=(500, 500))
        with dask.annotate(resources=ON_GPU):
            squares = x.map_blocks(to_device, meta=np.empty((0, 0))) ** 2
            chunks, meta = ((1,) * 4, (500,)), np.empty((0, 0))
            means = squares.map_blocks(mean_of_block, chunks=chunks, meta=meta)
        found, values = client.compute([means, x], optimize_graph=False, sync=True)
        expected = (values.reshape(4, 500, 500) ** 2).mean(axis=1)
        np.testing.assert_allclose(found, expected, rtol=1e-12)
