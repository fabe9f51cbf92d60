"""`profile=` of a cluster of jobs; runs are in ``tests/mpi/test_profile.py``."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import hpcdask

JOB = {"device": "cpu", "cores": 1, "processes": 1, "memory": "512MiB", "poll_interval": 0.3}


@pytest.mark.slow
def test_a_flame_graph_for_each_worker(tmp_path: Path) -> None:
    def burn_visibly() -> None:
        end = time.monotonic() + 1
        while time.monotonic() < end:
            sum(range(1000))

    graphs = tmp_path / "graphs"
    keywords = {"shared_temp_directory": str(tmp_path), "profile_folder": str(graphs)}
    with (
        hpcdask.LocalCUDAJobCluster(**JOB, **keywords, profile="py-spy") as cluster,
        cluster.get_client() as client,
    ):
        cluster.scale(2)
        client.wait_for_workers(2, timeout=180)
        tasks = [
            client.submit(burn_visibly, workers=[one], pure=False) for one in client.nthreads()
        ]
        client.gather(tasks)
    found = [graph.read_text() for graph in graphs.iterdir()]
    assert len(found) == 2
    assert all("burn_visibly" in graph for graph in found)
