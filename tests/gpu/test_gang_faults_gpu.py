"""Gangs over NCCL, of which one rank fails at random: all end with the right word, and no trace."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import cloudpickle
import psutil
import pytest
from distributed import Client

import hpcdask
from clock import clock
from hpcdask.client import gang_scheduler
from hpcdask.client.gang import RankContext
from hpcdask.errors import GangError
from hpcdask.gpu import nccl
from hpcdask.gpu.devices import Gpu
from launching import describe, needs, wait_for

GANGS = int(os.environ.get("GANGS", "4"))
pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(300 + 40 * GANGS)]
cloudpickle.register_pickle_by_value(sys.modules[__name__])
#: What one rank may do, and what the error then says.
FAULTS = {"raise": "ValueError", "exit": "its worker died", "kill": "its worker died"}
#: How it may not come to an all-reduce: in Python, in C, and in C with Python's lock held.
HANGS = ("absent", "pause", "locked")
LONG_S, HANG_S = 120, 4
#: Device memory that may differ from time to time.
SPARE = 64 * 2**20


def misbehave(kind: str) -> None:
    if kind == "raise":
        raise ValueError("so it goes")
    if kind == "exit":
        os._exit(3)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "absent":
        threading.Event().wait()
    if kind == "pause":
        ctypes.CDLL(None).pause()
    if kind == "locked":
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


def outcome(client: Client, kinds: list[str], by: str) -> str:
    """What is wrong with how a gang ended; empty if nothing is."""
    call, shared = reduce_by_torch, {}
    if by == "nccl":
        (key,) = hpcdask.gang(unique_id, client=client, size=1, timeout=LONG_S)
        call, shared = reduce, {"key": key}
    timeout = HANG_S if {*kinds} & {*HANGS} else LONG_S
    (kind, rank), *_ = [(k, r) for r, k in enumerate(kinds) if k != "fine"] or [("fine", None)]
    expected, size = FAULTS.get(kind, "still ran"), len(kinds)
    try:
        found = hpcdask.gang(call, kinds, client=client, timeout=timeout, grace=1, shared=shared)
    except GangError as error:
        named = kind in HANGS or error.rank == rank
        right = kind != "fine" and expected in str(error) and named
        return "" if right else f"{error} (rank {error.rank})"
    right = kind == "fine" and found == [2.0] * size
    return "" if right else f"returned {found}"


def what_is_left(client: Client) -> list[object]:
    def gangs(dask_scheduler) -> list:
        keys = [key for key in dask_scheduler.tasks if "gang" in str(key)]
        return keys + gang_scheduler.describe(dask_scheduler)

    return list(client.run_on_scheduler(gangs))


def listeners(client: Client) -> list[int]:
    """How many ports each worker listens on."""

    def count() -> int:
        found = psutil.Process().net_connections()
        return sum(one.status == psutil.CONN_LISTEN for one in found)

    return sorted(client.run(count).values())


def children() -> list[psutil.Process]:
    """Living processes that this one or its children started."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


@pytest.fixture
def memory(gpus: list[Gpu]) -> Iterator[list]:
    """NVML's handles of the GPUs."""
    import pynvml

    pynvml.nvmlInit()
    yield [pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid) for gpu in gpus]
    pynvml.nvmlShutdown()


def used(handles: list) -> list[int]:
    import pynvml

    return [int(pynvml.nvmlDeviceGetMemoryInfo(handle).used) for handle in handles]


def is_back(handles: list, before: list[int]) -> bool:
    return all(now <= then + SPARE for now, then in zip(used(handles), before, strict=True))


@pytest.mark.parametrize("by", ["nccl", pytest.param("torch", marks=needs("torch"))])
def test_many_with_faults(gpus: list[Gpu], memory: list, tmp_path: Path, by: str) -> None:
    """More of them with GANGS=100, others with SEED=2."""

    def ready() -> None:
        client.wait_for_workers(size, timeout=LONG_S)
        if by == "torch":
            client.run(preload)

    size = min(2, len(gpus))
    if size < 2:
        pytest.skip("a single GPU")
    seed = int(os.environ.get("SEED", "1"))
    draw = random.Random(seed)
    idle, ours = used(memory), set(children())
    options = {"cores": 1, "memory": "16GiB", "walltime": "01:00:00", "poll_interval": 1}
    with (
        hpcdask.LocalCUDAJobCluster(**options, shared_temp_directory=str(tmp_path)) as cluster,
        cluster.get_client() as client,
    ):
        cluster.scale(size)
        ready()
        assert outcome(client, ["fine"] * size, by) == ""
        ports, held = listeners(client), used(memory)
        wrong = []
        for number in range(GANGS):
            kinds = ["fine"] * size
            kind = draw.choice(["fine", "fine", *FAULTS, *HANGS])
            kinds[draw.randrange(size)] = kind
            start = clock()
            text = outcome(client, kinds, by)
            took = clock() - start
            ready()
            print(f"{number} {kinds}: {took:.1f} s, {clock() - start:.1f} s {text}", flush=True)
            if text:
                wrong.append((seed, number, kinds, text))
        assert not wrong, "\n".join(map(str, wrong))
        assert outcome(client, ["fine"] * size, by) == ""
        wait_for(lambda: not what_is_left(client), LONG_S, "the gangs to be gone")
        wait_for(lambda: listeners(client) == ports, LONG_S, "ports to be free")
        wait_for(lambda: is_back(memory, held), LONG_S, "device memory to be free")
    wait_for(lambda: is_back(memory, idle), LONG_S, "all device memory to be free")
    left = set(children()) - ours
    wait_for(lambda: not {one for one in left if one.is_running()}, LONG_S, describe(left))
