"""A cluster of jobs shows its GPUs, of which NVML's stand-in (tests/fakes/pynvml.py) tells."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest

import hpcdask
from launching import needs, wait_for

FAKES = str(Path(__file__).parents[1] / "fakes")
NODE = [
    {
        "uuid": f"GPU-{index}",
        "name": "Fake H100",
        "now": {"utilisation": 60, "used": 2**30, "power": 200_000, "energy": 5_000, "reasons": 0},
    }
    for index in range(2)
]


@needs("prometheus_client")
@pytest.mark.slow
def test_a_cluster_of_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def tell(uuid: str, dask_worker: Any) -> None:
        """What a worker on a GPU does when it is warm: these compute on the CPU."""
        from hpcdask.gpu.reporting import GpuReporter

        GpuReporter(dask_worker, uuid).announce()

    monkeypatch.setenv("FAKE_NVML", json.dumps(NODE))
    monkeypatch.setenv("PYTHONPATH", FAKES, prepend=":")
    with (
        hpcdask.LocalCUDAJobCluster(
            device="cpu",
            cores=1,
            processes=1,
            memory="512MiB",
            poll_interval=0.3,
            shared_temp_directory=str(tmp_path / "clusters"),
        ) as cluster,
        cluster.get_client() as client,
    ):
        cluster.scale(2)
        client.wait_for_workers(2, timeout=300)
        assert cluster.gpus() == ()
        assert "GPUs:" not in cluster._repr_html_()
        transport = "<strong>Transport:</strong> tcp between workers"
        wait_for(lambda: transport in cluster._repr_html_(), 60, "both to be warm")
        for uuid, worker in zip(("GPU-0", "GPU-1"), client.nthreads(), strict=True):
            client.run(tell, uuid, workers=[worker])
        wait_for(lambda: len(cluster.gpus()) == 2, 60, "samples")
        assert {one.sample.uuid for one in cluster.gpus()} == {"GPU-0", "GPU-1"}
        assert len(hpcdask.gpus(client)) == 2
        summary = "2 x Fake H100, memory 2.00 GiB of 160.00 GiB, utilisation 60 %"
        assert f"<strong>GPUs:</strong> {summary}" in cluster._repr_html_()
        address = cluster.dashboard_link.rpartition("/")[0]
        with urllib.request.urlopen(f"{address}/metrics", timeout=120) as answer:
            metrics = answer.read().decode()
        told = re.compile(r'^DCGM_FI_DEV_GPU_UTIL\{.*UUID="GPU-\d".*\} 60.0$', re.MULTILINE)
        assert len(told.findall(metrics)) == 2
        assert "GPUs: " not in capsys.readouterr().err
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "GPUs: " in line)
    assert line.startswith("hpcdask: GPUs: 2 x Fake H100, ")
    assert "peak memory 1.00 GiB of 80.00 GiB" in line
