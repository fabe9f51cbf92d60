"""Gangs on GPUs: torch over NCCL, each rank on its worker's own GPU."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import cloudpickle
import pytest

import hpcdask
from hpcdask.errors import GangError
from hpcdask.gpu.devices import Gpu
from launching import needs

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300), needs("torch")]
BENCHMARK = Path(__file__).parents[2] / "benchmarks/peers.py"
PROGRAM = Path(__file__).parents[2] / "examples" / "torch_ddp.py"


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch) -> Callable:
    """The training of the example, with this rank's failure as an option."""
    spec = importlib.util.spec_from_file_location("torch_ddp", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "torch_ddp", module)
    spec.loader.exec_module(module)
    cloudpickle.register_pickle_by_value(module)
    return module.train


def test_data_parallel_training(gpus: list[Gpu], train: Callable, tmp_path: Path) -> None:
    size = min(2, len(gpus))
    options = {"cores": 1, "memory": "8GiB", "walltime": "00:10:00", "poll_interval": 1}
    with (
        hpcdask.LocalCUDAJobCluster(**options, shared_temp_directory=str(tmp_path)) as cluster,
        cluster.get_client() as client,
    ):
        cluster.scale(size)
        client.wait_for_workers(size, timeout=120)
        for _ in range(2):  # the processes of the first one can do it again
            found = hpcdask.gang(train, range(size), client=client, shared={"steps": 200})
            assert len(found) == size
            assert found == [found[0]] * size
            assert found[0] == pytest.approx(range(1, 9), abs=0.01)
        devices = hpcdask.gang(lambda context: context.device, client=client)
        assert devices == ["cuda:0"] * size

        def fails(context) -> None:
            import torch

            torch.distributed.init_process_group("nccl")
            try:
                if context.rank == context.world_size - 1:
                    raise ValueError("so it goes")
                ones = torch.ones(10, device=context.device)
                torch.distributed.all_reduce(ones)
                torch.cuda.synchronize()
            finally:
                torch.distributed.destroy_process_group()

        with pytest.raises(GangError, match="so it goes") as caught:
            hpcdask.gang(fails, size=size, client=client, timeout=60)
        assert caught.value.rank == size - 1
        found = hpcdask.gang(train, range(size), client=client, shared={"steps": 200}, timeout=120)
        assert found[0] == pytest.approx(range(1, 9), abs=0.01)


def test_an_all_reduce_beside_the_same_without_dask(gpus: list[Gpu], tmp_path: Path) -> None:
    """Asserts that both are right; ALLREDUCE_JSON names a file for the ratio, ROUNDS how often."""
    if len(gpus) < 2:
        pytest.skip("a single GPU")
    path = Path(os.environ.get("ALLREDUCE_JSON", tmp_path / "allreduce.json"))
    options = ["--cases", "allreduce", "--rounds", os.environ.get("ROUNDS", "2"), "--json"]
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), *options, str(path)],
        capture_output=True,
        text=True,
        timeout=290,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (case,) = (one for one in json.loads(path.read_text())["cases"] if "all-reduce" in one["case"])
    assert case["ratio"] > 0
    print(done.stdout)  # the ratio of seconds: 1.11 is 90 % of the bandwidth
