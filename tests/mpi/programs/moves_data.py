"""Moves arrays between the program and the workers, one of which dies in the middle of it."""

import os
import resource
import signal
import threading

import numpy as np
from common import show
from distributed import Client, wait

COUNT, SIZE = 8, 3_000_000  # arrays, and numbers in each


def make(number: int) -> np.ndarray:
    return np.full(SIZE, float(number))


def peak() -> int:
    """Bytes of memory that this process had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


client = Client()
client.gather(client.scatter([make(1)]))
before = client.run_on_scheduler(peak)
arrays = [make(number) for number in range(COUNT)]
scattered = client.scatter(arrays)
sums = client.gather(client.map(np.sum, scattered))
made = client.map(make, range(COUNT))
wait(made)
same = [bool((a == b).all()) for a, b in zip(client.gather(made), arrays, strict=True)]
grown = client.run_on_scheduler(peak) - before

victim = next(iter(client.run(os.getpid).values()))
threading.Timer(0.02, os.kill, (victim, signal.SIGKILL)).start()
again = [float(found.sum()) for found in client.gather(made)]
show(
    "result",
    {
        "direct": client.direct_to_workers,
        "moved": 2 * COUNT * SIZE * 8,
        "grown": grown,
        "sums": [sum(sums), sum(again)],
        "same": all(same),
    },
)
