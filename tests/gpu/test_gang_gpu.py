"""Gangs on GPUs: torch over NCCL, each rank on its worker's own GPU."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import cloudpickle
import pytest
from distributed import Client, Future, LocalCluster

import hpcdask
from gpu_launching import WITH_TORCH, job_cluster
from hpcdask.errors import GangError
from hpcdask.gpu.devices import Gpu

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300), WITH_TORCH]
cloudpickle.register_pickle_by_value(sys.modules[__name__])
PROGRAM = Path(__file__).parents[2] / "examples" / "torch_ddp.py"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example, whose functions workers get by value."""
    spec = importlib.util.spec_from_file_location("torch_ddp", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "torch_ddp", module)
    spec.loader.exec_module(module)
    cloudpickle.register_pickle_by_value(module)
    return module


def draw(client: Client, example: ModuleType, size: int) -> list[Future]:
    """Rows for the example, on the workers; a lambda, which alone distributed sends by value."""
    return client.map(lambda seed: example.draw(seed), range(size), pure=False)


def check_training(client: Client, example: ModuleType, size: int, device: str) -> None:
    rows = draw(client, example, size)
    kinds = client.gather(client.map(lambda one: type(one).__module__, rows))
    assert {kind.partition(".")[0] for kind in kinds} == {"numpy" if device == "cpu" else "cupy"}
    found = hpcdask.gang(example.train, rows, client=client, shared={"steps": 200})
    assert found == [found[0]] * size
    assert found[0] == pytest.approx(range(1, 9), abs=0.01)
    assert hpcdask.gang(lambda context: context.device, client=client) == [device] * size


def test_training_over_nccl(gpus: list[Gpu], tmp_path: Path, example: ModuleType) -> None:
    """The example; then a rank raises while the others wait for it in their first step."""
    size = min(2, len(gpus))
    with job_cluster(tmp_path, size) as (_, client):
        check_training(client, example, size, "cuda:0")
        check_training(client, example, size, "cuda:0")  # by the same processes
        rows, steps = draw(client, example, size), [200] * (size - 1) + ["so it goes"]
        with pytest.raises(GangError, match="'str' object cannot be") as caught:
            hpcdask.gang(example.train, rows, steps, client=client, grace=1, timeout=60)
        assert caught.value.rank == size - 1
        client.wait_for_workers(size, timeout=120)
        check_training(client, example, size, "cuda:0")


def test_training_over_gloo(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, example: ModuleType
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    options = {"n_workers": 2, "threads_per_worker": 1, "host": "127.0.0.1"}
    options |= {"dashboard_address": ":0", "local_directory": str(tmp_path)}
    with LocalCluster(**options) as cluster, Client(cluster) as client:
        check_training(client, example, 2, "cpu")


def beside_the_pool() -> int:
    """Return how many bytes of device memory 1 GiB of torch takes outside of the pool."""
    import cupy
    import torch

    torch.ones(1, device="cuda:0")
    before = cupy.cuda.runtime.memGetInfo()[0]
    numbers = torch.ones(2**28, device="cuda:0")
    cupy.cuda.Device().synchronize()
    taken = before - cupy.cuda.runtime.memGetInfo()[0]
    del numbers
    return int(taken)


def test_torch_may_allocate_from_the_pool(gpus: list[Gpu], tmp_path: Path) -> None:
    with job_cluster(tmp_path, 1, rmm_allocator_external_lib_list="cupy,torch") as (_, client):
        (taken,) = client.run(lambda: beside_the_pool()).values()  # by value
        assert taken < 2**29
