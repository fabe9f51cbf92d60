"""A cluster of jobs shows its GPUs, of which NVML's stand-in (tests/fakes/pynvml.py) tells."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import hpcdask
from launching import wait_for

FAKES = str(Path(__file__).parents[1] / "fakes")
NODE = [
    {
        "uuid": f"GPU-{index}",
        "name": "Fake H100",
        "now": {"utilisation": 60, "used": 2**30, "power": 200_000, "energy": 5_000, "reasons": 0},
    }
    for index in range(2)
]
#: Has workers, which compute on the CPU here, report a GPU each.
PRELOAD = """
import os
from hpcdask.gpu.reporting import GpuReporter

def dask_setup(worker):
    for number in range(2):
        try:
            os.mkdir(f"FOLDER/{number}")
        except FileExistsError:
            continue
        GpuReporter(worker, f"GPU-{number}").start()
        break
"""


@pytest.mark.slow
def test_a_cluster_of_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    preload = tmp_path / "preload.py"
    preload.write_text(PRELOAD.replace("FOLDER", str(tmp_path)))
    monkeypatch.setenv("FAKE_NVML", json.dumps(NODE))
    monkeypatch.setenv("PYTHONPATH", FAKES, prepend=":")
    monkeypatch.setenv("DASK_DISTRIBUTED__WORKER__PRELOAD", str([str(preload)]))
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
        assert cluster.gpus() == ()
        assert "GPUs:" not in cluster._repr_html_()
        cluster.scale(2)
        client.wait_for_workers(2, timeout=300)
        transport = "<strong>Transport:</strong> tcp between workers"
        wait_for(lambda: transport in cluster._repr_html_(), 60, "both to be warm")
        wait_for(lambda: len(cluster.gpus()) == 2, 60, "samples")
        assert {one.sample.uuid for one in cluster.gpus()} == {"GPU-0", "GPU-1"}
        assert len(hpcdask.gpus(client)) == 2
        summary = "2 x Fake H100, memory 2.00 GiB of 160.00 GiB, utilisation 60 %"
        assert f"<strong>GPUs:</strong> {summary}" in cluster._repr_html_()
        assert "GPUs: " not in capsys.readouterr().err
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "GPUs: " in line)
    assert line.startswith("hpcdask: GPUs: 2 x Fake H100, ")
    assert "peak memory 1.00 GiB of 80.00 GiB" in line
