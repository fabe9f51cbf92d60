"""Gangs over NCCL, of which one rank fails: all end with the right word, and no trace."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

import cloudpickle
import pytest
from distributed import Client

import hpcdask
from gpu_launching import WITH_TORCH, device_memory_is_back, job_cluster, used_memory
from hpcdask.client import gang_scheduler
from hpcdask.client.gang import RankContext
from hpcdask.errors import GangError
from hpcdask.gpu import nccl
from hpcdask.gpu.devices import Gpu
from launching import wait_for

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(500)]
cloudpickle.register_pickle_by_value(sys.modules[__name__])
#: What one rank may do, and what the error then says.
FAULTS = {"kill": "its worker died"}
#: How it does not come to an all-reduce: in C, with Python's lock held.
HANG = "locked"
LONG_S, HANG_S = 120, 4


def misbehave(kind: str) -> None:
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == HANG:
        ctypes.PyDLL(None).pause()


def unique_id(context: RankContext) -> bytes:
    return nccl.unique_id()


def reduce(context: RankContext, kind: str, key: bytes) -> float:
    """Two all-reduces over NCCL alone; between them, when all ranks are joined, the fault."""
    communicator = nccl.join(context.rank, context.world_size, key)
    try:
        _, first = nccl.all_reduce(communicator, 2**20, 1)
        misbehave(kind)
        _, second = nccl.all_reduce(communicator, 2**20, 1)
        return float(first + second)
    finally:
        communicator.abort()


def reduce_by_torch(context: RankContext, kind: str) -> float:
    """Do the same by torch."""
    import torch
    import torch.distributed

    on_gpu = context.device != "cpu"
    if on_gpu:
        torch.cuda.set_device(context.device)

    def total() -> float:
        numbers = torch.full((1000,), context.rank + 1.0, device=context.device)
        torch.distributed.all_reduce(numbers)
        return float(numbers.sum())

    torch.distributed.init_process_group("nccl" if on_gpu else "gloo")
    try:
        first = total()
        misbehave(kind)
        return float(first + total() == context.world_size * (context.world_size + 1) * 1000) * 2
    except BaseException:
        torch.distributed.group.WORLD.abort()  # to destroy it waits for the other ranks
        raise
    finally:
        torch.distributed.destroy_process_group()


def preload() -> None:
    import torch  # noqa: F401 so that no deadline has the import in it


def check(client: Client, kinds: list[str], by: str) -> None:
    """Check how a gang ends whose ranks do these."""
    call, shared = reduce_by_torch, {}
    if by == "nccl":
        (key,) = hpcdask.gang(unique_id, client=client, size=1, timeout=LONG_S)
        call, shared = reduce, {"key": key}
    options = {"client": client, "grace": 1, "shared": shared}
    options["timeout"] = HANG_S if HANG in kinds else LONG_S
    faulty = [(kind, rank) for rank, kind in enumerate(kinds) if kind != "fine"]
    if not faulty:
        assert hpcdask.gang(call, kinds, **options) == [2.0] * len(kinds)
        return
    ((kind, rank),) = faulty
    with pytest.raises(GangError, match=FAULTS.get(kind, "still ran")) as caught:
        hpcdask.gang(call, kinds, **options)
    assert kind == HANG or caught.value.rank == rank


def left(dask_scheduler) -> list:
    keys = [key for key in dask_scheduler.tasks if "gang" in str(key)]
    return keys + gang_scheduler.describe(dask_scheduler)


@pytest.mark.parametrize(
    ("by", "faults"),
    [
        ("nccl", ["kill", HANG]),
        pytest.param("torch", ["kill"], marks=WITH_TORCH),
    ],
)
def test_each_fault(gpus: list[Gpu], tmp_path: Path, by: str, faults: list[str]) -> None:
    def ready() -> None:
        client.wait_for_workers(2, timeout=LONG_S)
        if by == "torch":
            client.run(preload)

    if len(gpus) < 2:
        pytest.skip("a single GPU")
    idle = used_memory()
    with job_cluster(tmp_path, 2, memory="16GiB") as (_, client):
        ready()
        check(client, ["fine", "fine"], by)
        held = used_memory()
        for number, kind in enumerate(faults):
            kinds = ["fine", "fine"]
            kinds[number % 2] = kind
            check(client, kinds, by)
            ready()
        check(client, ["fine", "fine"], by)
        wait_for(lambda: not client.run_on_scheduler(left), LONG_S, "the gangs to be gone")
        wait_for(lambda: device_memory_is_back(held), LONG_S, "device memory to be free")
    wait_for(lambda: device_memory_is_back(idle), LONG_S, "all device memory to be free")
