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
