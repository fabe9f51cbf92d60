"""Dask tasks that hang for good; each makes a file in the current folder when it is that far."""

import itertools
import os
import socket
import threading
import time
from pathlib import Path

import psutil
from distributed import Lock, get_worker

INNER, OUTER = threading.Lock(), threading.Lock()
BOTH = threading.Barrier(2)
HOARD = []


def cluster_locks(first: str, second: str) -> None:
    """Take two of Dask's locks in this order, the second once another task has it."""
    with Lock(first):
        Path(first).touch()
        while not os.path.exists(second):
            time.sleep(0.01)
        Lock(second).acquire()


def process_locks(first: str) -> None:
    """Take two locks of the process, in two orders in two threads."""
    with INNER if first == "inner.there" else OUTER:
        BOTH.wait()
        Path(first).touch()
        (OUTER if first == "inner.there" else INNER).acquire()


def barrier(context, **shared: object) -> None:
    """All ranks but the last wait for a message, and the last for something else."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as mine:
        mine.bind(("127.0.0.1", 0))
        Path(f"rank{context.rank}.there").touch()
        if context.rank == context.world_size - 1:
            threading.Event().wait()
        come_to_barrier(mine)


def come_to_barrier(mine: socket.socket) -> None:
    mine.recv(1)


def nccl_barrier(context, **shared: object) -> None:
    """All ranks sum once over NCCL; to the second time the last one does not come."""
    import torch

    torch.cuda.set_device(context.device)
    torch.distributed.init_process_group(
        "nccl",
        init_method=f"tcp://{context.master_addr}:{context.master_port}",
        rank=context.rank,
        world_size=context.world_size,
    )
    ones = torch.ones(1000, device=context.device)
    come_to_all_reduce(ones)
    Path(f"rank{context.rank}.there").touch()
    if context.rank == context.world_size - 1:
        threading.Event().wait()
    come_to_all_reduce(ones)


def come_to_all_reduce(ones) -> None:
    import torch

    torch.distributed.all_reduce(ones)
    ones.sum().item()  # of the result, so it waits for it


def full_device(name: str) -> None:
    """Fill the GPU with what Dask does not know of, and wait for room that nobody makes."""
    import cupy

    size = 2**30
    while size >= 2**20:
        try:
            HOARD.append(cupy.cuda.runtime.malloc(size))
        except cupy.cuda.runtime.CUDARuntimeError:
            size //= 2
    Path(name).touch()
    threading.Event().wait()


def full(share: float) -> None:
    """Fill the worker's memory to this share of its limit, with what Dask does not know of."""
    limit = get_worker().memory_manager.memory_limit
    while psutil.Process().memory_info().rss < share * limit:
        HOARD.append(b"x" * 2**20)


def forget() -> None:
    HOARD.clear()


def nothing(number: int) -> None:
    pass


def compiled(name: str) -> None:
    """Run in C for ever, with Python's lock held."""
    Path(name).touch()
    sum(itertools.repeat(0))


def works(name: str) -> None:
    Path(name).touch()
    while True:
        time.sleep(0.1)
